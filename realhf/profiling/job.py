"""What the profiler is asked to measure: written by `realhf profile`, read by its workers."""

import msgspec

from realhf.architecture.model import DecoderConfig, DType
from realhf.planning.model.measured import Measurement

# Its name in the workers' run directory.
JOB_FILE = "profile_job.json"


class ProfileTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model type in one dtype; its profile is written to `path`."""

    model: DecoderConfig
    dtype: DType
    path: str


class ProfileJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one start of the profiler's workers measures.

    Sequences have `sequence_length` tokens, evenly spread over `length_spread` tokens to either side. `max_tokens` and
    `max_sequences` are of a micro-batch and of a decode step; `batch_size` is the experiment's samples a step.
    `constants` are measured as well, products in `dtypes`, and written to `constants_path`.
    """

    hardware: str
    targets: tuple[ProfileTarget, ...]
    num_workers: int
    batch_size: int
    sequence_length: int
    length_spread: int
    max_tokens: int
    max_sequences: int
    repetitions: int
    timeout_s: float
    constants: tuple[Measurement, ...] = ()
    dtypes: tuple[DType, ...] = ()
    constants_path: str = ""
