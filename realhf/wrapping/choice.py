"""The mode of every operator of a module: chosen by the exact solver from measurements of this group, or given."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from realhf.architecture.compute import MODES, Mode, ModeRules, modes_in, modes_text
from realhf.base.errors import UserError
from realhf.base.numbers import check_fields
from realhf.geometry.operators import names_operator
from realhf.planning.model.hardware import GIB
from realhf.planning.model.osdp.problem import (
    MOST_SLICES,
    Links,
    Operator,
    OsdpPlan,
    OsdpProblem,
    gib_above,
    given_plan,
    solve,
    uniform_plan,
    with_cuts,
)
from realhf.planning.model.osdp.table import OperatorRow, operator_rows, plan_text
from realhf.wrapping.measuring import OptimizerCosts, SampleCosts
from realhf.wrapping.operators import ModuleOperator
from realhf.wrapping.recomputation import BlockCosts

MOST_SAMPLES = 2**16


@dataclass(frozen=True, kw_only=True)
class OsdpOptions:
    """Further options of `realhf.osdp`.

    modes: fixes the modes instead of choosing them: of all operators ("sharded", "4 sharded", "2 sharded + 2 zero1"),
        or pairs (operators, modes). The last pair that names an operator holds. Operators are named by their path in
        the model, with "*" and "0-3" for parts of it, and "others". `plan.modes` of another wrapping can be given.
    slices: large weights are cut into up to this number of slices.
    prefetch: the next slice is gathered while one is in use.
    max_batch: the largest batch that is considered where `batch_size` is None.
    recompute: which blocks of the model run their forward pass again in the backward pass is chosen together with the
        modes; blocks are the members of its outermost lists and sequences.
    """

    modes: str | ModeRules | None = None
    slices: int = 4
    prefetch: bool = True
    max_batch: int = 512
    recompute: bool = False

    def __post_init__(self) -> None:
        check_fields("", self, {"slices": (1, MOST_SLICES), "max_batch": (1, MOST_SAMPLES)})


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """The modes of a module's operators with their predicted costs, beside one mode for all. `str()` is a table."""

    chosen: OsdpPlan
    slice_modes: Mapping[str, tuple[Mode, ...]]
    uniform: Mapping[Mode, OsdpPlan | None]

    @property
    def batch_size(self) -> int:
        """Samples of a rank and forward pass."""
        return self.chosen.batch

    @property
    def memory_bytes(self) -> int:
        """The predicted bytes of a rank."""
        return self.chosen.memory_bytes

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.chosen.step_s

    @property
    def modes(self) -> ModeRules:
        """The modes as rules, for `modes=` of another wrapping."""
        return tuple((name, modes_text(modes)) for name, modes in self.slice_modes.items())

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The blocks whose forward pass runs again in the backward pass, by path."""
        return self.chosen.problem.recomputed

    @property
    def rows(self) -> list[OperatorRow]:
        """The table: operators that are alike in one row, with their modes, seconds of a step and bytes of a rank."""
        return operator_rows(self.chosen)

    def __str__(self) -> str:
        return plan_text(self.chosen, self.uniform)


def problem_of(
    operators: Sequence[ModuleOperator],
    itemsize: int,
    measured: tuple[SampleCosts, OptimizerCosts],
    links: Links,
    memory_bytes: int,
    recomputed: tuple[str, ...] = (),
    bytes_less: int = 0,
) -> OsdpProblem:
    """The choice of modes, operators whole. `memory_bytes`: the memory for operators, gathers and activations.
    `recomputed`: blocks that run again, with `bytes_less` for a sample."""
    sample, optimizer = measured
    again = Counter({path: sample.uses[path] for path in sample.uses if _is_within(path, recomputed)})
    again_s = sum(sample.forward_s((path,)) * uses for path, uses in again.items())
    return OsdpProblem(
        operators=tuple(
            Operator(
                name=op.name,
                kind=op.kind,
                parameter_bytes=op.elements * itemsize,
                gradient_bytes=op.elements * itemsize,
                optimizer_bytes=round(op.elements * optimizer.state_bytes),
                update_s=op.elements * optimizer.update_s,
                accumulate_s=op.elements * optimizer.accumulate_s,
                modes=op.modes,
                most_slices=op.most_slices,
                gathers=len(ahead_s),
                ahead_s=ahead_s,
            )
            for op in operators
            for ahead_s in [_ahead_s(op, sample, again)]
        ),
        links=links,
        memory_bytes=memory_bytes,
        extra_bytes_per_sample=max(sample.bytes_per_sample - bytes_less, 0),
        extra_seconds_per_sample=sample.seconds_per_sample + again_s,
        reduces_whole=True,
        recomputed=recomputed,
    )


def _is_within(path: str, blocks: Sequence[str]) -> bool:
    return any(path.startswith(f"{block}.") for block in blocks)


def block_kinds(operators: Sequence[ModuleOperator], sample: SampleCosts, blocks: BlockCosts) -> dict[str, object]:
    """By block, its bytes and operators with their seconds: blocks with the same are alike."""
    return {
        block: (
            saved,
            tuple(
                (op.kind, *op.shapes.values(), sample.forward_s(op.modules), len(op.modules))
                for op in operators
                if any(_is_within(path, (block,)) for path in op.modules)
            ),
        )
        for block, saved in blocks.saved.items()
    }


def _ahead_s(op: ModuleOperator, sample: SampleCosts, again: Counter[str]) -> tuple[float, ...]:
    """For each gather of a sharded operator, seconds of a sample's pass through it: for every forward pass, those that
    run `again` too, and for the backward pass of a product, whose other gradient needs the weight."""
    forward_s = sample.forward_s(op.modules)
    uses = sum(sample.uses[path] + again[path] for path in op.modules)
    return (*[forward_s] * uses, *[2 * forward_s] * (op.kind == "linear"))


def choose(
    problems: Sequence[OsdpProblem], options: OsdpOptions, batch_size: int | None, group: dist.ProcessGroup | None
) -> ModulePlan:
    """The plan of all ranks: rank 0's, which others get as numbers. `problems` differ in the recomputed blocks.

    Raises:
        UserError: nothing fits, with the smallest memory that would do; or `options.modes` cannot be.
    """
    batches = range(1, options.max_batch + 1) if batch_size is None else range(batch_size, batch_size + 1)
    if group is None:  # one rank cannot share
        chosen, modes = _given(problems, "replicated", batches)
    elif options.modes is not None:
        chosen, modes = _given(problems, options.modes, batches)
    else:
        chosen = _decided([with_cuts(problem, options.slices) for problem in problems], batches, group)
        modes = {op.name: () for op in chosen.problem.operators}
        for op, mode, count in chosen.counts():
            modes[op.name] = (*modes[op.name], *[mode] * count)
    uniform = {mode: _fastest(uniform_plan(each, mode, batches) for each in problems) for mode in MODES}
    return ModulePlan(chosen=chosen, slice_modes=modes, uniform=uniform)


def _fastest(plans: Iterable[OsdpPlan | None]) -> OsdpPlan | None:
    return min(filter(None, plans), key=lambda plan: plan.seconds_per_sample, default=None)


def _decided(problems: Sequence[OsdpProblem], batches: range, group: dist.ProcessGroup) -> OsdpPlan:
    """The solution of rank 0 of the group, sent as one vector of numbers: batch, problem, bound, and all counts of
    slices."""
    count, modes = len(problems[0].operators), len(problems[0].modes)
    if group.size() == 1:
        return solve(problems, batches)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    numbers = torch.zeros(5 + count * modes, dtype=torch.float64, device=device)
    if group.rank() == 0:
        try:
            plan = solve(problems, batches)
        except UserError:
            dist.broadcast(numbers, group=group, group_src=0)  # zeros: nothing fits
            raise
        counts = [count for row in plan.slices for count in row]
        index = [problem.recomputed for problem in problems].index(plan.problem.recomputed)
        head = [plan.batch, index, plan.lower_bound_s, float(plan.proven), plan.search_s]
        numbers.copy_(torch.tensor([*head, *counts], dtype=torch.float64))
        dist.broadcast(numbers, group=group, group_src=0)
        return plan
    dist.broadcast(numbers, group=group, group_src=0)
    if not numbers[0]:
        solve(problems, batches)  # raises what rank 0 has
    batch, index, lower_bound_s, proven, search_s, *rest = numbers.tolist()
    problem = problems[int(index)]
    slices = tuple(tuple(map(int, rest[i * modes : (i + 1) * modes])) for i in range(count))
    operators = (replace(op, slices=sum(row), cuts=()) for op, row in zip(problem.operators, slices, strict=True))
    return OsdpPlan(
        problem=replace(problem, operators=tuple(operators), batch=int(batch) if problem.hides else problem.batch),
        batch=int(batch),
        slices=slices,
        lower_bound_s=lower_bound_s,
        proven=bool(proven),
        search_s=search_s,
    )


def _given(
    problems: Sequence[OsdpProblem], rules: str | ModeRules, batches: range
) -> tuple[OsdpPlan, dict[str, tuple[Mode, ...]]]:
    """The plan of rules (one text is for all operators), with the largest batch that fits, of the fastest problem."""
    modes = _ruled(problems[0].operators, (("*", rules),) if isinstance(rules, str) else rules)

    def cut(problem: OsdpProblem) -> OsdpProblem:
        return replace(problem, operators=tuple(replace(op, slices=len(modes[op.name])) for op in problem.operators))

    of_slices = list(modes.values())
    plan = _fastest(given_plan(cut(problem), of_slices, batches) for problem in problems)
    if plan is None:
        unlimited = (given_plan(cut(replace(each, memory_bytes=2**60)), of_slices, batches[:1]) for each in problems)
        smallest = min(each.memory_bytes for each in unlimited if each is not None)
        raise UserError(
            f"memory_gb={problems[0].memory_bytes / GIB:.4g} is too little for the given modes with batch "
            f"{batches[0]}; the smallest memory that does is {smallest} bytes ({gib_above(smallest)} GiB). "
            "Shard more operators, cut them into more slices, or leave `modes` out"
        )
    return plan, modes


def _ruled(operators: Sequence[Operator], rules: ModeRules) -> dict[str, tuple[Mode, ...]]:
    """The modes of every operator's slices. A pattern with "*" gives each operator a mode that it has."""
    modes: dict[str, tuple[Mode, ...]] = {op.name: ("zero1",) for op in operators}
    for pattern, text in rules:
        wanted = modes_in(text)
        named = [op for op in operators if names_operator(pattern, op.name)]
        if not named:
            raise UserError(
                f"modes: {pattern!r} names no operator of the model; they are "
                f"{', '.join(op.name for op in operators)}, or '*' for all"
            )
        for op in named:
            is_possible = len(wanted) <= op.most_slices and set(wanted) <= set(op.modes)
            if not is_possible and "*" not in pattern:
                raise UserError(
                    f"modes: {op.name!r} can be {', '.join(op.modes)} in at most {op.most_slices} slices, not "
                    f"{text!r}; choose from these"
                )
            first = wanted[0] if wanted[0] in op.modes else "zero1"
            modes[op.name] = wanted if is_possible else (first,)
    return modes
