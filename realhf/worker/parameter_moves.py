"""A worker's part in moves of parameters: copies for calls in another layout, and models that follow others."""

import threading
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from realhf.architecture.compute import Computation
from realhf.dataflow.copies import takers_of
from realhf.engine.backend import EngineModel, ModelSpec, build_model
from realhf.engine.residency.residency import Boxes, Residency, Where
from realhf.geometry.layout import Layout
from realhf.geometry.shards import Placement
from realhf.parallel.groups import GroupTable, group_of_all_ranks
from realhf.realloc.execute.carriers import BroadcastCarrier, Carrier, TorchCarrier, carrier_between
from realhf.realloc.execute.changes import ChangesCarrier, SentParts, whole_move
from realhf.realloc.execute.checksum import SumsByPeer
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.execute.verification import LentParts, VerificationSchedule, verify
from realhf.realloc.plan.cells import Devices
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES, MovedBy, ReallocationPlan, plan_between
from realhf.rundir.run import Run
from realhf.transport.messages import FollowParameters, Move, PrepareMove, Reallocate, Release

Models = MutableMapping[tuple[str, Layout], EngineModel]


class ParameterMoves:
    """Carries out moves between the models of this worker and those of others.

    Between calls a copy has no memory, but the modules on its parameters stay: they are built once. Where a copy
    contains the home's part, the home's parameters have no memory during the call, and readers of the home find them in
    the copy. Copies that a plan has filled in place (`CallCompute.in_place`) never have memory beside their home.
    Copies that get only what changed (`ExecutionPlan.changes`) keep theirs.

    `carry_out` is for one thread (`realhf.worker.move_thread`), the rest for the one that executes calls. Both may use
    one home at the same time: this worker sends from it while a call on a copy of it ends. Nothing else overlaps:
    training, or a move into the parameters, comes after the end of all their readers (version edges), when the last
    byte has arrived. A model that waits in host memory comes and goes on a thread that has prepared for the move, and
    waits for it.

    Args:
        groups: process groups of the run's layouts. Every rank makes this object after them, because it may make a
            group for its own messages.
        models: the models on this worker, by name and layout; copies are added, those that are filled in place at once:
            made before the homes, they take memory for their modules while there is none of these.
    """

    def __init__(self, run: Run, rank: int, device: torch.device, groups: GroupTable, models: Models):
        self._run, self._rank, self._device, self._groups, self._models = run, rank, device, groups, models
        self._timeout_s = run.deadlines.longest_s
        self._verification = VerificationSchedule(run.spec.verify_reallocations_every)
        self._lent: dict[str, LentParts] = {}  # by model, where the move into the copy was verified
        # Uses left of each copy that other calls copy from, its own call included.
        self._uses: dict[tuple[str, Layout], int] = {}
        # What this worker has sent last into each copy that gets only what changed: the same moves count on all ranks.
        self._kept = {
            (run.experiment.graph.model_calls[call].model_name, run.plan.layout(call)) for call in run.plan.changes
        }
        self._sent: dict[tuple[str, Layout], SentParts] = {}
        self.moved: dict[tuple[str, Layout], Counter[str]] = {}  # of the last move, as `ChangesCarrier.moved`
        self._at_rest = {name: threading.Lock() for name in run.homes}
        # Its own deadline comes after that of a bucket, whose error names the awaited message.
        is_needed = groups.spans_hosts and _moves_anything(run)
        self._across_hosts = group_of_all_ranks(device, 2 * self._timeout_s) if is_needed else None
        for call, planned in run.plan.calls.items():
            if planned.compute.in_place and rank in planned.mesh.devices:
                self._build(run.experiment.graph.model_calls[call].model_name, planned.layout).free()

    def prepare(self, request: PrepareMove) -> None:
        """Memory for the copy that the move will fill here, if it fills one."""
        name, layout = request.model, request.layout
        if layout == self._run.homes[name] or self._rank not in layout.mesh.devices:
            return
        if copy := self._models.get((name, layout)):
            # Used by others, the other thread may be about to free it, before it allocates.
            if (name, layout) not in self._uses and not self._is_filled_in_place(request.name):
                copy.residency.allocate()
            return
        self._build(name, layout)

    def carry_out(self, move: Move) -> None:
        """Does this worker's part of a move; when it returns, the parameters that come here are complete.

        Raises:
            ReallocationError: a peer did not do its part, or values came that were not sent.
        """
        match move:
            case Reallocate():
                self._reallocate(move)
            case FollowParameters(name=name, batch=batch):
                self._follow(name, batch.step)

    def release(self, request: Release) -> None:
        """Frees a copy; the home has its parameters again. A copy that others take theirs from is freed by the last.

        Raises:
            VerificationError: they are not as they were lent, which is looked at where the move was verified.
        """
        copy = self._models[request.model, request.layout]
        with self._resting(request.model):
            if (request.model, request.layout) in self._uses:
                self._used(request.model, request.layout)
                return
            if home := self._models.get((request.model, self._run.homes[request.model])):
                home.residency.take_back_from(copy.residency)
                if lent := self._lent.pop(request.model, None):
                    lent.verify(home.residency.held(), rank=self._rank, model_name=request.model)
            self._finish_on_device()  # the other thread's stream may read the home next
            is_kept = (request.model, request.layout) in self._kept
            if copy.residency.where is Where.HERE and not is_kept:  # else its memory went as the home's came
                copy.residency.free()

    def select(self, model: EngineModel, name: str, version: int) -> None:
        """Makes a version of its parameters the one that `model`, here under `name`, computes with. Raises LookupError
        where it is not kept."""
        if model.residency.version != version:
            with self._resting(name):  # others may be reading it
                model.residency.select_version(version)
                self._finish_on_device()

    def _build(self, name: str, layout: Layout) -> Residency:
        """A copy of a model, with memory for its parameters."""
        setup, architecture = self._run.experiment.setups[name], self._run.experiment.graph.models[name]
        dtype, groups = getattr(torch, setup.dtype), self._groups.groups(layout)
        compute = Computation(reproducible=setup.reproducible)
        spec = ModelSpec(architecture, groups, dtype, self._device, compute=compute, timeout_s=self._timeout_s)
        self._models[name, layout] = copy = build_model(setup.backend, spec)
        return copy.residency

    def _is_filled_in_place(self, call: str) -> bool:
        """Whether the home of a call's model is lent before its copy is filled, and not behind that."""
        planned = self._run.plan.calls.get(call)
        return planned is not None and bool(planned.compute.in_place)

    def _reallocate(self, move: Reallocate) -> None:
        run, name, layout = self._run, move.model, move.layout
        trains, in_place = move.batch.split == "train", self._is_filled_in_place(move.call)
        from_layout = _source_layout(run, move.call if trains else None, name)
        home, source, target = (self._models.get((name, at)) for at in (run.homes[name], from_layout, layout))
        is_home = from_layout == run.homes[name]
        by: MovedBy = "broadcasts" if trains and move.call in run.plan.broadcasts else "chains"
        # Two buckets are in memory at a time; where the home's parameters are not, both together are one.
        bucket_bytes = DEFAULT_BUCKET_BYTES // 2 if in_place else DEFAULT_BUCKET_BYTES
        plan = _plan(run, name, _placement(run, name, from_layout), Placement(layout), by, bucket_bytes)
        carrier = self._carrier(from_layout, layout, by)
        takers = takers_of(run.plan.copies, move.call) if trains else []
        with self._resting(name):
            if home is not None and target is not None:
                home.residency.select_version(move.version)  # which it may lend; nothing computes here now
            is_verified = self._verification.is_due(name, layout, move.batch.step)
            if in_place and home is not None and target is not None:
                self._lend(name, home.residency, target.residency, is_verified=is_verified, in_place=True)
            if target is not None:
                target.residency.allocate()  # the last who took from it may have freed it only now
                target.residency.begin_at_version(move.version)
            boxes = _boxes(source, move.version), _boxes(target)
            part = Reallocation(plan, self._rank, *boxes, carrier, name, self._timeout_s)
            if (name, layout) in self._kept:
                self._send_changes(part, (name, layout))
            else:
                execute(part)
            if is_verified:
                verify(part)
            self._finish_on_device()
            if source is not None and not is_home:
                self._used(name, from_layout)
            if target is not None and takers:
                self._uses[name, layout] = 1 + len(takers)
            elif home is not None and target is not None and not in_place:
                self._lend(name, home.residency, target.residency, is_verified=is_verified)

    def _send_changes(self, part: Reallocation, copy: tuple[str, Layout]) -> None:
        """Executes a move into a copy that keeps its memory: all values, if those before came by another plan or none
        did, and then what changed since the last move, however many versions ago that was."""
        sent = self._sent.get(copy)
        if sent is None or sent.plan is not part.plan:
            execute(part)
            self._sent[copy] = SentParts(part.plan, self._rank, part.source)
            self.moved[copy] = whole_move(part.plan, self._rank)
            return
        label = f"reallocation of {part.model_name}, sizes of what changed: rank {self._rank}"
        carrier = ChangesCarrier(part.carrier, sent, label, part.timeout_s)
        execute(replace(part, carrier=carrier))
        self.moved[copy] = carrier.moved

    def _lend(self, name: str, home: Residency, copy: Residency, *, is_verified: bool, in_place: bool = False) -> None:
        """Lends the home to a copy; where the move is verified, it is noted for when the home is taken back."""
        lent = LentParts(home.held()) if is_verified else None
        home.lend_to(copy, in_place=in_place)
        if lent is not None and home.where is Where.LENT:
            if in_place:
                lent.verify(home.readable(), rank=self._rank, model_name=name, is_back=False)
            self._lent[name] = lent

    def _used(self, name: str, layout: Layout) -> None:
        """Notes that a call is done with a copy that others take theirs from; frees it behind the last one.

        The home has lent it nothing: calls may run at home while such a copy is kept.
        """
        self._finish_on_device()  # the last one may be the other thread, and knows nothing of this one's stream
        self._uses[name, layout] -= 1
        if not self._uses[name, layout]:
            self._models[name, layout].residency.free()
            del self._uses[name, layout]  # at last: see `prepare`

    def _follow(self, name: str, step: int) -> None:
        run, node = self._run, self._run.experiment.graph.follows[name]
        source, target = (self._models.get((model, run.homes[model])) for model in (node.source, node.target))
        # Not by chains: a device would send on its average.
        by: MovedBy = "broadcasts" if name in run.plan.broadcasts else "messages"
        plan = _plan(run, node.target, run.placement(node.source), run.placement(node.target), by)
        if target:
            target.residency.select_version(node.version(step))  # the version that no request needs any more
        carrier = self._carrier(run.homes[node.source], run.homes[node.target], by)
        is_verified = self._verification.is_due(name, run.homes[node.target], step)
        arrived: SumsByPeer | None = {} if is_verified and node.eta < 1 else None
        with self._resting(node.source):
            boxes = _boxes(source, node.brings(step)), _boxes(target)
            part = Reallocation(plan, self._rank, *boxes, carrier, node.target, self._timeout_s)
            execute(part, eta=node.eta, arrived=arrived)
            if is_verified:
                verify(part, arrived=arrived)
            self._finish_on_device()
        if target:
            target.residency.begin_at_version(node.brings(step))
            target.residency.written()

    @contextmanager
    def _resting(self, name: str) -> Iterator[None]:
        """Within it the home's parameters of a model stay where they are for the other thread.

        A move that is being carried out waits for moves alone, so this ends, whatever the thread of calls waits for.
        """
        if not self._at_rest[name].acquire(timeout=self._timeout_s):
            raise TimeoutError(f"a move of {name} and a call on a copy of it waited {self._timeout_s:g} s, timed out")
        try:
            yield
        finally:
            self._at_rest[name].release()

    def _finish_on_device(self) -> None:
        """On a GPU messages and copies are only queued, in each thread's stream: before memory changes hands, or the
        other thread may read it, they have to be done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _carrier(self, source: Layout, target: Layout, by: MovedBy) -> Carrier:
        of_host = self._groups.of_host((*source.mesh.devices, *target.mesh.devices))
        waits = self._groups.waits
        messages = TorchCarrier(self._across_hosts, waits) if of_host is None else carrier_between(of_host)
        return BroadcastCarrier(self._groups.of_moves, messages, waits) if by == "broadcasts" else messages


def groups_of_broadcasts(run: Run) -> list[Devices]:
    """The devices of the process groups of all broadcasts of a run's plan, in one order on every rank."""
    graph, found = run.experiment.graph, list[Devices]()
    for name in run.plan.broadcasts:
        if node := graph.follows.get(name):
            model, ends = node.target, (run.placement(node.source), run.placement(node.target))
        else:
            model = graph.model_calls[name].model_name
            source = _placement(run, model, _source_layout(run, name, model))
            ends = source, Placement(run.plan.layout(name))
        found += _plan(run, model, *ends, "broadcasts").groups
    return found


def _source_layout(run: Run, call: str | None, model: str) -> Layout:
    """Where the copy of a call of training comes from; None: that of an evaluation's."""
    copied = run.plan.copies.get(call) if call else None
    return run.plan.layout(copied) if copied else run.homes[model]


def _placement(run: Run, model: str, layout: Layout) -> Placement:
    """Of the home of a model, which data parallelism may divide, or of a copy."""
    return run.placement(model) if layout == run.homes[model] else Placement(layout)


def _plan(
    run: Run, model: str, source: Placement, target: Placement, by: MovedBy, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> ReallocationPlan:
    return plan_between(
        run.experiment.graph.models[model],
        source,
        target,
        run.spec.devices_per_node,
        element_bytes=getattr(torch, run.experiment.setups[model].dtype).itemsize,
        by=by,
        bucket_bytes=bucket_bytes,
    )


def _boxes(model: EngineModel | None, version: int | None = None) -> Boxes:
    """The parameters here: of a `version` those to be read, else those to be written; none where the model is not."""
    if model is None:
        return []
    return model.residency.held() if version is None else model.residency.readable(version)


def _moves_anything(run: Run) -> bool:
    calls = ((call, layout) for call, layout in run.calls_with_layouts() if not call.runs_beside)
    return bool(run.experiment.graph.follows) or any(layout != run.homes[call.model_name] for call, layout in calls)
