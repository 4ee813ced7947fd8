"""What measured ways to train say: the chosen mix beside the others, times and memory beside the plan's, bytes sent."""

import statistics
from collections.abc import Iterator
from typing import Any

from lib.common import case
from lib.osdp_ranks import FSDP2, Measured, Outcome, Task
from lib.paired import Ratio, paired_ratio

from realhf.planning.model.hardware import GIB

# The chosen mix over the best way that fits: the interval begins at most here, and is no wider than this.
SLOWEST, WIDEST = 1.03, 0.1
TIME_ERROR, MEMORY_ERROR, BYTES_ERROR, GATHER_ERROR = 0.2, 0.05, 0.05, 0.1
PAPER_RATIO = 1.5  # bytes of sharded over replicated operators
MIB = 2**20


def time_cases(task: Task, outcome: Outcome) -> Iterator[dict[str, Any]]:
    """By limit: the chosen mix beside the best way that fits, beside FSDP2, and beside what was predicted."""
    for part, limit, name in zip(task.limits, outcome.limits, outcome.chosen, strict=True):
        where = f"{task.shape.name}, {_limit_text(part, limit)}"
        chosen = outcome.ways[name]
        rival = min(
            (other for other in fitting(outcome, limit) if other != name),
            key=lambda other: statistics.median(outcome.ways[other].seconds),
        )
        ratio = paired_ratio(chosen.seconds, outcome.ways[rival].seconds)
        holds = ratio.low <= SLOWEST and ratio.width < WIDEST
        yield _beside(f"{where}: chosen beside the best that fits, {rival}", task, chosen, outcome.ways[rival], ratio,
                      SLOWEST, holds)  # fmt: skip
        ratio = paired_ratio(chosen.seconds, outcome.ways[FSDP2].seconds)
        yield _beside(f"{where}: chosen beside FSDP2", task, chosen, outcome.ways[FSDP2], ratio,
                      1.0, ratio.high < 1 or part == 0)  # fmt: skip
    for name, way in outcome.ways.items():
        if way.planned_s and way.seconds:
            yield _near(f"{task.shape.name}, {name}: seconds of a step beside the plan's",
                        statistics.median(way.seconds), way.planned_s, "s", TIME_ERROR)  # fmt: skip


def fitting(outcome: Outcome, limit: int) -> Iterator[str]:
    """The timed ways whose plan fits under a limit. FSDP2 has no plan and needs about what all sharded needs: it counts
    as one that always fits."""
    for name, way in outcome.ways.items():
        if way.seconds and (name == FSDP2 or way.planned_bytes <= limit):
            yield name


def memory_cases(task: Task, outcome: Outcome) -> Iterator[dict[str, Any]]:
    """The peak of parameters, gradients, optimizer states and gathers of every way beside its plan's."""
    for name, way in outcome.ways.items():
        if way.planned_state_bytes:
            what = f"{task.shape.name}, dp{task.ranks}, {name}: peak of states and gathers beside the plan's"
            yield _near(what, way.state_bytes / MIB, way.planned_state_bytes / MIB, "MiB", MEMORY_ERROR)


def bytes_cases(task: Task, outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Bytes that a rank sends in a step: of every way beside its plan's, and of all sharded over all replicated.

    The paper's ratio is an upper bound: an embedding is gathered for its forward pass alone, and what the forward pass
    gathered last is still there for the backward pass.
    """
    for name, way in outcome.ways.items():
        if way.planned_sent_bytes:
            what = f"{task.shape.name}, dp{task.ranks}, {name}: bytes sent in a step beside the plan's"
            yield _near(what, way.sent_bytes / MIB, way.planned_sent_bytes / MIB, "MiB", BYTES_ERROR)
    sharded, replicated = (outcome.ways[f"all {mode}"].sent_bytes for mode in ("sharded", "replicated"))
    what = f"{task.shape.name}, dp{task.ranks}: bytes sent in a step, all sharded over all replicated"
    ratio = sharded / replicated
    yield case(what, sharded / MIB, "MiB", baseline=replicated / MIB, ratio=ratio, target=PAPER_RATIO,
               holds=1 < ratio <= PAPER_RATIO)  # fmt: skip


def split_cases(task: Task, outcome: Outcome) -> Iterator[dict[str, Any]]:
    """What is gathered at a time beside the largest operator's slice, or two of them with prefetch."""
    for split in outcome.splits:
        expected = (2 if split.prefetch else 1) * split.largest_bytes / split.slices
        how = f"in {split.slices} slices, {'the next one prefetched' if split.prefetch else 'no prefetch'}"
        yield _near(f"{task.shape.name}, dp{task.ranks}, {how}: gathered at a time", split.gathered_bytes / MIB,
                    expected / MIB, "MiB", GATHER_ERROR)  # fmt: skip


def _beside(
    name: str, task: Task, way: Measured, other: Measured, ratio: Ratio, target: float, holds: bool
) -> dict[str, Any]:
    """Seconds per sample of two ways; `ratio` is that of their times, with its interval in the name."""
    samples = task.shape.samples * task.ranks
    value, baseline = (statistics.median(each.seconds) / samples for each in (way, other))
    interval = {"interval": [ratio.low, ratio.high]}
    row = case(f"{name}: {ratio}", value, "s", baseline=baseline, ratio=baseline / value, target=target, holds=holds)
    return row | interval


def _near(name: str, value: float, expected: float, unit: str, error: float) -> dict[str, Any]:
    ratio = value / expected
    return case(name, value, unit, baseline=expected, ratio=ratio, target=1 + error, holds=abs(ratio - 1) <= error)


def _limit_text(part: float, limit: int) -> str:
    return f"{limit / GIB:.3f} GiB ({part:.0%} from all sharded to all replicated)"
