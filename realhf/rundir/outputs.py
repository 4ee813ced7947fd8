"""`outputs.jsonl`: by step the lengths and digests of all that its calls made, to compare with (`realhf verify`)."""

from collections.abc import Collection
from pathlib import Path

import msgspec
import numpy as np

from realhf.base.files import decode_json
from realhf.dataflow.interface import SampleDType
from realhf.rundir.lines import Step, read_lines

DIGEST_BYTES = 8  # a sample, as workers send them; four of them are kept
SAMPLE = np.dtype([("length", "<u4"), ("digest", "<u4")])


class KeyOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key of all samples of a step. `samples` has a `SAMPLE` for each id; `digest` is of the whole digests of all of
    them, in 16 hexadecimal digits: the same however samples were divided over workers."""

    dtype: SampleDType
    digest: str
    samples: bytes

    def __post_init__(self) -> None:
        if len(self.samples) % SAMPLE.itemsize:
            raise ValueError(f"the samples have {len(self.samples)} bytes, must be a multiple of {SAMPLE.itemsize}")

    def table(self) -> np.ndarray:
        """[samples] of `SAMPLE`."""
        return np.frombuffer(self.samples, SAMPLE)


class CallOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of a call: its keys, and the names of its statistics in the step's line of `metrics.jsonl`."""

    keys: dict[str, KeyOutputs]
    statistics: tuple[str, ...] = ()


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line; `step` counts from 1."""

    step: Step
    calls: dict[str, CallOutputs]


def outputs_line(line: bytes) -> StepOutputs:
    """Raises BadContentError."""
    return decode_json(line, StepOutputs)


def read_outputs(path: Path, steps: Collection[int]) -> dict[int, dict[str, CallOutputs]]:
    """Of these steps, by call; damaged lines are left out."""
    found: dict[int, dict[str, CallOutputs]] = {}

    def keep(line: bytes) -> None:
        if (of_step := outputs_line(line)).step in steps:
            found[of_step.step] = of_step.calls

    read_lines(path, keep)
    return found
