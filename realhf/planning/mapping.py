"""HybridFlow's automatic mapping of models to devices (HybridFlow, EuroSys 2025, section 6, algorithms 1 and 2)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, TRAIN_STEP
from realhf.dataflow.plan import CallPlan
from realhf.geometry.layout import DeviceMesh, Layout
from realhf.planning.model.call import CallModel
from realhf.planning.model.cluster import node_runs
from realhf.planning.model.communicators import of_all_devices
from realhf.planning.options import Option, options_on
from realhf.planning.task import PlanningTask

_MOST_ALLOCATIONS = 500_000  # some ten seconds

Group = tuple[str, ...]
Placement = tuple[Group, ...]


def placements(models: Sequence[str]) -> Iterator[Placement]:
    """All partitions of the models into colocated groups: 15 for 4 models (the Bell numbers)."""
    if not models:
        yield ()
        return
    first, rest = models[0], models[1:]
    for smaller in placements(rest):
        yield ((first,), *smaller)
        for i, group in enumerate(smaller):
            yield (*smaller[:i], (first, *group), *smaller[i + 1 :])


def allocations(
    num_devices: int,
    minima: Sequence[int],
    sizes: Sequence[int] | None = None,
    keeps: Callable[[tuple[int, ...]], bool] = lambda first: True,
    first: tuple[int, ...] = (),
) -> Iterator[tuple[int, ...]]:
    """All ways to give every device to one of the groups, group i getting at least minima[i] of them.

    C(N - 1, k - 1) for k groups of at least one device. `sizes`: those that a group may have (ascending; default: any).
    Where `keeps` refuses the sizes of the first groups, `first` and one more, no allocation begins with them.
    """
    if not minima:
        if num_devices == 0:
            yield first
        return
    allowed = range(1, num_devices + 1) if sizes is None else sizes
    most = num_devices - sum(minima[1:])
    if len(minima) == 1:
        allowed = [num_devices] if num_devices in allowed else []
    for size in allowed:
        if size > most:
            return
        if size >= minima[0] and keeps((*first, size)):
            yield from allocations(num_devices - size, minima[1:], sizes, keeps, (*first, size))


@dataclass(frozen=True)
class Colocated:
    """The models of a group: an option for every call, on a mesh that begins at 0."""

    num_devices: int
    options: Mapping[str, Option]
    stage_s: tuple[float, float, float]  # generation, preparation, training


@dataclass(frozen=True, eq=False)
class FoundMapping:
    """The cheapest mapping of a placement."""

    placement: Placement
    calls: Mapping[str, CallPlan]
    cost_s: float

    def meshes(self, task: PlanningTask) -> dict[str, DeviceMesh]:
        """The devices of every model."""
        return {task.graph.model_calls[name].model_name: call.mesh for name, call in self.calls.items()}


@dataclass
class Mapper:
    """Searches mappings of a task; it remembers the best of a group on a number of devices.

    As in the paper, each group has devices of its own, and its models run on all of them, each call with the fastest
    strategy that fits. Groups get whole nodes or a power-of-two part of one. Memory is the planner's own model.
    """

    task: PlanningTask
    _allocations: int = 0  # looked at
    _groups: dict[tuple[Group, int], Colocated | None] = field(default_factory=dict)
    _options: dict[tuple[str, int], list[Option]] = field(default_factory=dict)
    _static: dict[tuple[str, int], float] = field(default_factory=dict)

    @cached_property
    def mappings(self) -> list[FoundMapping]:
        """`ranked()`, once."""
        return self.ranked()

    def ranked(self, among: Sequence[Placement] | None = None) -> list[FoundMapping]:
        """The mappings of these placements (default: of all), the cheapest first. Raises UserError if none fits into
        memory, or there are too many to look at."""
        candidates = list(placements(list(self.task.graph.models)) if among is None else among)
        mappings = [mapping for placement in candidates if (mapping := self._best_of(placement))]
        if not mappings:
            raise UserError(
                f"none of {len(candidates)} placements fits into the memory of {self.task.cluster.num_devices} devices"
            )
        return sorted(mappings, key=lambda mapping: mapping.cost_s)

    def least_devices(self, group: Group) -> int | None:
        """The smallest allocation whose memory holds the models of the group; None if there is none."""
        return next((n for n in self.sizes if self.colocated(group, n)), None)

    @cached_property
    def sizes(self) -> list[int]:
        """Sizes of meshes: powers of two below a node, then whole nodes as a search has them."""
        per_node = self.task.cluster.devices_per_node
        parts = [2**power for power in range((per_node - 1).bit_length())]
        return parts + sorted({per_node * number for _, number in node_runs(self.task.cluster)})

    def colocated(self, group: Group, num_devices: int) -> Colocated | None:
        """The fastest strategies of a group's calls that fit on `num_devices` together; None if none do."""
        key = (group, num_devices)
        if key not in self._groups:
            self._groups[key] = self._colocate(group, num_devices)
        return self._groups[key]

    def _best_of(self, placement: Placement) -> FoundMapping | None:
        self._count()
        least = [size for group in placement if (size := self.least_devices(group))]
        if len(least) < len(placement):
            return None
        best: tuple[float, list[Colocated]] | None = None

        def rated(sizes: tuple[int, ...]) -> tuple[float, list[Colocated]] | None:
            """The cost of the first groups, which is the least that all cost; None unless it is below the best."""
            self._count()
            found = [each for key in zip(placement, sizes, strict=False) if (each := self.colocated(*key))]
            if len(found) < len(sizes):
                return None
            # Groups work side by side within a stage, models of one group one after the other.
            cost = sum(max(group.stage_s[stage] for group in found) for stage in range(3))
            return (cost, found) if best is None or cost < best[0] else None

        num_devices = self.task.cluster.num_devices
        for sizes in allocations(num_devices, least, self.sizes, keeps=lambda first: rated(first) is not None):
            best = rated(sizes) or best
        return FoundMapping(placement, placed(best[1]), best[0]) if best else None

    def _count(self) -> None:
        self._allocations += 1
        if self._allocations > _MOST_ALLOCATIONS:
            raise UserError(
                f"there are more than {_MOST_ALLOCATIONS:,} ways to give {self.task.cluster.num_devices} devices to "
                f"{len(self.task.graph.models)} models; this rule is for smaller clusters"
            )

    def _colocate(self, group: Group, num_devices: int) -> Colocated | None:
        """Training (or the home of a model) is chosen first, generation and inference in the memory that is left. If
        the fastest homes leave too little, all homes take their smallest form."""
        graph = self.task.graph
        calls = [self.task.call_models[call.name] for model in group for call in graph.calls_of(model)]
        if any(not self._ranked(call, num_devices) for call in calls):
            return None
        for frugal in (False, True):
            if chosen := self._choose(calls, num_devices, frugal):
                return Colocated(num_devices, chosen, self._stages(calls, chosen))
        return None

    def _choose(self, calls: Sequence[CallModel], num_devices: int, frugal: bool) -> dict[str, Option] | None:
        """The fastest option that fits for every home, one after the other, with the least kept free for the rest, and
        then of every other call; None if one call has too little memory. `frugal`: homes take their smallest form."""
        homes = [call for call in calls if self._home(call) is call]
        static = {call.call.name: self._least_static(call, num_devices) for call in homes}
        chosen: dict[str, Option] = {}
        for call in homes:
            name, least = call.call.name, static[call.call.name]
            left_bytes = self._left_bytes() - (sum(static.values()) - least)
            forms = (o for o in self._ranked(call, num_devices) if not frugal or _static(call, o) == least)
            option = next((o for o in forms if _static(call, o) + _dynamic(call, o) <= left_bytes), None)
            if option is None:
                return None
            chosen[name], static[name] = option, _static(call, option)
        left_bytes = self._left_bytes() - sum(static.values())
        needs, kept = [], []
        for call in calls:
            at_home, name = self._home(call), call.call.name
            home = chosen[at_home.call.name]
            ranked = [chosen[name]] if name in chosen else self._ranked(call, num_devices)
            option = next((o for o in ranked if _need(call, o, at_home, home) <= left_bytes), None)
            if option is None:
                return None
            chosen[name] = option
            needs.append(_need(call, option, at_home, home))
            kept.append(call.work(*option.shape).kept_cache_bytes() if option.layout == home.layout else 0.0)
        # All other calls have the leftovers of one call beside them.
        fits = all(need + sum(kept) - own <= left_bytes for need, own in zip(needs, kept, strict=True))
        return chosen if fits else None

    def _stages(self, calls: Sequence[CallModel], chosen: Mapping[str, Option]) -> tuple[float, float, float]:
        sums = [0.0, 0.0, 0.0]
        for call in calls:
            option, kind = chosen[call.call.name], call.call.interface_type
            stage = 0 if kind is GENERATE else 2 if kind is TRAIN_STEP else 1
            sums[stage] += call.seconds(*option.shape)
        return sums[0], sums[1], sums[2]

    def _ranked(self, call: CallModel, num_devices: int) -> list[Option]:
        """The options of a call on `num_devices` devices, fastest first."""
        key = (call.call.name, num_devices)
        if key not in self._options:
            options = options_on([DeviceMesh(0, num_devices)], call.call, call.samples)
            self._options[key] = sorted(options, key=lambda option: (call.seconds(*option.shape), option))
        return self._options[key]

    def _least_static(self, call: CallModel, num_devices: int) -> float:
        """The same for the options of a home on `num_devices` devices."""
        key = (call.call.name, num_devices)
        if key not in self._static:
            self._static[key] = min(_static(call, option) for option in self._ranked(call, num_devices))
        return self._static[key]

    def _home(self, call: CallModel) -> CallModel:
        return self.task.call_models[self.task.homes[call.call.name]]

    def _left_bytes(self) -> float:
        """Bytes of a device beside the communicators of all devices."""
        cluster, communicator_bytes = self.task.cluster, self.task.costs.hardware.communicator_bytes
        return cluster.device_memory_bytes - communicator_bytes * len(of_all_devices(cluster.num_devices, moves=True))


def _static(call: CallModel, option: Option) -> float:
    """At home, with communicators of its own."""
    return call.static_bytes(option.layout.strategy) + call.communicator_bytes(option.layout)


def _dynamic(call: CallModel, option: Option) -> float:
    return call.work(*option.shape).dynamic_bytes()


def _need(call: CallModel, option: Option, at_home: CallModel, home: Option) -> float:
    """Dynamic bytes, and away from home a copy of the parameters; training has to stay at home."""
    dynamic = _dynamic(call, option)
    if call is at_home or (option.layout == home.layout):
        return dynamic
    if call.call.trains:
        return float("inf")
    return dynamic + call.placed(option.layout.strategy).copy_bytes() + call.communicator_bytes(option.layout)


def placed(groups: Sequence[Colocated]) -> dict[str, CallPlan]:
    """The groups one behind the other, the largest first: whole nodes begin at a node, and parts do not cross one."""
    calls, first = {}, 0
    for group in sorted(groups, key=lambda g: -g.num_devices):
        for name, option in group.options.items():
            mesh = DeviceMesh(first, group.num_devices)
            calls[name] = Option(Layout(mesh, option.layout.strategy), option.micro_batches).call_plan()
        first += group.num_devices
    return calls
