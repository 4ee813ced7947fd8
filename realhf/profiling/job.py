"""The job of the profiler: written by `realhf profile`, read by its workers."""

from pathlib import Path

import msgspec

from realhf.architecture.compute import Reproducible
from realhf.architecture.model import DecoderConfig, DType
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import Measurement
from realhf.planning.model.profile import profile_path

# In the workers' run directory: the job, and the folder of what they have measured.
JOB_FILE, RESULTS = "profile_job.json", "results"


class ProfileTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model type in one dtype, computed as `reproducible` says."""

    model: DecoderConfig
    dtype: DType
    reproducible: Reproducible = "plan"

    @property
    def file(self) -> str:
        """The name of its profile's file."""
        return self.path("", None).name

    def path(self, hardware: str, root: Path | None) -> Path:
        """Where plans look for its profile; `root` is `profiles_root()` by default."""
        return profile_path(self.model, self.dtype, hardware, root, self.reproducible).absolute()


class ProfileJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of one start of the profiler's workers.

    Sequences have `sequence_length` tokens, evenly spread over `length_spread` tokens to either side. `max_tokens` and
    `max_sequences` are of a micro-batch and of a decode step; `batch_size` is the experiment's samples a step.
    `constants` are measured as well, products in `dtypes`.

    There are `num_workers` on each of `num_nodes` nodes. The workers of the first node measure the constants of one
    machine, all of them the network, over `network_interface` (None: that on which the first worker is reached).
    `hardware`: what the devices must be; None: it is described on the first node, and then the targets that are `kept`
    ("HARDWARE/FILE") are not measured again.
    """

    hardware: Hardware | None
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
    num_nodes: int = 1
    network_interface: str | None = None
    kept: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The workers of all nodes."""
        return self.num_nodes * self.num_workers
