"""Random plans on workers of two threads, with the real dispatcher and threads of moves: no worker waits for ever."""

import asyncio
import itertools
import queue
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
import torch
from msgspec.structs import replace

from realhf.master.loop import Dispatcher, PlannedGraph
from realhf.master.state import Node
from realhf.rundir.flight_recorder import ActivityWriter
from realhf.transport.messages import (
    CallFunction,
    FollowParameters,
    Move,
    PrepareMove,
    Reallocate,
    Reply,
    Shutdown,
    Span,
    ToWorker,
)
from realhf.worker.channels import Channels
from realhf.worker.move_thread import MoveThread
from tests.unit.master.cluster import Answered, answer, planned_graph
from tests.unit.master.test_state import random_copies, random_graph, random_plan
from tests.waiting import PATIENCE_S

STEPS = 4
SEEDS = 12  # as many plans again have copies from copies
SPAN = Span("compute", "", 0.0, 0.0)


class Meetings:
    """Where the workers of a call, or of a move, wait for each other."""

    def __init__(self) -> None:
        self._barriers: dict[tuple[str, Node], threading.Barrier] = {}
        self._lock = threading.Lock()

    def meet(self, kind: str, node: Node, devices: frozenset[int]) -> None:
        with self._lock:
            barrier = self._barriers.setdefault((kind, node), threading.Barrier(len(devices)))
        barrier.wait(PATIENCE_S)


class Worker:
    """Executes requests as a model worker does, but that calls and moves are meetings."""

    def __init__(self, rank: int, planned: PlannedGraph, meetings: Meetings, send: "Send", random: Random):
        self.inbox: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        self.moves: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self.computed: list[Node] = []
        self.moved: list[Node] = []
        self._rank, self._planned, self._meetings, self._send, self._random = rank, planned, meetings, send, random
        with tempfile.NamedTemporaryFile() as file:
            activity = ActivityWriter(Path(file.name))
        channels = Channels(activity, self.moves, self._report, self._report)
        self._move_thread = MoveThread(channels, self._move, torch.device("cpu"), PATIENCE_S)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _report(self, reply: Reply | Exception) -> None:
        self._send(self._rank, reply)

    def _move(self, move: Move) -> None:
        node = Node(move.batch.step, move.call if isinstance(move, Reallocate) else move.name)
        self._meetings.meet("move", node, self._planned.movers[node.call])
        self.moved.append(node)

    def _serve(self) -> None:
        while not isinstance(request := self.inbox.get(), Shutdown):
            self._move_thread.wait()
            if self._random.random() < 0.2:
                threading.Event().wait(0.001)  # others get ahead
            match request:
                case CallFunction(call=call, batch=batch, layout=layout):
                    node = Node(batch.step, call)
                    self._meetings.meet("call", node, frozenset(layout.mesh.devices))
                    self.computed.append(node)
                    self._answer(request)
                case PrepareMove():
                    self._move_thread.prepared(request)
                    self._answer(request)
        self._move_thread.close()

    def _answer(self, request: Answered) -> None:
        self._report(answer(self._planned, self._rank, request, SPAN))


class Send:
    """Brings replies to the dispatcher, and what goes wrong to the test."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.dispatcher: Dispatcher | None = None
        self.failed: asyncio.Future[None] = self.loop.create_future()

    def __call__(self, worker: int, reply: Reply | Exception) -> None:
        assert self.dispatcher is not None
        if isinstance(reply, Exception):
            self.loop.call_soon_threadsafe(self.failed.set_exception, reply)
        else:
            self.loop.call_soon_threadsafe(self.dispatcher.reply, worker, reply)


async def run(seed: int) -> int:
    """Returns how many moves there were."""
    random = Random(seed)
    graph = random_graph(random)
    plan = random_plan(graph, random)
    if seed >= SEEDS:
        graph, plan = random_copies(random)
    plan = replace(plan, offload=())
    planned, meetings, send = planned_graph(graph, plan, 4), Meetings(), Send()
    workers = [Worker(rank, planned, meetings, send, Random(rank)) for rank in range(plan.num_devices)]

    async def deliver(worker: int, message: ToWorker) -> None:
        is_move = isinstance(message, Reallocate | FollowParameters)
        (workers[worker].moves if is_move else workers[worker].inbox).put(message)

    send.dispatcher = Dispatcher(deliver, plan.num_devices, lambda *_: None)
    order = plan.unrolled(graph, STEPS)
    running = asyncio.ensure_future(
        send.dispatcher.run_steps(planned, order, plan.max_steps_in_flight, lambda *_: None)
    )
    await asyncio.wait({running, send.failed}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert running.done(), "deadlock, or a thread of moves failed"
    await running
    for worker in workers:
        worker.inbox.put(Shutdown())
        worker.thread.join(PATIENCE_S)
    expected = [Node(step, name) for name, step in order]
    for rank, worker in enumerate(workers):
        layouts = {name: plan.layout(name) for name in graph.calls}
        here = [node for node in expected if node.call in layouts and rank in layouts[node.call].mesh.devices]
        assert worker.computed == here, f"worker {rank} leaves the plan's order"
    check_one_order([worker.moved for worker in workers])
    return len({node for worker in workers for node in worker.moved})


def check_one_order(orders: list[list[Node]]) -> None:
    for one, other in itertools.combinations(orders, 2):
        common = set(one) & set(other)
        assert [node for node in one if node in common] == [node for node in other if node in common]


@pytest.mark.parametrize("seed", range(2 * SEEDS))
def test_random_plans_come_to_their_end(seed: int) -> None:
    asyncio.run(run(seed))


def test_the_random_plans_have_moves() -> None:
    counts: defaultdict[bool, int] = defaultdict(int)
    for seed in range(SEEDS):
        random = Random(seed)
        graph = random_graph(random)
        planned = planned_graph(graph, random_plan(graph, random), 4)
        counts[any(movers - planned.devices[name] for name, movers in planned.movers.items())] += 1
    assert counts[True] >= 6, "threads of moves are for workers that only send"
