"""The asyncio loop around the queue of calls: it sends actions as requests, and turns replies into events."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from msgspec.structs import replace

from realhf.base.errors import RunError
from realhf.data.rows import DatasetRows
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef, first_name
from realhf.dataflow.offload import Load, loads_of, models_needed, with_loads
from realhf.dataflow.plan import CallPlan
from realhf.dataflow.splits import Split
from realhf.geometry.layout import Layout
from realhf.master.data import DataDirectory, Partition, dataset_sequences, division, length_key, partition
from realhf.master.moves import Moves, SendRequest
from realhf.master.open_requests import Clock, OpenRequests, Thread
from realhf.master.replies import Request
from realhf.master.state import Action, CallQueue, FinishStep, Issue, Node, movers_of, occupied
from realhf.rundir.run import Deadlines
from realhf.transport.messages import (
    BatchKey,
    CallFunction,
    Completion,
    FollowParameters,
    FreeBatch,
    LoadModel,
    OffloadModel,
    Reallocate,
    Release,
    Reply,
    SaveCheckpoint,
    Span,
    Transfer,
)

_SET_LATER = 0  # the id of a request: each worker's message gets its own


Sums = Mapping[str, tuple[float, float]]  # name -> (weighted sum, weight)


def added_up(parts: Iterable[Sums]) -> dict[str, tuple[float, float]]:
    """The sums of all parts, in their order."""
    sums: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (total, weight) in part.items():
            old_total, old_weight = sums.get(name, (0.0, 0.0))
            sums[name] = (old_total + total, old_weight + weight)
    return sums


def means(stats: Sums) -> dict[str, float]:
    """The mean of each statistic that has weight."""
    return {name: total / weight for name, (total, weight) in stats.items() if weight}


@dataclass
class CallRecord:
    """A call that has ended, with each worker's reply to its compute phase.

    version: of the parameters that it used; None: an earlier training of its step has changed them, or it has no model.
    makes: the version that it made, None if it made none.
    """

    node: Node
    model: str
    replies: dict[int, Reply] = field(default_factory=dict)
    state: tuple[int, dict[str, float]] | None = None  # and a worker that has left it
    version: int | None = None
    makes: int | None = None

    def take_state(self, worker: int, state: dict[str, float]) -> None:
        """Notes the numbers that a rank leaves for the next step. Raises RunError if another has left others."""
        if self.state is None:
            self.state = worker, state
        first, known = self.state
        if state != known:
            key = min(key for key in {*known, *state} if known.get(key) != state.get(key))
            raise RunError(
                f"{self.node.call} of step {self.node.step + 1}: worker {first} leaves context.state[{key!r}]="
                f"{known.get(key)} for the next step and worker {worker} {state.get(key)}; all ranks have to compute "
                "the same numbers: from context.in_order(...) or context.sum_over_data_parallel(...), not from their "
                "own samples",
                workers=[first, worker],
            )

    @property
    def start(self) -> float:
        return min(reply.span.start for reply in self.replies.values())

    @property
    def end(self) -> float:
        return max(reply.span.end for reply in self.replies.values())

    @property
    def stats(self) -> dict[str, tuple[float, float]]:
        """Over all workers, in their order: in the order of replies the last bits would differ from run to run."""
        return added_up(self.replies[worker].stats for worker in sorted(self.replies))

    @property
    def tokens(self) -> int:
        return sum(reply.tokens for reply in self.replies.values())

    @property
    def completions(self) -> list[Completion]:
        return [completion for reply in self.replies.values() for completion in reply.completions]


@dataclass(frozen=True)
class PlannedGraph:
    """A graph with its plan: all that `Dispatcher` needs to run it.

    calls: the plan of each call.
    homes: the layout in which each model's parameters live between calls, on devices or, if the model is one of
        `offload`, in host memory.
    batch_size: samples a step.
    rows: the rows of the data set, for the lengths of its sequences.
    versions: the version of its parameters that a model uses in a step; None: the graph's rule.
    trained_steps: of an evaluation, the training steps before it.
    devices_per_node: None if all devices are on one node.
    grows: it has the calls of a live program's round so far, of which every training makes a version.
    """

    split: Split
    graph: DataflowGraph
    calls: dict[str, CallPlan]
    homes: dict[str, Layout]
    batch_size: int
    rows: DatasetRows | None = None
    offload: tuple[str, ...] = ()
    versions: Callable[[str, int], int] | None = None
    trained_steps: int = 0
    devices_per_node: int | None = None
    grows: bool = False

    def samples(self, step: int) -> int:
        """The samples of a step; batches of an evaluation may have fewer than `batch_size`."""
        return self.batch_size if self.rows is None else self.rows.samples(step)

    @cached_property
    def loads(self) -> dict[str, Load]:
        return loads_of(self.graph, self.offload)

    @cached_property
    def devices(self) -> dict[str, frozenset[int]]:
        """The devices that each node occupies while it runs, by name, loads included."""
        of_nodes = {
            name: occupied(self.graph, name, self._layouts, self.homes, self.offload) for name in self.graph.nodes
        }
        return of_nodes | {name: frozenset(self.homes[load.model].mesh.devices) for name, load in self.loads.items()}

    @cached_property
    def movers(self) -> dict[str, frozenset[int]]:
        """The devices that take part in moving the parameters of each node, by name."""
        copies = {name: call.copy_from for name, call in self.calls.items() if call.copy_from is not None}
        return {name: movers_of(self.graph, name, self._layouts, self.homes, copies) for name in self.graph.nodes}

    @cached_property
    def _layouts(self) -> dict[str, Layout]:
        return {name: call.layout for name, call in self.calls.items()}

    def version(self, node: Node) -> int:
        """The version of the parameters that a call uses."""
        return (self.versions or self.graph.weights_version)(self.graph.calls[node.call].model_name, node.step)

    def record(self, node: Node) -> CallRecord:
        """The record of a node that is about to begin."""
        model, call = self.model_of(node.call), self.graph.calls.get(node.call)
        if call is None or call.runs_beside:
            return CallRecord(node, model)
        version, made = self.version(node), self.made_version(node)
        changed = call.trains and not self.grows and call != self._trainings(model)[0]
        return CallRecord(node, model, version=None if changed else version, makes=made)

    def made_version(self, node: Node) -> int | None:
        """The version of its model's parameters that a call makes: the last training of a step makes one."""
        call = self.graph.calls[node.call]
        if self.split != "train" or not call.trains:
            return None
        is_last = self.grows or call == self._trainings(call.model_name)[-1]
        return self.version(node) + 1 if is_last else None

    def _trainings(self, model: str) -> list[ModelFunctionCallDef]:
        return [call for call in self.graph.calls_of(model) if call.trains]

    def is_copy(self, call: ModelFunctionCallDef) -> bool:
        """Whether a call needs a copy of its model's parameters, in a layout that is not their home's."""
        return not call.runs_beside and self.calls[call.name].layout != self.homes[call.model_name]

    def model_of(self, node: str) -> str:
        """The model that a node reads or writes last; a call beside the devices has its name in a model's place."""
        if node in self.loads:
            return self.loads[node].model
        return node if node in self.graph.beside else models_needed(self.graph, node)[-1]


OnSpan = Callable[[int, Span], None]


@dataclass
class OpenSteps:
    """Steps whose data the workers have: where it lies, and the calls that have begun."""

    directories: dict[int, DataDirectory] = field(default_factory=dict)
    records: dict[Node, CallRecord] = field(default_factory=dict)


class Dispatcher:
    """Sends requests, and matches replies to them.

    `states` has the numbers that each call of training has left in its last step (`Context.state`).
    """

    def __init__(
        self,
        send: SendRequest,
        num_workers: int,
        on_span: OnSpan,
        clock: Clock = time.monotonic,
        deadlines: Deadlines | None = None,
    ):
        self._send, self._deadlines = send, deadlines or Deadlines()
        self._num_workers = num_workers
        self._on_span = on_span
        self._open = OpenRequests(num_workers, clock)
        self._moves = Moves(send, self._open)
        self.states: dict[str, dict[str, float]] = {}
        self._replies: asyncio.Queue[tuple[int, Request, Reply]] = asyncio.Queue()
        self._ends_soon = False

    def end_soon(self) -> None:
        """From now on no further step is begun."""
        self._ends_soon = True

    def reply(self, worker: int, reply: Reply) -> None:
        """Hands over a worker's reply.

        Raises:
            ValueError: the reply does not answer the request that it names; nothing was changed.
        """
        request = self._open.answered(worker, reply)
        if reply.wait:
            self._on_span(worker, reply.wait)
        for span in (*reply.digests, reply.span):
            self._on_span(worker, span)
        self._replies.put_nowait((worker, request, reply))

    def describe(self, worker: int, request_id: int | None = None) -> str:
        """The open request of that id, or those that `worker` is busy with, for error messages."""
        return self._open.describe(worker, request_id)

    def late(self) -> dict[int, Request]:
        """The workers that have been busy with a request for longer than its deadline, and that request."""
        return self._open.late()

    async def run_steps(
        self,
        planned: PlannedGraph,
        order: list[tuple[str, int]],
        max_steps_in_flight: int,
        on_step: Callable[[int, list[CallRecord]], None],
        opened: OpenSteps | None = None,
    ) -> bool:
        """Runs all calls of `order`; `on_step` gets the calls of a step when all of them have ended, and its data is
        freed. Returns whether it was all: after `end_soon` only the steps that have begun are ended.

        Steps that are `opened` stay so, for further calls, until `finish`.
        """
        is_whole = True
        queue = CallQueue(planned.graph, with_loads(order, planned.loads), planned.devices, max_steps_in_flight)
        steps = opened or OpenSteps()
        directories, records = steps.directories, steps.records
        pending: dict[Node, int] = {}

        async def perform(actions: list[Action]) -> None:
            for action in actions:
                match action:
                    case Issue(node):
                        directory = directories.setdefault(node.step, DataDirectory(planned.devices_per_node))
                        records[node] = planned.record(node)
                        pending[node] = await self._issue(planned, node, directory)
                    case FinishStep(step) if opened is None:
                        on_step(step, await self.finish(planned.split, step, steps))

        await perform(queue.start())
        while not queue.finished:
            worker, request, reply = await self._replies.get()
            if self._ends_soon and queue.cut():
                is_whole = False
            if request.prepares:
                await self._moves.prepared(worker, request.prepares)
            node = request.node
            if node is None:
                continue
            record = records[node]
            record.replies[worker] = reply
            if request.returns_state:
                record.take_state(worker, reply.state)
            directories[node.step].record(worker, reply.outputs)
            left = pending.pop(node) - 1
            if left:
                pending[node] = left
                continue
            if planned.split == "train" and record.state is not None:
                self.states[first_name(node.call)] = record.state[1]
            await self._push(planned, node, directories[node.step])
            await perform(queue.ended(node))
        await self._drain()
        return is_whole

    async def finish(self, split: Split, step: int, steps: OpenSteps) -> list[CallRecord]:
        """Has the workers forget a step's data; returns its calls."""
        del steps.directories[step]
        for worker in range(self._num_workers):
            await self._send(worker, FreeBatch(batch=BatchKey(split, step)))
        return [steps.records.pop(node) for node in sorted(steps.records) if node.step == step]

    async def save(self, directory: str, writers: dict[int, tuple[str, ...]], *, is_last: bool) -> None:
        """Has every worker in `writers` write its boxes of the given models; returns when training may go on."""
        request = Request(f"checkpoint {directory}", self._deadlines.longest_s)
        for worker, models in writers.items():
            message = SaveCheckpoint(request_id=_SET_LATER, directory=directory, models=models, is_last=is_last)
            await self._ask([worker], request, message)
        await self._drain()

    async def _issue(self, planned: PlannedGraph, node: Node, directory: DataDirectory) -> int:
        """Sends the requests of one call, in the order of their execution; returns how many replies end the call."""
        if load := planned.loads.get(node.call):
            return await self._load(planned, node, load)
        if node.call in planned.graph.follows:
            replies = await self._follow(planned, node)
        else:
            replies = await self._call(planned, node, directory)
        await self._offload(planned, node)
        return replies

    async def _call(self, planned: PlannedGraph, node: Node, directory: DataDirectory) -> int:
        definition, plan = planned.graph.calls[node.call], planned.calls[node.call]
        batch, layout = BatchKey(planned.split, node.step), plan.layout
        version, is_copy = planned.version(node), planned.is_copy(definition)
        if planned.movers[node.call]:  # else it computes at home, or takes over another call's copy
            message = Reallocate(
                request_id=_SET_LATER,
                batch=batch,
                call=node.call,
                model=definition.model_name,
                layout=layout,
                version=version,
            )
            what = f"reallocation of {definition.model_name} for {_name(node, batch)}"
            request = Request(what, self._deadlines.longest_s, together=True)
            devices, movers = planned.devices[node.call], planned.movers[node.call]
            await self._moves.prepare(node, definition.model_name, layout, devices, movers, request, message)
        parts = _parts(planned, definition, node.step, directory)
        assert parts is not None, "its inputs have been made"
        if planned.grows:  # they were made before anyone knew that this call would read them
            made = [key for key in definition.input_data if key in planned.graph.producers]
            await self._transfer(planned, definition, node.step, parts, made, directory)
        await self._send_call(planned, node, parts)
        if is_copy:
            for worker in layout.mesh.devices:
                await self._send(worker, Release(model=definition.model_name, layout=layout))
        return len(division(layout, definition.protocol).part_of)

    async def _load(self, planned: PlannedGraph, node: Node, load: Load) -> int:
        batch, mesh = BatchKey(planned.split, node.step), planned.homes[load.model].mesh
        message = LoadModel(request_id=_SET_LATER, batch=batch, model=load.model, states=load.states)
        await self._ask(mesh.devices, Request(_name(node, batch), self._deadlines.longest_s, node), message)
        return mesh.size

    async def _offload(self, planned: PlannedGraph, node: Node) -> None:
        """Moves the models that were loaded for `node` back to host memory after it; no call waits for that."""
        batch = BatchKey(planned.split, node.step)
        for model in models_needed(planned.graph, node.call):
            if model in planned.offload:
                request = Request(f"offload of {model} after {_name(node, batch)}", self._deadlines.longest_s)
                message = OffloadModel(request_id=_SET_LATER, batch=batch, model=model)
                await self._ask(planned.homes[model].mesh.devices, request, message)

    async def _follow(self, planned: PlannedGraph, node: Node) -> int:
        batch, target = BatchKey(planned.split, node.step), planned.graph.follows[node.call].target
        message = FollowParameters(request_id=_SET_LATER, batch=batch, name=node.call)
        request = Request(_name(node, batch), self._deadlines.longest_s, node, together=True)
        devices, movers = planned.devices[node.call], planned.movers[node.call]
        await self._moves.prepare(node, target, planned.homes[target], devices, movers, request, message)
        return len(movers)

    async def _push(self, planned: PlannedGraph, node: Node, directory: DataDirectory) -> None:
        """Sends a call's outputs to the calls that will need them, before later calls occupy the workers.

        The lengths of one key decide which rank of a consumer gets a sample. Outputs that are produced before that key
        are sent once its lengths are known, so the division does not depend on which of two calls ends first.
        """
        graph, samples = planned.graph, planned.samples(node.step)
        for consumer in graph.calls.values():
            dividing = length_key(graph, consumer)
            if dividing is None:
                continue  # it reads only the data set
            parts = _parts(planned, consumer, node.step, directory)
            if parts is None:
                continue
            divides = graph.producers[dividing] == node.call
            keys = [
                key
                for key in consumer.input_data
                if (divides or graph.producers.get(key) == node.call) and directory.lengths(key, samples)
            ]
            await self._transfer(planned, consumer, node.step, parts, keys, directory)

    async def _transfer(
        self,
        planned: PlannedGraph,
        consumer: ModelFunctionCallDef,
        step: int,
        parts: Partition,
        keys: Iterable[str],
        directory: DataDirectory,
    ) -> None:
        """Sends what workers of a call lack of `keys`."""
        batch, layout = BatchKey(planned.split, step), planned.calls[consumer.name].layout
        for moves_of in directory.plan_transfer(layout, parts, keys, consumer.protocol):
            for worker, moves in sorted(moves_of.items()):
                message = Transfer(batch=batch, sends=tuple(moves.sends), receives=tuple(moves.receives))
                await self._send(worker, message)

    async def _send_call(self, planned: PlannedGraph, node: Node, parts: Partition) -> None:
        definition, plan = planned.graph.calls[node.call], planned.calls[node.call]
        batch, version = BatchKey(planned.split, node.step), planned.version(node)
        layout, collected = plan.layout, frozenset(definition.protocol.collect(plan.layout))
        deadline_s = self._deadlines.of(plan.predicted_s)
        thread: Thread = "beside" if definition.runs_beside else "calls"
        for worker, part in division(layout, definition.protocol).part_of.items():
            mini_batches = parts[part]
            ids = tuple(sample for mini_batch in mini_batches for sample in mini_batch)
            outputs = definition.output_data if worker in collected else ()
            request = Request(
                _name(node, batch),
                deadline_s,
                node,
                frozenset(outputs),
                ids,
                together=True,
                returns_state=worker in collected,
            )
            request_id = self._open.expect(worker, request, thread)
            await self._send(
                worker,
                CallFunction(
                    request_id=request_id,
                    batch=batch,
                    call=node.call,
                    layout=layout,
                    mini_batches=tuple(mini_batches),
                    micro_batches=plan.micro_batches,
                    version=version,
                    makes_version=None if definition.runs_beside else planned.made_version(node),
                    decode_graphs=plan.compute.decode_graphs,
                    kv_cache_tokens=plan.compute.kv_cache_tokens,
                    state=self.states.get(first_name(node.call), {}) if batch.split == "train" else {},
                    trained_steps=planned.trained_steps,
                ),
            )

    async def _ask(
        self, workers: Iterable[int], request: Request, message: SaveCheckpoint | LoadModel | OffloadModel
    ) -> None:
        """Sends each of the workers the message, under an id of its own."""
        for worker in workers:
            await self._send(worker, replace(message, request_id=self._open.expect(worker, request)))

    async def _drain(self) -> None:
        """Waits for the replies that end no call: those of reallocations, offloading and checkpoints."""
        while self._open:
            await self._replies.get()


def _parts(planned: PlannedGraph, call: ModelFunctionCallDef, step: int, directory: DataDirectory) -> Partition | None:
    """How the samples of a call are divided over its ranks; None until the lengths that decide it are known."""
    key = length_key(planned.graph, call)
    lengths: Mapping[int, int] | None = None
    if call.reproducible:
        pass  # the parts of the batch are neighbours, whatever the layout
    elif key is not None:
        lengths = directory.lengths(key, planned.samples(step))
        if lengths is None:
            return None
    elif planned.rows is not None:
        lengths = planned.rows.lengths(step, dataset_sequences(call))
    parts = division(planned.calls[call.name].layout, call.protocol).parts
    return partition(planned.samples(step), call.mini_batches, parts, lengths, planned.graph.samples_per_prompt)


def _name(node: Node, batch: BatchKey) -> str:
    return f"{node.call} of {batch}"
