"""A cluster in virtual time: workers that execute what the real dispatcher sends them, first in, first out, and on
a lane of its own moves of parameters."""

import asyncio
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import ExecutionPlan
from realhf.master.loop import Dispatcher, PlannedGraph
from realhf.master.state import Node
from realhf.transport.messages import (
    CallFunction,
    FollowParameters,
    KeyMetadata,
    PrepareMove,
    Reallocate,
    Reply,
    Span,
    ToWorker,
)

Seconds = Callable[[Node], float]
Answered = CallFunction | PrepareMove | Reallocate | FollowParameters


@dataclass(frozen=True)
class Task:
    """What several workers do together: a call, or the move of parameters for one, or for a model that follows."""

    is_move: bool
    node: Node
    devices: frozenset[int]


class VirtualCluster:
    """Runs a graph under a plan; a node takes `seconds(node)`, the reallocation for a call `move_seconds(node)`, all
    else no time. Every sample has three tokens.

    `spans` tells when each node ran, `order` what each worker computed or prepared for; `dead` workers take requests
    and answer none. A worker carries out one move at a time, or with `wide_lanes` as many as there are, as the
    planner's simulator has it.
    """

    def __init__(
        self,
        planned: PlannedGraph,
        num_workers: int,
        seconds: Seconds,
        dead: frozenset[int] = frozenset(),
        move_seconds: Seconds = lambda _: 0.0,
        wide_lanes: bool = False,
    ):
        self.now_s = 0.0
        self.spans: dict[Node, tuple[float, float]] = {}
        self.order: list[list[Node]] = [[] for _ in range(num_workers)]
        self.num_messages = 0
        self.dispatcher = Dispatcher(self._send, num_workers, lambda *_: None, lambda: self.now_s)
        self._planned, self._dead, self._wide_lanes = planned, dead, wide_lanes
        self._seconds, self._move_seconds = seconds, move_seconds
        self._meshes = {name: frozenset(call.mesh.devices) for name, call in planned.calls.items()}
        self._queues: list[deque[CallFunction | PrepareMove]] = [deque() for _ in range(num_workers)]
        self._lanes: list[deque[Node]] = [deque() for _ in range(num_workers)]
        self._moves: dict[tuple[int, Node], Reallocate | FollowParameters] = {}
        self._arrived: defaultdict[Node, int] = defaultdict(int)  # of the workers of a call or move, who are at it
        self._ends: list[tuple[float, int, Task]] = []
        self._count = itertools.count()

    async def run(self, order: list[tuple[str, int]], max_steps_in_flight: int) -> bool:
        """Returns when all has ended (True), or when nothing moves any more."""
        driver = asyncio.ensure_future(
            self.dispatcher.run_steps(self._planned, order, max_steps_in_flight, lambda *_: None)
        )
        await _settle()
        while self._ends:
            self.now_s, _, task = heapq.heappop(self._ends)
            self._end(task)
            await _settle()
        if not driver.done():
            driver.cancel()
            return False
        await driver
        return True

    async def _send(self, worker: int, message: ToWorker) -> None:
        self.num_messages += 1
        match message:
            case CallFunction() | PrepareMove():
                self._queues[worker].append(message)
                if len(self._queues[worker]) == 1:
                    self._come_to(worker)
            case Reallocate(call=name, batch=batch) | FollowParameters(name=name, batch=batch):
                node = Node(batch.step, name)
                self._moves[worker, node] = message
                self._lanes[worker].append(node)
                if self._wide_lanes or len(self._lanes[worker]) == 1:
                    self._arrive(Task(True, node, self._planned.movers[name]))

    def _come_to(self, worker: int) -> None:
        """The worker is at its oldest request."""
        if worker in self._dead or not self._queues[worker]:
            return
        match self._queues[worker][0]:
            case PrepareMove() as request:
                self.dispatcher.reply(worker, self._reply(worker, request))  # and stays at it until the move has ended
            case CallFunction(call=call, batch=batch):
                self._arrive(Task(False, Node(batch.step, call), self._meshes[call]))

    def _arrive(self, task: Task) -> None:
        """One more of the workers of a task is at it; the last one starts it."""
        self._arrived[task.node] += 1
        if self._arrived[task.node] < len(task.devices):
            return
        del self._arrived[task.node]
        is_reallocation = task.is_move and task.node.call in self._planned.graph.calls
        end_s = self.now_s + (self._move_seconds if is_reallocation else self._seconds)(task.node)
        heapq.heappush(self._ends, (end_s, next(self._count), task))
        if not is_reallocation:
            self.spans[task.node] = (self.now_s, end_s)

    def _end(self, task: Task) -> None:
        node, come_to = task.node, []
        for worker in sorted(task.devices):
            request = self._moves.pop((worker, node)) if task.is_move else self._queues[worker][0]
            assert not isinstance(request, PrepareMove)
            if task.is_move:
                self._lanes[worker].remove(node)
            if worker in (self._planned.devices[node.call] if task.is_move else task.devices):
                self._queues[worker].popleft()
                come_to.append(worker)
                if not task.is_move or node.call not in self._planned.graph.calls:
                    self.order[worker].append(node)
            self.dispatcher.reply(worker, self._reply(worker, request))
        for worker in come_to:
            self._come_to(worker)
        if not self._wide_lanes and task.is_move:
            for worker in sorted(task.devices):
                if self._lanes[worker]:
                    following = self._lanes[worker][0]
                    self._arrive(Task(True, following, self._planned.movers[following.call]))

    def _reply(self, worker: int, request: Answered) -> Reply:
        return answer(self._planned, worker, request, Span("compute", "", self.now_s, self.now_s))


def answer(planned: PlannedGraph, worker: int, request: Answered, span: Span) -> Reply:
    """What a worker replies; every sample of a call's outputs has three tokens."""
    if not isinstance(request, CallFunction):
        return Reply(request_id=request.request_id, span=span)
    definition = planned.graph.calls[request.call]
    keys = definition.output_data if worker in definition.protocol.collect(request.layout) else ()
    ids = tuple(sample for mini_batch in request.mini_batches for sample in mini_batch)
    column = KeyMetadata(dtype="int64", trailing=(), ids=ids, lengths=(3,) * len(ids), digests=b"abcdefgh" * len(ids))
    return Reply(request_id=request.request_id, span=span, outputs=dict.fromkeys(keys, column))


def planned_graph(graph: DataflowGraph, plan: ExecutionPlan, batch_size: int) -> PlannedGraph:
    homes = {model: plan.layout(plan.home(graph, model)) for model in graph.models}
    return PlannedGraph("train", graph, plan.calls, homes, batch_size)


async def _settle() -> None:
    """The dispatcher awaits nothing but replies, so that a few turns of the loop are enough."""
    for _ in range(8):
        await asyncio.sleep(0)
