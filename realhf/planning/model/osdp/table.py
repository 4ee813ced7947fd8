"""The table of a choice of modes: operators that are alike in one row, with modes, seconds and bytes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from realhf.architecture.compute import Mode
from realhf.planning.model.hardware import GIB
from realhf.planning.model.osdp.problem import OsdpPlan

NAMES: dict[Mode, str] = {"replicated": "all replicated", "zero1": "all ZeRO-1", "sharded": "all sharded"}
COLUMNS = ("operator", "modes", "ms", "MiB")
PLAN_COLUMNS = ("plan", "batch", "step s", "comm. s", "samples/s", "GiB", "ratio")
MIB = 2**20
_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name that is a number
WIDEST_NAME = 32  # with the other columns, a table of at most 100


@dataclass(frozen=True)
class OperatorRow:
    """Operators that differ in one number of their names alone, the layer's.

    operators: `layers.0-11.up` for twelve of them.
    modes: of the slices of each.
    seconds: of a step, for communication and update, of all of them.
    bytes: of a rank, for parameters, gradients and optimizer states, of all of them.
    """

    operators: str
    count: int
    modes: str
    seconds: float
    bytes: float

    @property
    def cells(self) -> tuple[str, ...]:
        """As COLUMNS."""
        name = self.operators
        if len(name) > WIDEST_NAME:
            name = f"{name[: WIDEST_NAME - 4]} ..."
        return name, self.modes, f"{1e3 * self.seconds:.3f}", f"{self.bytes / MIB:.2f}"


def operator_rows(plan: OsdpPlan) -> list[OperatorRow]:
    """All operators, in their order."""
    problem = plan.problem
    groups: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for op, row in zip(problem.operators, plan.slices, strict=True):
        costs = [
            (count * problem.slice_seconds(op, mode), count * problem.slice_parts(op, mode) / problem.parts_per_byte)
            for mode, count in zip(problem.modes, row, strict=True)
        ]
        seconds, size = (sum(part) for part in zip(*costs, strict=True))
        modes = " + ".join(
            mode if op.slices == 1 else f"{count} {mode}"
            for mode, count in zip(problem.modes, row, strict=True)
            if count
        )
        groups.setdefault((_LAYER.sub("{}", op.name, count=1), modes), []).append((op.name, seconds, size))
    return [
        OperatorRow(
            operators=_joined([name for name, _, _ in members]),
            count=len(members),
            modes=modes,
            seconds=sum(seconds for _, seconds, _ in members),
            bytes=sum(size for _, _, size in members),
        )
        for (_, modes), members in groups.items()
    ]


def plan_rows(plan: OsdpPlan, uniform: Mapping[Mode, OsdpPlan | None]) -> list[tuple[str, ...]]:
    """The chosen plan beside those with one mode for all operators, as PLAN_COLUMNS."""
    found = []
    for name, row in {"chosen": plan, **{NAMES[mode]: other for mode, other in uniform.items()}}.items():
        if row is None:
            found.append((name, *["-"] * 4, "too large", "-"))
            continue
        seconds = (f"{row.step_s:.4f}", f"{row.communication_s:.4f}", f"{row.samples_per_s:.2f}")
        ratio = row.seconds_per_sample / plan.seconds_per_sample
        gib = row.memory_bytes / GIB
        found.append((name, str(row.batch), *seconds, f"{gib:.2f}" if gib >= 1 else f"{gib:.2g}", f"{ratio:.3f}"))
    return found


def plan_text(plan: OsdpPlan, uniform: Mapping[Mode, OsdpPlan | None]) -> str:
    """Both tables as plain text."""
    problem = plan.problem
    gathers = max(
        (problem.gather_bytes(op) for op, mode, count in plan.counts() if mode == "sharded" and count), default=0
    )
    activations = plan.batch * problem.bytes_per_sample + problem.extra_bytes
    return "\n".join(
        [
            f"{problem.links.num_devices} ranks, batch {plan.batch}: {plan.memory_bytes / GIB:.4g} of "
            f"{problem.memory_bytes / GIB:.4g} GiB",
            f"of these {gathers / MIB:.2f} MiB for gathers, {activations / MIB:.2f} MiB for activations",
            *([f"recomputed: {_joined(problem.recomputed)}"] if problem.recomputed else []),
            "",
            *aligned([COLUMNS, *(row.cells for row in operator_rows(plan))], words=2),
            "",
            *aligned([PLAN_COLUMNS, *plan_rows(plan, uniform)], words=1),
        ]
    )


def aligned(rows: Sequence[Sequence[str]], words: int) -> Iterable[str]:
    """Lines with columns of equal width; the first `words` begin at the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if number < words else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _joined(names: Sequence[str]) -> str:
    """Names that differ in their first number as one: `layers.0-3,5.up`; others side by side."""
    if len({_LAYER.sub("{}", name, count=1) for name in names}) > 1:
        return ", ".join(names)
    layers = [int(found[0]) for name in names if (found := _LAYER.search(name))]
    if not layers or len(names) == 1:
        return names[0]
    ranges: list[tuple[int, int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], layer)
        else:
            ranges.append((layer, layer))
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return _LAYER.sub(text, names[0], count=1)
