"""A cluster in virtual time: workers that execute what the real dispatcher sends them, first in, first out."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from realhf.api.graph import DataflowGraph
from realhf.api.plan import ExecutionPlan
from realhf.master.loop import Dispatcher, GraphRunner
from realhf.master.state import Node
from realhf.transport.messages import CallFunction, FollowParameters, KeyMetadata, Reallocate, Reply, Span, ToWorker

Seconds = Callable[[Node], float]
Request = CallFunction | Reallocate | FollowParameters


@dataclass(frozen=True)
class Task:
    """What several workers do together: a call, the reallocation for one, or a model following another."""

    kind: type
    node: Node
    devices: frozenset[int]


class VirtualCluster:
    """Runs a graph under a plan; a node takes `seconds(node)`, all else no time. Every sample has three tokens.

    `spans` tells when each node ran, `order` what each worker did; `dead` workers take requests and answer none.
    """

    def __init__(self, runner: GraphRunner, num_workers: int, seconds: Seconds, dead: frozenset[int] = frozenset()):
        self.now_s = 0.0
        self.spans: dict[Node, tuple[float, float]] = {}
        self.order: list[list[Node]] = [[] for _ in range(num_workers)]
        self.num_messages = 0
        self.dispatcher = Dispatcher(self._send, num_workers, lambda *_: None, lambda: self.now_s)
        self._runner, self._seconds, self._dead = runner, seconds, dead
        self._queues: list[deque[tuple[Task, Request]]] = [deque() for _ in range(num_workers)]
        self._tasks: dict[tuple[type, Node], Task] = {}
        self._at_head: dict[tuple[type, Node], int] = {}  # how many of its workers have come to a task
        self._ends: list[tuple[float, int, Task]] = []
        self._count = itertools.count()

    async def run(self, order: list[tuple[str, int]], max_steps_in_flight: int) -> bool:
        """Returns when all has ended (True), or when nothing moves any more."""
        driver = asyncio.ensure_future(
            self.dispatcher.run_steps(self._runner, order, max_steps_in_flight, lambda *_: None)
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
            case CallFunction(call=name) | Reallocate(call=name) | FollowParameters(name=name):
                task = self._task(type(message), Node(message.batch.step, name))
                self._queues[worker].append((task, message))
            case _:
                return
        if len(self._queues[worker]) == 1:
            self._come_to(worker)

    def _task(self, kind: type, node: Node) -> Task:
        runner = self._runner
        if (kind, node) not in self._tasks:
            devices = frozenset(runner.calls[node.call].layout.mesh.devices) if kind is CallFunction else None
            self._tasks[kind, node] = Task(kind, node, devices or runner.devices[node.call])
        return self._tasks[kind, node]

    def _come_to(self, worker: int) -> None:
        if worker in self._dead or not self._queues[worker]:
            return
        task = self._queues[worker][0][0]
        key = (task.kind, task.node)
        self._at_head[key] = self._at_head.get(key, 0) + 1
        if self._at_head[key] == len(task.devices):
            seconds = 0.0 if task.kind is Reallocate else self._seconds(task.node)
            heapq.heappush(self._ends, (self.now_s + seconds, next(self._count), task))
            if task.kind is not Reallocate:
                self.spans[task.node] = (self.now_s, self.now_s + seconds)

    def _end(self, task: Task) -> None:
        del self._at_head[task.kind, task.node]
        for worker in sorted(task.devices):
            _, request = self._queues[worker].popleft()
            if task.kind is not Reallocate:
                self.order[worker].append(task.node)
            self.dispatcher.reply(worker, self._reply(worker, request))
        for worker in sorted(task.devices):
            self._come_to(worker)

    def _reply(self, worker: int, request: Request) -> Reply:
        span = Span("compute", "", self.now_s, self.now_s)
        if not isinstance(request, CallFunction):
            return Reply(request_id=request.request_id, span=span)
        dp = request.layout.coordinates(worker)[0]
        holds_outputs = worker == request.layout.output_device(dp)
        keys = self._runner.graph.calls[request.call].output_data if holds_outputs else ()
        ids = tuple(sample for mini_batch in request.mini_batches for sample in mini_batch)
        column = KeyMetadata(dtype="int64", trailing=(), ids=ids, lengths=(3,) * len(ids))
        return Reply(request_id=request.request_id, span=span, outputs=dict.fromkeys(keys, column))


def runner_of(graph: DataflowGraph, plan: ExecutionPlan, batch_size: int) -> GraphRunner:
    homes = {model: plan.layout(plan.home(graph, model)) for model in graph.models}
    return GraphRunner("train", graph, plan.calls, homes, batch_size)


async def _settle() -> None:
    """The dispatcher awaits nothing but replies, so that a few turns of the loop are enough."""
    for _ in range(4):
        await asyncio.sleep(0)
