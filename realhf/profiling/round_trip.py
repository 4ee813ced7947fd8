"""Measures the cost of a call without its computation: request, gathering inputs, keeping outputs, reply."""

import asyncio
import statistics
import threading
import time
from pathlib import Path

import torch

from realhf.base.errors import RunError
from realhf.engine.batch import Batch, concatenate
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.transport.client import Client
from realhf.transport.clock import now_s
from realhf.transport.codec import Codec
from realhf.transport.keys import load_master_keys, load_worker_keys, make_run_keys
from realhf.transport.messages import (
    BatchKey,
    CallFunction,
    Heartbeat,
    Hello,
    Reply,
    Shutdown,
    Span,
    ToMaster,
    ToWorker,
)
from realhf.transport.rendezvous import MasterAddress, publish_master, wait_for_master
from realhf.transport.server import Server
from realhf.worker.store import SampleStore, describe

ROUNDS = 50
INPUTS, OUTPUTS = ("prompt", "seq", "reward"), ("logprob", "value")
BATCH = BatchKey("train", 0)


def median_round_trip_s(directory: Path, rank: int, num_workers: int, batch_size: int, timeout_s: float) -> float:
    """Median seconds from sending an empty call to all workers until the last reply; 0 on ranks other than 0.

    Rank 0 is the master and the others are the workers (a thread of rank 0 if it is alone), over the transport of a
    run, with messages as of a call on `batch_size` samples. All ranks see `directory`, which is private and new.
    Raises RunError if an end does not hear from the other within `timeout_s`.
    """
    answering = max(num_workers - 1, 1)
    if rank > 0:
        _answer(directory, rank - 1, batch_size, timeout_s)
        return 0.0
    # The address is published after the keys are written, and the workers read them after they have seen it.
    make_run_keys(directory / "keys", num_workers=answering)
    if num_workers == 1:
        threading.Thread(target=_answer, args=(directory, 0, batch_size, timeout_s), daemon=True).start()
    try:
        return asyncio.run(asyncio.wait_for(_ask(directory, answering, batch_size), timeout_s))
    except TimeoutError as error:
        raise RunError(f"the workers did not answer empty calls within {timeout_s:g} s") from error


async def _ask(directory: Path, num_workers: int, batch_size: int) -> float:
    keys = load_master_keys(directory / "keys", num_workers=num_workers)
    server: Server[ToMaster, ToWorker] = Server(
        "127.0.0.1", keys, incoming=Codec[ToMaster](ToMaster), outgoing=Codec[ToWorker](ToWorker)
    )
    try:
        publish_master(directory, MasterAddress(address=server.address, public_key=keys.own.public.decode()))
        while len(server.known_workers) < num_workers:
            await server.recv()
        times = []
        for round_number in range(ROUNDS):
            request = _empty_call(round_number, num_workers, batch_size)
            start = time.perf_counter()
            for worker in range(num_workers):
                await server.send(worker, request)
            waiting = set(range(num_workers))
            while waiting:
                worker, message = await server.recv()
                if isinstance(message, Reply):
                    waiting.discard(worker)
            times.append(time.perf_counter() - start)
        for worker in range(num_workers):
            await server.send(worker, Shutdown())
    finally:
        server.close()
    return statistics.median(times)


def _answer(directory: Path, worker: int, batch_size: int, timeout_s: float) -> None:
    master = wait_for_master(directory, timeout_s=timeout_s)
    client: Client[ToWorker, ToMaster] = Client(
        master.address,
        load_worker_keys(directory / "keys", worker=worker),
        incoming=Codec[ToWorker](ToWorker),
        outgoing=Codec[ToMaster](ToMaster),
        heartbeat=lambda: Heartbeat(activity="answering empty calls"),
    )
    client.send(Hello(worker=worker, pid=0, host=""))
    store = SampleStore()
    for key in INPUTS:
        store.put(BATCH, key, range(batch_size), torch.zeros(batch_size, 8))
    try:
        while True:
            match client.receive(timeout_s):
                case CallFunction() as request:
                    client.send(_execute(store, request))
                case Shutdown():
                    return
                case None:
                    raise RunError(f"no call from the master within {timeout_s:g} s")
    finally:
        client.close()


def _execute(store: SampleStore, request: CallFunction) -> Reply:
    """The work of a model worker around the computation of a call, with its inputs as the outputs."""
    start = now_s()
    parts = [store.add_columns(request.batch, Batch(ids, {}), INPUTS) for ids in request.mini_batches]
    samples = concatenate(parts)
    for key in OUTPUTS:
        store.put(request.batch, key, samples.ids, samples.data["seq"])
    outputs = {key: describe(samples.ids, samples.data["seq"]) for key in OUTPUTS}
    span = Span("compute", "empty", start, now_s())
    return Reply(request_id=request.request_id, span=span, outputs=outputs)


def _empty_call(request_id: int, num_workers: int, batch_size: int) -> CallFunction:
    return CallFunction(
        request_id=request_id,
        batch=BATCH,
        call="empty",
        layout=Layout(DeviceMesh(0, num_workers), ParallelStrategy(dp=num_workers)),
        mini_batches=(tuple(range(batch_size)),),
        micro_batches=1,
        version=0,
    )
