"""The job of the profiler: written by `realhf profile`, read by its workers."""

import msgspec

from realhf.architecture.model import DecoderConfig, DType
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import Measurement

# Its name in the workers' run directory.
JOB_FILE = "profile_job.json"


class ProfileTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model type in one dtype; its profile is written to `path`."""

    model: DecoderConfig
    dtype: DType
    path: str


class ProfileJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of one start of the profiler's workers.

    Sequences have `sequence_length` tokens, evenly spread over `length_spread` tokens to either side. `max_tokens` and
    `max_sequences` are of a micro-batch and of a decode step; `batch_size` is the experiment's samples a step.
    `constants` are measured as well, products in `dtypes`, and written to `constants_path`.

    There are `num_workers` on each of `num_nodes` nodes. The workers of the first node measure the constants of one
    machine, all of them the network, over `network_interface` (None: that on which the first worker is reached).
    Without a name of the `hardware` the nodes are described on the first one, and the description is written to
    `description_path`; then the targets that are `kept` ("HARDWARE/FILE") are not measured again. `described`: the
    hardware that the devices must be.
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
    num_nodes: int = 1
    network_interface: str | None = None
    described: Hardware | None = None
    description_path: str = ""
    kept: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The workers of all nodes."""
        return self.num_nodes * self.num_workers
