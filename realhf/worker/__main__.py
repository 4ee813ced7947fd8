"""Entry of a worker process: `python -m realhf.worker RUN_DIR` (the launcher's environment tells the index)."""

import logging
import os
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from realhf.api.errors import RunError
from realhf.api.run import Run, load_run
from realhf.engine.paged_attention import describe_attention
from realhf.parallel.host_group import PeerError
from realhf.scheduler.activity import ActivityWriter
from realhf.scheduler.base import worker_index, worker_name
from realhf.scheduler.logs import start_logging
from realhf.scheduler.run_directory import RunDirectory
from realhf.transport.client import Client
from realhf.transport.codec import Codec
from realhf.transport.keys import load_worker_keys
from realhf.transport.messages import DumpStacks, Failure, Heartbeat, Hello, Ready, Shutdown, ToMaster, ToWorker
from realhf.transport.rendezvous import wait_for_master
from realhf.worker.allocator import keep_freed_memory
from realhf.worker.model_worker import ModelWorker
from realhf.worker.requests import refusal
from realhf.worker.stacks import write_stacks

logger = logging.getLogger("realhf.worker")

RECEIVE_TIMEOUT_S = 3600.0


def pick_device() -> torch.device:
    """This process's GPU (the launcher shows it one), else the CPU with one thread a worker."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return torch.device("cpu")


def join_world(directory: RunDirectory, run: Run, rank: int, device: torch.device) -> None:
    """Makes the process group of all workers, who meet through a file in the run directory."""
    if run.spec.network_interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", run.spec.network_interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", run.spec.network_interface)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(directory.rendezvous / "torch"), run.spec.num_workers),
        rank=rank,
        world_size=run.spec.num_workers,
        timeout=timedelta(seconds=run.spec.setup_timeout_s),
    )
    # NCCL wants a collective of all ranks before the first message between two of them.
    dist.all_reduce(torch.zeros(1, device=device))


def serve(
    directory: RunDirectory, rank: int, run: Run, client: "Client[ToWorker, ToMaster]", activity: ActivityWriter
) -> None:
    """Sets up and executes requests until told to stop. Raises what a request raises, with its id noted."""
    device = pick_device()
    logger.info("attention on %s: %s", device.type, "; ".join(describe_attention(device.type)))
    activity.set("setup: joining the other workers")
    join_world(directory, run, rank, device)
    worker = ModelWorker(run, rank, device, directory, activity.set, client.send)
    client.send(Ready())
    logger.info("ready")
    activity.set("waiting for the first request")
    while True:
        request = client.receive(RECEIVE_TIMEOUT_S)
        match request:
            case None:
                raise TimeoutError(f"no request from the master for {RECEIVE_TIMEOUT_S:g} s")
            case Shutdown():
                return
            case _:
                if why := refusal(request, run, directory.checkpoints):
                    client.send(Failure(request_id=None, text=f"refused {why}"))
                    continue
                reply = worker.handle(request)
                if reply is not None:
                    client.send(reply)


def blames_peer(error: BaseException) -> bool:
    """Whether an error only says that another worker went away."""
    if isinstance(error, PeerError) or isinstance(error.__cause__, PeerError):
        return True
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "connection refused", "broken pipe", "timed out")
    return isinstance(error, RuntimeError | TimeoutError | RunError) and any(sign in text for sign in signs)


def main() -> int:
    keep_freed_memory()
    directory = RunDirectory.open(Path(sys.argv[1]))
    rank = worker_index(os.environ)
    assert rank is not None, "a launcher tells a worker its index"
    run = load_run(directory.experiment, directory.plan)
    activity = ActivityWriter(directory.activity(worker_name(rank)))
    start_logging(worker_name(rank), lambda: activity.text)
    keys = load_worker_keys(directory.keys, worker=rank)

    def do_at_once(message: ToWorker) -> bool:
        if not isinstance(message, DumpStacks):
            return False
        write_stacks(directory.stacks(worker_name(rank)), activity.text)
        return True

    master = wait_for_master(directory.rendezvous, timeout_s=run.spec.setup_timeout_s, public_key=keys.master)
    client: Client[ToWorker, ToMaster] = Client(
        master.address,
        keys,
        incoming=Codec[ToWorker](ToWorker),
        outgoing=Codec[ToMaster](ToMaster),
        heartbeat=lambda: Heartbeat(activity=activity.text),
        urgent=do_at_once,
    )
    client.send(Hello(worker=rank, pid=os.getpid(), host=socket.gethostname()))
    try:
        serve(directory, rank, run, client, activity)
    except Exception as error:
        logger.exception("failed: %s", activity.text)
        client.send(Failure(request_id=None, text=traceback.format_exc(), blames_peer=blames_peer(error)))
        client.close()
        # Groups whose peers are gone can block an orderly end for minutes; there is nothing left to save.
        sys.stderr.flush()
        os._exit(1)
    client.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
