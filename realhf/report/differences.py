"""What differs between a step as a run recorded it, and the same step executed once more."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realhf.rundir.samples import Sample

# Fields of a line of `metrics.jsonl` that are measured, or say how it was executed.
MEASURED = frozenset({"step", "time_s", "tokens_per_s", "calls", "peak_bytes", "plan", "num_workers"})


@dataclass(frozen=True)
class Difference:
    """`what`: for people; `recorded` and `again`: the values; `size`: of two numbers the difference, relative to the
    larger of both and 1, else None."""

    step: int
    what: str
    recorded: Any
    again: Any
    size: float | None = None

    def __str__(self) -> str:
        by = "" if self.size is None else f", which differs by {self.size:.2g}"
        return f"step {self.step}, {self.what}: {self.recorded} in the run, {self.again} now{by}"


def differences(
    recorded: Mapping[str, Any],
    again: Mapping[str, Any],
    samples: tuple[Sequence[Sample], Sequence[Sample]] = ((), ()),
    *,
    with_weights: bool = True,
) -> Iterator[Difference]:
    """Between two lines of one step of `metrics.jsonl`, with its samples: in the order in which calls compute.

    The weights that calls used come first, then the samples, the statistics, and the weights that trainings made. What
    only one of both has (an older version wrote the other) is no difference. `with_weights`: digests count, as they do
    unless sums were rounded in another order.
    """
    step = int(recorded["step"])
    calls = sorted(recorded["calls"], key=lambda name: float(recorded["calls"][name]["end"]))

    def of_calls(field: str, what: str) -> Iterator[Difference]:
        for name in calls:
            one, other = (line["calls"].get(name, {}).get(field) for line in (recorded, again))
            if None not in (one, other) and one != other:
                yield Difference(step, f"{what} {name}", one, other)

    yield from of_calls("weights_version", "the version of the weights of")
    if with_weights:
        yield from of_calls("weights", "the weights that were used by")
    yield from _of_samples(step, *samples)
    for name in (name for name in recorded if name in again and name not in MEASURED):
        if found := _of_numbers(step, f"the statistic {name}", recorded[name], again[name]):
            yield found
    if with_weights:
        yield from of_calls("new_weights", "the weights that were made by")


def _of_samples(step: int, recorded: Sequence[Sample], again: Sequence[Sample]) -> Iterator[Difference]:
    others = {sample.sample: sample for sample in again}
    for one in recorded:
        if other := others.get(one.sample):
            for field in ("prompt", "response"):
                before, now = (getattr(each, field) for each in (one, other))
                if before != now:
                    yield Difference(step, f"the {field} of sample {one.sample}", repr(before), repr(now))
            if found := _of_numbers(step, f"the reward of sample {one.sample}", one.reward, other.reward):
                yield found


def _of_numbers(step: int, what: str, recorded: Any, again: Any) -> Difference | None:
    if recorded == again:
        return None
    numbers = [float(each) for each in (recorded, again) if isinstance(each, float | int) and math.isfinite(each)]
    size = abs(numbers[0] - numbers[1]) / max(1.0, *map(abs, numbers)) if len(numbers) == 2 else None
    return Difference(step, what, recorded, again, size)
