"""What the control plane costs: an empty call on all of N workers, from the first request to the last reply.

The master's dispatcher and server are the real ones, over CURVE sockets of this host. Up to 8 workers are processes of
their own with the real client; more are simulated, as connections of one process that answer at once. `--quick` leaves
out 1,024 workers.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import zmq
from lib.common import case, finish, parse_arguments

from realhf.architecture.model import DecoderConfig
from realhf.dataflow.graph import INFERENCE, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.plan import CallPlan
from realhf.master.loop import CallRecord, Dispatcher, PlannedGraph
from realhf.transport.client import Client
from realhf.transport.codec import Codec
from realhf.transport.keys import load_master_keys, load_worker_keys, make_run_keys
from realhf.transport.messages import CallFunction, Heartbeat, Ready, Reply, Shutdown, Span, ToMaster, ToWorker
from realhf.transport.server import Server

MEASURES = (
    "realhf/master/loop.py",
    "realhf/master/moves.py",
    "realhf/master/open_requests.py",
    "realhf/master/replies.py",
    "realhf/master/state.py",
    "realhf/transport",
)
REAL_WORKERS = (4, 8)
SIMULATED_WORKERS = (64, 1024)
FAN_OUT_TARGET_S = 1e-3  # median, on 8 workers
WARM_UP = 5
TINY = DecoderConfig(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, vocab_size=8)


def main() -> None:
    arguments = parse_arguments(__doc__)
    repeats = 200 if arguments.quick else 1000
    sizes = REAL_WORKERS + (SIMULATED_WORKERS[:-1] if arguments.quick else SIMULATED_WORKERS)
    rows = []
    for num_workers in sizes:
        times = measure(num_workers, max(20, repeats * 4 // num_workers) + WARM_UP)
        rows += rows_of(num_workers, times)
    finish("control_plane", rows, arguments.json)


def measure(num_workers: int, repeats: int) -> list[tuple[float, float]]:
    """Of each repeat: seconds until all requests were sent, and until all replies were there."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        make_run_keys(keys, num_workers=num_workers)
        return asyncio.run(_measure(keys, num_workers, repeats))


async def _measure(keys: Path, num_workers: int, repeats: int) -> list[tuple[float, float]]:
    server: Server[ToMaster, ToWorker] = Server(
        "127.0.0.1",
        load_master_keys(keys, num_workers=num_workers),
        incoming=Codec[ToMaster](ToMaster),
        outgoing=Codec[ToWorker](ToWorker),
    )
    processes = start_workers(server.address, keys, num_workers)
    ready: set[int] = set()
    while len(ready) < num_workers:
        ready.add((await server.recv())[0])
    sent_at = 0.0

    async def send(worker: int, message: ToWorker) -> None:
        nonlocal sent_at
        await server.send(worker, message)
        if isinstance(message, CallFunction):
            sent_at = time.perf_counter()

    dispatcher = Dispatcher(send, num_workers, lambda *_: None)

    async def receive() -> None:
        while True:
            worker, message = await server.recv()
            if isinstance(message, Reply):
                dispatcher.reply(worker, message)

    receiver = asyncio.create_task(receive())
    planned, times = empty_call(num_workers), []
    for step in range(repeats):
        start = time.perf_counter()
        ended: list[float] = []

        def on_step(_: int, records: list[CallRecord], ended: list[float] = ended) -> None:
            ended.append(time.perf_counter())

        await dispatcher.run_steps(planned, [("model_inference", step)], 1, on_step)
        times.append((sent_at - start, ended[0] - start))
    receiver.cancel()
    for worker in range(num_workers):
        await server.send(worker, Shutdown())
    for process in processes:
        await asyncio.to_thread(process.join, 30)
    server.close()
    return times[WARM_UP:]


def empty_call(num_workers: int) -> PlannedGraph:
    """A step of one call on all workers, one sample each, with no output."""
    call = ModelFunctionCallDef(
        model_name="model",
        model_type=TINY,
        interface_type=INFERENCE,
        interface_impl=InterfaceConfig(),
        input_data=["x"],
    )
    plan = CallPlan(devices=(0, num_workers), dp=num_workers)
    graph = DataflowGraph([call], ["x"])
    return PlannedGraph("train", graph, {call.name: plan}, {"model": plan.layout}, num_workers)


def start_workers(address: str, keys: Path, num_workers: int) -> list[multiprocessing.Process]:
    """As many processes as workers, or one for all where they are simulated."""
    spawn = multiprocessing.get_context("spawn")
    tasks: list[tuple[Callable[..., None], int]] = (
        [(real_worker, i) for i in range(num_workers)]
        if num_workers in REAL_WORKERS
        else [(simulated_workers, num_workers)]
    )
    processes = [spawn.Process(target=target, args=(address, keys, number)) for target, number in tasks]
    for process in processes:
        process.start()
    return processes


def answer(request: CallFunction) -> Reply:
    now = time.time()
    return Reply(request_id=request.request_id, span=Span("compute", request.call, now, now))


def real_worker(address: str, keys: Path, index: int) -> None:
    """A worker without a model."""
    client: Client[ToWorker, ToMaster] = Client(
        address,
        load_worker_keys(keys, worker=index),
        incoming=Codec[ToWorker](ToWorker),
        outgoing=Codec[ToMaster](ToMaster),
        heartbeat=lambda: Heartbeat(activity="idle"),
    )
    client.send(Ready(device="CPU"))
    while not isinstance(request := client.receive(60), Shutdown):
        if isinstance(request, CallFunction):
            client.send(answer(request))
    client.close()


def simulated_workers(address: str, keys: Path, count: int) -> None:
    """Connections with the keys of `count` workers; each request is answered when it comes."""
    incoming, outgoing = Codec[ToWorker](ToWorker), Codec[ToMaster](ToMaster)
    context, poller = zmq.Context(io_threads=1), zmq.Poller()
    context.set(zmq.MAX_SOCKETS, 2 * count)
    for index in range(count):
        socket, own = context.socket(zmq.DEALER), load_worker_keys(keys, worker=index)
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
            own.master,
            own.own.public,
            own.own.secret,
        )
        socket.connect(address)
        socket.send(outgoing.encode(Ready(device="CPU")))
        poller.register(socket, zmq.POLLIN)
    open_sockets = count
    while open_sockets:
        for socket, _ in poller.poll(60_000):
            match incoming.decode(socket.recv()):
                case CallFunction() as request:
                    socket.send(outgoing.encode(answer(request)))
                case Shutdown():
                    open_sockets -= 1
    context.destroy(linger=0)


def rows_of(num_workers: int, times: list[tuple[float, float]]) -> list[dict]:
    """Median and 99th percentile; the target of the fan-out is one of 8 workers, and grows with their number."""
    fan_out = statistics.median(sent for sent, _ in times)
    ended = sorted(end for _, end in times)
    target = FAN_OUT_TARGET_S * max(1, num_workers / 8)
    kind = "real" if num_workers in REAL_WORKERS else "simulated"
    median, worst = statistics.median(ended), ended[int(0.99 * len(ended))]
    return [
        case(
            f"fan-out to {num_workers} {kind} workers, median",
            fan_out,
            "s",
            baseline=target,
            ratio=target / fan_out,
            target=target,
            holds=fan_out <= target,
        ),
        *(
            case(
                f"empty call on {num_workers} {kind} workers, request to last reply, {name}",
                value,
                "s",
                baseline=num_workers * FAN_OUT_TARGET_S,
                ratio=num_workers * FAN_OUT_TARGET_S / value,
                target=num_workers * FAN_OUT_TARGET_S,
                holds=value <= num_workers * FAN_OUT_TARGET_S,
            )
            for name, value in (("median", median), ("p99", worst))
        ),
    ]


if __name__ == "__main__":
    main()
