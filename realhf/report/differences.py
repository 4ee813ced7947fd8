"""The differences between a step as a run recorded it, and the same step executed once more."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from realhf.rundir.outputs import CallOutputs, KeyOutputs
from realhf.rundir.samples import Sample

# Fields of a line of `metrics.jsonl` that are measured, or say how it was executed, and how further ones end that are:
# the seconds that functions of rewards take are a statistic.
MEASURED_END = "_seconds"
MEASURED = frozenset({"step", "time_s", "tokens_per_s", "calls", "peak_bytes", "of_steps", "plan", "num_workers"})


@dataclass(frozen=True)
class Difference:
    """`what`: for people; `recorded` and `again`: the values; `size`: of two numbers the difference, relative to the
    larger of both and 1, else None; `call`: the call that made or used it, "" where that is not known."""

    step: int
    what: str
    recorded: Any
    again: Any
    size: float | None = None
    call: str = ""

    def __str__(self) -> str:
        by = "" if self.size is None else f", which differs by {self.size:.2g}"
        return f"step {self.step}, {self.what}: {self.recorded} in the run, {self.again} now{by}"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step: its line of `metrics.jsonl`, its samples as texts, the digests of what its calls made, and by call, key
    and sample the values that were recorded (`--record`)."""

    line: Mapping[str, Any]
    samples: Sequence[Sample] = ()
    outputs: Mapping[str, CallOutputs] = field(default_factory=dict)
    values: Mapping[tuple[str, str], Mapping[int, np.ndarray]] = field(default_factory=dict)


def differences(recorded: StepRecord, again: StepRecord, *, exactly: bool = True) -> Iterator[Difference]:
    """Between two records of one step, in the order in which its calls compute: of each call the weights that it used,
    what it made, its statistics, and the weights and optimizer states that it made. Texts of samples come after that.

    A key that only one of both has (an older version wrote the other) is no difference. Not `exactly`: sums were
    rounded in another order, and digests of weights and of floats do not count.
    """
    step, calls = int(recorded.line["step"]), recorded.line["calls"]
    told: set[str] = set()
    for call in sorted(calls, key=lambda name: float(calls[name]["end"])):
        yield from _of_field(recorded, again, call, "weights_version", "the version of the weights of")
        if exactly:
            yield from _of_field(recorded, again, call, "weights", "the weights that were used by")
            yield from _of_field(recorded, again, call, "states", "the optimizer states that were used by")
        yield from _of_outputs(recorded, again, call, exactly=exactly)
        statistics = recorded.outputs[call].statistics if call in recorded.outputs else ()
        yield from _of_statistics(step, statistics, recorded, again, call)
        told |= set(statistics)
        if exactly:
            yield from _of_field(recorded, again, call, "new_weights", "the weights that were made by")
            yield from _of_field(recorded, again, call, "new_states", "the optimizer states that were made by")
    yield from _of_samples(step, recorded.samples, again.samples)
    yield from _of_statistics(step, [name for name in recorded.line if name not in told], recorded, again)


def _of_field(recorded: StepRecord, again: StepRecord, call: str, field: str, what: str) -> Iterator[Difference]:
    one, other = (each.line["calls"].get(call, {}).get(field) for each in (recorded, again))
    if None not in (one, other) and one != other:
        yield Difference(int(recorded.line["step"]), f"{what} {call}", one, other, call=call)


def _of_outputs(recorded: StepRecord, again: StepRecord, call: str, *, exactly: bool) -> Iterator[Difference]:
    """In each key the first sample that differs; where sums were rounded in another order, the one that does most."""
    step = int(recorded.line["step"])
    keys = [each.outputs[call].keys if call in each.outputs else {} for each in (recorded, again)]
    for key in (key for key in keys[0] if key in keys[1]):
        one, other = keys[0][key], keys[1][key]
        values = [each.values.get((call, key), {}) for each in (recorded, again)]
        if differing := _differing(one, other, exactly=exactly):
            first, more = differing[0], len(differing) - 1
            what = f"{key} of sample {first}{f' (and of {more} more)' if more else ''}, made by {call}"
            if all(first in each for each in values) and not _are_equal(*(each[first] for each in values)):
                yield _of_values(step, what, call, *(each[first] for each in values))
            else:
                yield Difference(step, what, _in_words(one, first), _in_words(other, first), call=call)
        elif not exactly:
            found = [
                _of_values(step, f"{key} of sample {i}, made by {call}", call, value, values[1][i])
                for i, value in values[0].items()
                if i in values[1] and not _are_equal(value, values[1][i])
            ]
            yield from sorted(found, key=lambda each: -(each.size or 0.0))[:1]


def _differing(recorded: KeyOutputs, again: KeyOutputs, *, exactly: bool) -> list[int]:
    """The samples whose lengths or digests differ; all of them where the numbers of samples do."""
    one, other = recorded.table(), again.table()
    if len(one) != len(other):
        return list(range(max(len(one), len(other))))
    is_rounded = not exactly and "float" in recorded.dtype
    found = one["length"] != other["length"] if is_rounded else one != other
    places = np.flatnonzero(found).tolist()
    return places or ([] if is_rounded or recorded.digest == again.digest else list(range(len(one))))


def _are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _in_words(outputs: KeyOutputs, sample: int) -> str:
    table = outputs.table()
    if sample >= len(table):
        return "none"
    return f"length {table['length'][sample]}, digest {table['digest'][sample]:08x}"


def _of_values(step: int, what: str, call: str, recorded: np.ndarray, again: np.ndarray) -> Difference:
    """The element that differs most between two arrays; the first one where they hold tokens and the like."""
    if recorded.shape != again.shape:
        return Difference(step, f"the shape of {what}", recorded.shape, again.shape, call=call)
    sizes = (recorded != again).astype(float)
    if is_float := recorded.dtype.kind == "f":
        sizes = abs(recorded - again) / np.maximum(1.0, np.maximum(abs(recorded), abs(again)))
    place = np.unravel_index(int(np.nan_to_num(sizes, nan=np.inf).argmax()), sizes.shape)
    pair = recorded[place].item(), again[place].item()
    at = ", ".join(map(str, place))
    return Difference(step, f"{what}, at [{at}]", *pair, _size(*pair) if is_float else None, call)


def _of_statistics(
    step: int, names: Sequence[str], recorded: StepRecord, again: StepRecord, call: str = ""
) -> Iterator[Difference]:
    for name in (name for name in names if name in recorded.line and name in again.line):
        if name in MEASURED or name.endswith(MEASURED_END):
            continue
        what = f"the statistic {name}" + (f" of {call}" if call else "")
        if found := _of_numbers(step, what, recorded.line[name], again.line[name], call):
            yield found


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


def _of_numbers(step: int, what: str, recorded: Any, again: Any, call: str = "") -> Difference | None:
    if recorded == again:
        return None
    return Difference(step, what, recorded, again, _size(recorded, again), call)


def _size(*values: Any) -> float | None:
    numbers = [float(each) for each in values if isinstance(each, float | int) and math.isfinite(each)]
    return abs(numbers[0] - numbers[1]) / max(1.0, *map(abs, numbers)) if len(numbers) == 2 else None
