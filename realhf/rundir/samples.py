"""`samples.jsonl`: completions that a run made, as texts with their rewards, a few a step, for people to read."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec

from realhf.base.files import decode_json
from realhf.dataflow.splits import Split
from realhf.rewards.details import NO_DETAILS, RewardDetails
from realhf.rundir.lines import Step, append_line, read_lines, read_spread

# A reader wants the newest samples, and a few earlier ones to compare.
TAIL_BYTES = 2**20
PLACES = 16
WINDOW_BYTES = 2**18


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt and its response, as texts.

    step: from 1; 0 is an evaluation before training.
    sample: the place in the step's batch (of an evaluation: in its data set).
    reward: None where the sample has none.
    details: how it came to its reward.
    weights: the digest of the weights that drew the response (`realhf.master.weights`); "": not known.
    """

    step: Step
    sample: Step
    split: Split
    prompt: str
    response: str
    reward: float | None
    details: RewardDetails = NO_DETAILS
    weights: str = ""


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step, or of the evaluation after it."""

    step: int
    split: Split
    samples: tuple[Sample, ...]


def title_of(what: Sample | StepSamples) -> str:
    """Such as "step 3", "evaluation after step 3", or "evaluation/NAME after step 3"."""
    return f"step {what.step}" if what.split == "train" else f"{what.split} after step {what.step}"


def sample_line(line: bytes) -> Sample:
    """A line of `samples.jsonl`. Raises BadContentError."""
    return decode_json(line, Sample)


def append_samples(path: Path, samples: list[Sample]) -> None:
    """Adds the samples of one step, a line each. Raises OSError naming the file."""
    for sample in samples:
        append_line(path, sample)


def read_samples(path: Path, damaged: list[str]) -> list[StepSamples]:
    """The samples of the newest steps, and of some earlier ones that lie evenly in the file, the oldest first.

    Only a few parts of a long run's file are read. Lines there that cannot be read add a sentence to `damaged`.
    """
    tail = read_lines(path, sample_line, tail_bytes=TAIL_BYTES)
    damaged += tail.damaged
    size_bytes = path.stat().st_size if path.is_file() else 0
    newest = list(_by_step(tail.values))
    if size_bytes <= TAIL_BYTES:
        return newest
    # A step at the edge of the read part may lack samples: it is whole only if another one stands before it.
    earlier = [
        steps[0 if not offset else 1]
        for offset, values in read_spread(path, sample_line, PLACES, WINDOW_BYTES, end=size_bytes - TAIL_BYTES)
        if len(steps := list(_by_step(values))) > 1
    ]
    found = {(each.step, each.split): each for each in [*earlier, *(newest[1:] or newest)]}
    return sorted(found.values(), key=lambda each: (each.step, each.split != "train"))


def _by_step(samples: list[Sample]) -> Iterator[StepSamples]:
    for (step, split), values in groupby(samples, lambda sample: (sample.step, sample.split)):
        yield StepSamples(step, split, tuple(values))
