"""Per-operator sharded data parallelism (OSDP, IJCAI 2023): which operator is replicated, which is sharded.

The costs are those of the paper's alpha-beta-gamma model, with ZeRO-1 as a third mode; the choice is made
exactly in C++ (csrc/search/osdp.h).
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from realhf.architecture.compute import MODES, Mode
from realhf.base.errors import UserError
from realhf.planning import _search
from realhf.planning.model.hardware import GIB, Hardware
from realhf.planning.model.osdp.collective_costs import CollectiveCosts
from realhf.planning.model.osdp.exchange import waited_s
from realhf.planning.model.osdp.units import SMALLEST_SLICED_BYTES

MOST_SLICES = _search.MOST_SLICES  # of an operator, by the solver's limit
MOST_PARTS = 2**61  # bytes on one device: 64 bits hold this, and a sum that is over the limit


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One weight of the model with what it needs on a device; activations and compute are those of one sample.

    `kind` is what operators of all layers have in common ("q", "embedding", ...). Each of the
    `slices` has a mode of its own, and only one slice is gathered at a time (OSDP, operator splitting).

    update_s: what the optimizer takes for all of it on one device; divided where its states are.
    accumulate_s: what adding a gradient of all of it to the one that is kept takes; divided where that one is.
    modes: those that it can be in; `most_slices`: into how many it can be cut.
    cuts: the numbers of slices that `solve` chooses from, the smallest first; none: `slices` as it is.
    gathers: how often a slice that is sharded is gathered in a step; None: for the forward and the backward pass, and
        once more with recomputation.
    ahead_s: for each of these gathers, the seconds of a sample's computation during it. The unit in use before it is
        taken to be like it. Empty: nothing is computed meanwhile.
    """

    name: str
    kind: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int = 0
    compute_s: float = 0.0
    slices: int = 1
    update_s: float = 0.0
    accumulate_s: float = 0.0
    modes: tuple[Mode, ...] = MODES
    most_slices: int = MOST_SLICES
    cuts: tuple[int, ...] = ()
    gathers: int | None = None
    ahead_s: tuple[float, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer states: `model_i` in the paper."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def in_each_cut(self) -> "list[Operator]":
        """The operator in each number of slices that may be chosen."""
        return [replace(self, slices=slices, cuts=()) for slices in self.cuts] or [self]


@dataclass(frozen=True, kw_only=True)
class Links:
    """The data-parallel group and its ring: a message of x bytes takes `latency_s` + x `seconds_per_byte`.

    `launch_s` is what each collective costs besides; the paper has none.

    measured: what the group's collectives cost, where that was measured: it holds instead of the ring. The latency of
        operators that are not gathered is then not counted: the engine sums all of them in one vector.
    handling_s: what the engine takes for each gather and each reduction of a sharded slice beside its collective, with
        `measured`.
    overlap: how far a gather advances in a second of computation: 1 where both go on as if alone, 0 where computation
        stops.
    """

    num_devices: int
    latency_s: float = 0.0
    seconds_per_byte: float = 0.0
    launch_s: float = 0.0
    measured: CollectiveCosts | None = None
    handling_s: float = 0.0
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise UserError(f"num_devices={self.num_devices} must be at least 1")
        for name in ("latency_s", "seconds_per_byte", "launch_s", "handling_s", "overlap"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} must not be negative")

    @classmethod
    def ring(cls, hardware: Hardware, num_devices: int, *, launch_s: float = 0.0, overlap: float = 0.0) -> "Links":
        """The ring over `num_devices` neighbours. Its slowest links set the pace."""
        latency_s, bandwidth = hardware.link(num_devices > hardware.devices_per_node, per_node=1)
        return cls(
            num_devices=num_devices,
            latency_s=latency_s,
            seconds_per_byte=1 / bandwidth,
            launch_s=launch_s,
            overlap=overlap,
        )

    def pass_s(self, size_bytes: float) -> float:
        """One pass around the ring (an all-gather or a reduce-scatter): (N - 1)(alpha + S beta / N)."""
        n = self.num_devices
        return (n - 1) * (self.latency_s + size_bytes * self.seconds_per_byte / n)

    def mode_s(self, mode: Mode, size_bytes: float, ahead_s: Sequence[float]) -> float:
        """Communication of `size_bytes` in a step: see `OsdpProblem.slice_seconds`. `ahead_s`: for each gather, the
        seconds of computation that it is hidden behind."""
        if self.num_devices == 1:
            return 0.0
        if self.measured is None:
            one_s = self.pass_s(size_bytes) + self.launch_s
            if mode == "sharded":
                return one_s + sum(waited_s(one_s, self.overlap * each) for each in ahead_s)
            return 2 * one_s - (self.launch_s if mode == "replicated" else 0.0)
        gather, scatter = self.measured.all_gather, self.measured.reduce_scatter
        if mode == "sharded":
            gather_s = gather.seconds(size_bytes)
            waiting_s = sum(waited_s(gather_s, self.overlap * each) for each in ahead_s)
            return waiting_s + scatter.seconds(size_bytes) + (len(ahead_s) + 1) * self.handling_s
        if mode == "zero1":
            return size_bytes * (gather.seconds_per_byte + scatter.seconds_per_byte)
        return size_bytes * self.measured.all_reduce.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class OsdpProblem:
    """A model's operators on the devices of one data-parallel group, each with `memory_bytes`.

    `recompute`: activations are recomputed in the backward pass, for which sharded parameters are
    gathered once more. `prefetch`: the next gather runs while one slice is in use, so two are held.
    `batch`: the samples whose computation hides gathers (`Links.overlap`, with `prefetch`).
    `extra_bytes_per_sample`, `extra_seconds_per_sample` and `extra_bytes` are needed whatever the modes are.
    `recomputed`: the blocks whose forward pass runs again, where these are chosen too; their seconds, bytes and gathers
    are in the other numbers.
    `reduces_whole`: while the gradients of a sharded slice are reduced, all of them are in memory; the paper does not
    count them.
    """

    operators: tuple[Operator, ...]
    links: Links
    memory_bytes: int
    modes: tuple[Mode, ...] = MODES
    recompute: bool = False
    prefetch: bool = False
    batch: int = 1
    extra_bytes_per_sample: int = 0
    extra_seconds_per_sample: float = 0.0
    extra_bytes: int = 0
    reduces_whole: bool = False
    recomputed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.memory_bytes < 1:
            raise UserError(f"memory_bytes={self.memory_bytes} must be at least 1")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes or len(set(self.modes)) < len(self.modes):
            raise UserError(f"modes={','.join(self.modes)} must be some of {', '.join(MODES)}, each once")
        for op in self.operators:
            for slices in (op.slices, *op.cuts):
                if not 1 <= slices <= op.most_slices:
                    raise UserError(f"operator {op.name}: slices={slices} must be at least 1, at most {op.most_slices}")
            if not set(op.modes) & set(self.modes):
                raise UserError(
                    f"operator {op.name} can be {', '.join(op.modes)}, and modes={','.join(self.modes)} has none of "
                    "these; add one"
                )

    @property
    def bytes_per_sample(self) -> int:
        return self.extra_bytes_per_sample + sum(op.activation_bytes for op in self.operators)

    @property
    def seconds_per_sample(self) -> float:
        return self.extra_seconds_per_sample + sum(op.compute_s for op in self.operators)

    def slice_seconds(self, op: Operator, mode: Mode) -> float:
        """Communication of one slice in a step (the paper's T_i without compute), its part of the update, and of
        adding its gradient to the one that is kept.

        Replicated: an all-reduce, which is two passes. ZeRO-1: a reduce-scatter of gradients and an
        all-gather of the updated parameters, the same two passes in two collectives. Sharded: two
        all-gathers and a reduce-scatter; one all-gather more with recomputation.
        """
        n = self.links.num_devices
        update_s = op.update_s / (1 if mode == "replicated" else n) + op.accumulate_s / (n if mode == "sharded" else 1)
        hiding_s = [self.batch * each / op.slices for each in op.ahead_s] if self.prefetch else []
        ahead_s = hiding_s or [0.0] * self.gathers_of(op)
        return self.links.mode_s(mode, op.parameter_bytes / op.slices, ahead_s) + update_s / op.slices

    @property
    def hides(self) -> bool:
        """Whether seconds depend on the batch, behind whose computation gathers are hidden."""
        return self.prefetch and self.links.overlap > 0 and any(op.ahead_s for op in self.operators)

    def of_batches(self, batches: range) -> "Iterator[tuple[OsdpProblem, range]]":
        """Problems whose seconds hold for all of their batches, the largest first."""
        if not self.hides:
            yield self, batches
            return
        for batch in reversed(batches):
            yield replace(self, batch=batch), range(batch, batch + 1)

    def gathers_of(self, op: Operator) -> int:
        """How often a sharded slice is gathered in a step."""
        return (3 if self.recompute else 2) if op.gathers is None else op.gathers

    @cached_property
    def parts_per_byte(self) -> int:
        """Model states are counted in these parts of a byte, so that those of every slice are a whole number."""
        parts = self.links.num_devices * math.lcm(
            *{slices for op in self.operators for slices in op.cuts or [op.slices]}
        )
        return parts if parts * self.memory_bytes < MOST_PARTS else 1  # else slices are rounded up

    def slice_parts(self, op: Operator, mode: Mode) -> int:
        """Model states of one slice on a device (the paper's M_i without activations), in parts of a byte."""
        whole, divided = {
            "replicated": (op.state_bytes, 0),
            "zero1": (op.parameter_bytes + op.gradient_bytes, op.optimizer_bytes),
            "sharded": (0, op.state_bytes),
        }[mode]
        n = self.links.num_devices
        return -(-(whole * n + divided) * self.parts_per_byte // (n * op.slices))

    def gather_bytes(self, op: Operator) -> int:
        """The whole parameters of a slice while it is in use, twice with prefetch, and perhaps its gradients."""
        gradient_bytes = -(-op.gradient_bytes // op.slices) if self.reduces_whole else 0
        return (2 if self.prefetch else 1) * -(-op.parameter_bytes // op.slices) + gradient_bytes

    def possible(self, op: Operator, mode: Mode) -> Mode:
        """`mode`, or what stands for it where the operator cannot be in it."""
        return mode if mode in op.modes else next(other for other in reversed(self.modes) if other in op.modes)


@dataclass(frozen=True, kw_only=True)
class OsdpPlan:
    """The modes of all slices and the batch of each device.

    `slices` has a row for each operator with the number of its slices in each of `problem.modes`.
    `lower_bound_s` holds for the seconds per sample of any batch and modes asked for; `proven`
    says that none is faster than this plan. A uniform plan is not searched for and has neither.
    """

    problem: OsdpProblem
    batch: int
    slices: tuple[tuple[int, ...], ...]
    lower_bound_s: float = 0.0
    proven: bool = False
    search_s: float = 0.0

    def counts(self) -> Iterator[tuple[Operator, Mode, int]]:
        """How many slices of each operator are in each mode."""
        for op, row in zip(self.problem.operators, self.slices, strict=True):
            for mode, count in zip(self.problem.modes, row, strict=True):
                yield op, mode, count

    @property
    def communication_s(self) -> float:
        return sum(count * self.problem.slice_seconds(op, mode) for op, mode, count in self.counts())

    @property
    def step_s(self) -> float:
        """Seconds of one step: sum of T_i."""
        return self.communication_s + self.batch * self.problem.seconds_per_sample

    @property
    def seconds_per_sample(self) -> float:
        """Of one device; the group does `num_devices` samples meanwhile."""
        return self.step_s / self.batch

    @property
    def samples_per_s(self) -> float:
        """Samples a second of all devices together."""
        return self.problem.links.num_devices * self.batch / self.step_s

    @property
    def memory_bytes(self) -> int:
        """The peak of a device, rounded up: sum of M_i, and the largest gather."""
        problem, states, gather = self.problem, 0, 0
        for op, mode, count in self.counts():
            states += count * problem.slice_parts(op, mode)
            if count and mode == "sharded":
                gather = max(gather, problem.gather_bytes(op))
        states = -(-states // problem.parts_per_byte)
        return states + gather + problem.extra_bytes + self.batch * problem.bytes_per_sample


def solve(problems: Sequence[OsdpProblem], batches: range, *, time_limit_s: float = 1.0) -> OsdpPlan:
    """The slices and modes of every operator, and the batch out of `batches`, with the least seconds per sample. The
    plan is for the best of the `problems`.

    One batch only: the least seconds per step. Past the time limit (instances whose times are
    nearly proportional to their bytes can be hard) the plan carries the bound proven so far.

    Raises:
        UserError: nothing fits; the text names the smallest memory and the largest batch that would.
    """
    if not batches or batches[0] < 1 or batches.step != 1:
        raise UserError(f"batches={batches} must be a range of one or more batches, from 1 on")
    start = time.perf_counter()
    solved = [each for problem in problems for each in _solutions(problem, batches, time_limit_s)]
    feasible = [(problem, found) for problem, found in solved if found["feasible"]]
    if not feasible:
        raise UserError(_remedy(solved, batches[0]))
    problem, found = min(feasible, key=lambda entry: entry[1]["step_s"] / entry[1]["batch"])
    bound_s = min(other["lower_bound_s"] for _, other in feasible)
    best_s = found["step_s"] / found["batch"]
    plan = OsdpPlan(
        problem=_in_cuts(problem, found["cuts"]),
        batch=found["batch"],
        slices=tuple(tuple(row) for row in found["slices"]),
        lower_bound_s=bound_s,
        proven=all(other["proven"] or other["lower_bound_s"] >= best_s for _, other in feasible),
        search_s=time.perf_counter() - start,
    )
    assert plan.memory_bytes <= problem.memory_bytes
    assert abs(plan.step_s - found["step_s"]) <= 1e-9 * plan.step_s
    return plan


def _solutions(
    problem: OsdpProblem, batches: range, time_limit_s: float
) -> "Iterator[tuple[OsdpProblem, _search.OsdpSolution]]":
    """The solutions of a problem's batches, the largest first, to where a smaller one can only be slower."""
    largest = replace(problem, batch=batches[-1])
    least_s, best_s = sum(_least_seconds(largest, op) for op in problem.operators) if problem.hides else 0.0, math.inf
    for each, some in problem.of_batches(batches):
        if problem.seconds_per_sample + least_s / some[0] >= best_s:
            return
        found = _solution(each, some, time_limit_s)
        if found["feasible"]:
            best_s = min(best_s, found["step_s"] / found["batch"])
        yield each, found


def _least_seconds(problem: OsdpProblem, operator: Operator) -> float:
    """Seconds of a step in the fastest cut and mode."""
    return min(
        op.slices * problem.slice_seconds(op, problem.possible(op, mode))
        for op in operator.in_each_cut()
        for mode in problem.modes
    )


def _solution(problem: OsdpProblem, batches: range, time_limit_s: float) -> "_search.OsdpSolution":
    parts = problem.parts_per_byte
    alike = [replace(op, name="") for op in problem.operators]
    rows = {op: _row(problem, op) for op in set(alike)}
    found = _search.solve_osdp(
        operators=[rows[op] for op in alike],
        memory_bytes=(problem.memory_bytes - problem.extra_bytes) * parts,
        bytes_per_sample=problem.bytes_per_sample * parts,
        seconds_per_sample=problem.seconds_per_sample,
        min_batch=batches[0],
        max_batch=batches[-1],
        time_limit_s=time_limit_s,
    )
    found["smallest_fixed_bytes"] = -(-found["smallest_fixed_bytes"] // parts) + problem.extra_bytes
    found["slices"] = [
        [
            sum(count for asked, count in zip(problem.modes, row, strict=True) if problem.possible(op, asked) == mode)
            for mode in problem.modes
        ]
        for op, row in zip(problem.operators, found["slices"], strict=False)  # no rows where nothing fits
    ]
    return found


def _row(problem: OsdpProblem, operator: Operator) -> list[tuple[int, int, list[tuple[float, int, bool]]]]:
    """The cuts of an operator as the solver takes them."""
    return [
        (
            op.slices,
            problem.gather_bytes(op) * problem.parts_per_byte,
            # The solver knows operators by numbers of equal modes best: another mode stands for one that cannot be.
            [(problem.slice_seconds(op, mode), problem.slice_parts(op, mode), mode == "sharded")
             for mode in (problem.possible(op, asked) for asked in problem.modes)],
        )
        for op in operator.in_each_cut()
    ]  # fmt: skip


def _in_cuts(problem: OsdpProblem, chosen: Sequence[int]) -> OsdpProblem:
    """The problem with every operator in the cut of its own that was chosen."""
    return replace(
        problem,
        operators=tuple(op.in_each_cut()[cut] for op, cut in zip(problem.operators, chosen, strict=True)),
    )


def _remedy(solved: Sequence[tuple[OsdpProblem, "_search.OsdpSolution"]], batch: int) -> str:
    """The exact changes that would make an infeasible problem feasible."""
    problem, found = min(solved, key=lambda entry: entry[1]["smallest_fixed_bytes"])
    fixed = found["smallest_fixed_bytes"]
    smallest = fixed + batch * problem.bytes_per_sample
    text = (
        f"memory_bytes={problem.memory_bytes} ({problem.memory_bytes / GIB:.4g} GiB) holds no choice of modes with "
        f"batch={batch} on each of {problem.links.num_devices} devices; the smallest memory that does is "
        f"{smallest} bytes ({gib_above(smallest)} GiB)"
    )
    largest = (problem.memory_bytes - fixed) // problem.bytes_per_sample if problem.bytes_per_sample else 0
    return text + (f", and the largest batch that fits is {largest}" if largest >= 1 else "")


def gib_above(size_bytes: int) -> str:
    """In four digits behind the point, rounded up, so that it is enough."""
    return f"{math.ceil(1e4 * size_bytes / GIB) / 1e4:g}"


def uniform_plan(problem: OsdpProblem, mode: Mode, batches: range) -> OsdpPlan | None:
    """All operators that can be in one mode, the others in ZeRO-1, with the largest batch of `batches` that fits (the
    fastest per sample).

    None if no batch fits.
    """
    has_others = any(mode not in op.modes for op in problem.operators)
    problem = replace(problem, modes=(mode, "zero1") if has_others and mode != "zero1" else (mode,))
    modes = [[problem.possible(op, mode)] * op.slices for op in problem.operators]
    return given_plan(problem, modes, batches)


def given_plan(problem: OsdpProblem, modes: Sequence[Sequence[Mode]], batches: range) -> OsdpPlan | None:
    """The slices of each operator in given modes, with the largest batch of `batches` that fits; None if none does."""
    slices = tuple(tuple(list(of_op).count(mode) for mode in problem.modes) for of_op in modes)
    for batch in reversed(batches):
        plan = OsdpPlan(problem=replace(problem, batch=batch) if problem.hides else problem, batch=batch, slices=slices)
        if plan.memory_bytes <= problem.memory_bytes:
            return plan
    return None


def sliced(problem: OsdpProblem, slices: int) -> OsdpProblem:
    """The same problem with its large operators cut into `slices`."""
    operators = (replace(op, slices=_slices_of(op, slices), cuts=()) for op in problem.operators)
    return replace(problem, operators=tuple(operators))


def with_cuts(problem: OsdpProblem, slices: int) -> OsdpProblem:
    """The same problem with every large operator in 1, 2, 4, ... or `slices` slices, to be chosen by `solve`: in fewer
    slices it has the lower latency, in more the smaller gathers."""
    numbers = {slices, *(2**i for i in range(slices.bit_length()))}
    return replace(
        problem,
        operators=tuple(
            replace(op, cuts=tuple(sorted({_slices_of(op, number) for number in numbers}))) for op in problem.operators
        ),
    )


def _slices_of(op: Operator, slices: int) -> int:
    return min(slices, op.most_slices) if op.parameter_bytes >= SMALLEST_SLICED_BYTES else 1
