"""Entry of a worker process: `python -m realhf.worker RUN_DIR` (the launcher's environment tells the index)."""

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from realhf.base.errors import RunError
from realhf.cpu.host_group import PeerError
from realhf.engine.generate.paged_attention import describe_attention, missing_kernels
from realhf.launch.process import MASTERLESS_RETURNCODE, TOLD_RETURNCODE, worker_index
from realhf.machine.network import addresses, in_words, interface_of, source_of
from realhf.parallel.groups import make_world
from realhf.rundir.flight_recorder import ActivityWriter
from realhf.rundir.logs import logging_to, start_logging
from realhf.rundir.paths import RunDirectory, worker_name
from realhf.rundir.run import Run, load_run
from realhf.rundir.starts import StaleStartError, check_start, own_start
from realhf.transport.client import Client, Silence, host_of
from realhf.transport.clock import now_s
from realhf.transport.codec import Codec
from realhf.transport.keys import load_worker_keys
from realhf.transport.messages import (
    Alive,
    DumpStacks,
    Failure,
    FollowParameters,
    Heartbeat,
    Hello,
    Move,
    Ready,
    Reallocate,
    Shutdown,
    StoreReply,
    ToMaster,
    ToWorker,
)
from realhf.transport.rendezvous import wait_for_master
from realhf.worker.allocator import give_back_freed_memory, keep_freed_memory
from realhf.worker.channels import Channels
from realhf.worker.device import check_device, device_name, own_device
from realhf.worker.interfaces import explain
from realhf.worker.master_store import MasterStore
from realhf.worker.model_worker import ModelWorker
from realhf.worker.reachability import join_network
from realhf.worker.requests import refusal
from realhf.worker.stacks import write_stacks

logger = logging.getLogger("realhf.worker")

RECEIVE_TIMEOUT_S = 3600.0
CONNECT_S = 45.0  # in which a master that has published its address has to answer
IN_PROCESS_WAIT_S = 0.02  # how long the master, which shares the process, is waited for at a time


def join_world(store: dist.Store, run: Run, rank: int, device: torch.device, interface: str) -> None:
    """Makes the process group of all workers, who meet in `store`.

    `interface`: that on which the master is reached, which gloo takes where the run names none.
    """
    store.set_timeout(timedelta(seconds=run.spec.setup_timeout_s))
    join_network(store, rank, run.spec.num_workers, device, run.spec.network_interface, interface)
    timeout_s = run.spec.setup_timeout_s
    if device.type == "cuda":  # stages send through this group while they compute, and NCCL ends who waits longer
        timeout_s = max(timeout_s, 2 * run.deadlines.longest_s)
    store.set_timeout(timedelta(seconds=timeout_s))  # NCCL's groups meet here at their first use, some ranks much later
    make_world(store, rank, run.spec.num_workers, device, timeout_s)
    # NCCL wants a collective of all ranks before the first message between two of them.
    dist.all_reduce(torch.zeros(1, device=device))


def blames_peer(error: BaseException) -> bool:
    """Whether an error only says that another worker went away."""
    if isinstance(error, PeerError) or isinstance(error.__cause__, PeerError):
        return True
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "connection refused", "broken pipe", "timed out")
    return isinstance(error, RuntimeError | TimeoutError | RunError) and any(sign in text for sign in signs)


def _connected(
    directory: RunDirectory, run: Run, rank: int, activity: ActivityWriter, moves: "queue.SimpleQueue[Move | None]"
) -> "tuple[Client[ToWorker, ToMaster], MasterStore]":
    """The connection to the master, whose requests for moves go to the thread of moves; and the run's store, which
    lives as long as the connection."""
    keys = load_worker_keys(directory.keys, worker=rank)
    check_start(directory, own_start())  # so that these are not the keys of another

    def do_at_once(message: ToWorker) -> bool:
        match message:
            case Alive():
                pass
            case StoreReply():
                store.take(message)
            case DumpStacks():
                write_stacks(directory.stacks(worker_name(rank)), activity.text)
            case _ if why := refusal(message, run, directory.checkpoints):
                client.send(Failure(request_id=None, text=f"refused {why}"))
            case Reallocate() | FollowParameters():
                moves.put(message)
            case _:
                return False
        return True

    store = MasterStore(lambda request: client.send(request))
    master = wait_for_master(directory.rendezvous, timeout_s=run.spec.setup_timeout_s, public_key=keys.master)
    client: Client[ToWorker, ToMaster] = Client(
        master.address,
        keys,
        incoming=Codec[ToWorker](ToWorker),
        outgoing=Codec[ToMaster](ToMaster),
        heartbeat=lambda: _heartbeat(activity),
        urgent=do_at_once,
    )
    client.when_ended(lambda cause: store.end(f"the connection to the master has ended: {cause or 'it was closed'}"))
    longest_s = run.spec.master_timeout_s
    gone = partial(end_without_master, rank, master.address, activity)
    client.watch(Silence(min(CONNECT_S, longest_s), longest_s, gone))
    return client, store


def _heartbeat(activity: ActivityWriter) -> Heartbeat:
    return Heartbeat(activity=activity.text, sent_s=now_s())


# The id of the request that failed is known of calls beside the devices.
Fail = Callable[["Client[ToWorker, ToMaster]", ActivityWriter, BaseException, int | None], None]


def carry_out(
    directory: RunDirectory, run: Run, rank: int, activity: ActivityWriter, fail: Fail, wait_s: float
) -> Generator[None, None, None]:
    """Executes the master's requests until told to stop; moves of parameters on a thread of their own.

    Yields after each request, and every `wait_s` seconds while none comes. `fail` gets the exceptions of any thread. If
    it returns, the exception of the calling thread goes on.
    """
    moves: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
    start_id = own_start()
    client, store = _connected(directory, run, rank, activity, moves)
    with contextlib.ExitStack() as held:
        held.callback(client.close)
        client.send(Hello(worker=rank, pid=os.getpid(), host=socket.gethostname(), start_id=start_id))
        try:
            device = own_device()
            check_device(run.spec.hardware, rank, device)
            logger.info("attention on %s: %s", device.type, "; ".join(describe_attention(device.type)))
            for missing, remedy in missing_kernels(device.type).values():
                logger.warning("%s; remedy: %s", missing, remedy)
            activity.set("setup: joining the other workers")
            join_world(store, run, rank, device, interface_of(source_of(host_of(client.address))))
            held.callback(dist.destroy_process_group)
            # First, since that waits for NCCL's threads: one in the store would wait for a master that has ended.
            held.callback(store.end, "this worker ends")

            def fail_beside(error: BaseException, request_id: int | None = None, /) -> None:
                fail(client, activity, error, request_id)

            channels = Channels(activity, moves, client.send, fail_beside)
            worker = ModelWorker(run, rank, device, directory, channels)
            held.callback(worker.close)
            give_back_freed_memory()
            client.send(_heartbeat(activity))  # so that the master knows this host's clock before the first reply
            client.send(Ready(device=device_name(device)))
            logger.info("ready")
            activity.set("waiting for the first request")
            yield from _requests(client, worker, wait_s)
        except (Exception, SystemExit) as error:  # an interface may call sys.exit
            fail(client, activity, error, None)
            raise


def _requests(client: "Client[ToWorker, ToMaster]", worker: ModelWorker, wait_s: float) -> Iterator[None]:
    waited_s = 0.0
    while True:
        request = client.receive(wait_s)
        match request:
            case None:
                waited_s += wait_s
                if waited_s >= RECEIVE_TIMEOUT_S:
                    raise TimeoutError(f"no request from the master for {RECEIVE_TIMEOUT_S:g} s")
            case Shutdown():
                return
            case Alive() | StoreReply() | DumpStacks() | Reallocate() | FollowParameters():
                raise AssertionError(f"{type(request).__name__} is taken as it comes in")
            case _:
                waited_s = 0.0
                reply = worker.handle(request)
                if reply is not None:
                    client.send(reply)
        yield


def in_process(path: str) -> Generator[None, None, int]:
    """The run's only worker, on the calling thread: each step executes at most one request.

    There are no deadlines, since a person may look at an interface in a debugger for as long as they want.

    Returns the exit code. Raises the exception of a request.
    """
    keep_freed_memory()
    directory, name = RunDirectory.open(Path(path)), worker_name(0)
    run = load_run(directory).without_deadlines()
    failures: list[BaseException] = []

    def fail(_: object, activity: ActivityWriter, error: BaseException, request_id: int | None) -> None:
        logger.error("failed: %s", activity.text, exc_info=error)
        failures.append(error)

    with (
        contextlib.closing(ActivityWriter(directory.activity(name))) as activity,
        logging_to(directory.log(name), name, lambda: activity.main),
        contextlib.closing(carry_out(directory, run, 0, activity, fail, wait_s=IN_PROCESS_WAIT_S)) as requests,
    ):
        for _ in requests:
            if failures:  # on another thread
                raise failures[0]
            yield
    return 0


def end_process(
    ending: threading.Lock,
    client: "Client[ToWorker, ToMaster]",
    activity: ActivityWriter,
    error: BaseException,
    request_id: int | None,
) -> None:
    """Tells the master why, and ends the process. If two threads fail, only one of them does so."""
    ending.acquire()
    try:
        logger.error("failed: %s", activity.text, exc_info=error)
        client.send(Failure(request_id=request_id, text=explain(error), blames_peer=blames_peer(error)))
        client.close()
    finally:
        # Groups whose peers are gone can block an orderly end for minutes; there is nothing left to save.
        sys.stderr.flush()
        os._exit(TOLD_RETURNCODE)


def end_without_master(rank: int, address: str, activity: ActivityWriter, silent_s: float, has_heard: bool) -> None:
    """Ends the process, whose master is gone or cannot be reached: others may need the device."""
    host = host_of(address)
    who, source = f"worker {rank} on {socket.gethostname()}", in_words(source_of(host))
    if has_heard:
        text = f"{who} ends: nothing was heard of the master at {address} for {silent_s:.0f} s (from {source})"
    else:
        own = "; ".join(f"{name} {', '.join(each)}" for name, each in addresses().items() if name != "lo")
        text = (
            f"{who} ends: the master at {address} did not answer within {silent_s:.0f} s, asked from {source}; if "
            "the hosts have several networks, name the interface of one between them by --network-interface "
            f"(here: {own})"
        )
    logger.error("%s; it was in %s", text, activity.text)
    activity.set(text)
    sys.stderr.flush()
    os._exit(MASTERLESS_RETURNCODE)  # nothing is to be saved, and groups whose peers are gone can block for minutes


def main() -> int:
    keep_freed_memory()
    directory = RunDirectory.open(Path(sys.argv[1]))
    rank = worker_index()
    try:
        check_start(directory, own_start())  # before it opens any file of the run
        run = load_run(directory)
        activity = ActivityWriter(directory.activity(worker_name(rank)))
        start_logging(worker_name(rank), lambda: activity.main)
        logger.info("start %s", own_start() or "without an id")
        for _ in carry_out(directory, run, rank, activity, partial(end_process, threading.Lock()), RECEIVE_TIMEOUT_S):
            pass
    except StaleStartError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
