"""What `realhf plan --osdp` asks, and the answer: the best modes for the operators of a model."""

from dataclasses import dataclass

from realhf.architecture.model import DType
from realhf.architecture.named import architecture
from realhf.base.numbers import DEVICES, Bounds, check_range
from realhf.planning.clusters import MEMORY_GB
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import GIB
from realhf.planning.osdp.decoder import Training, decoder_problem
from realhf.planning.osdp.solver import MODES, Links, Mode, OsdpPlan, OsdpProblem, best_slicing, sliced, uniform_plan

RANGES: dict[str, Bounds] = {
    "devices": (2, DEVICES[1]),  # with one device there is nothing to shard
    "memory_gb": MEMORY_GB,
    "batch": (1, 2**16),
    "max_batch": (1, 2**16),
    "sequence_length": (1, 2**20),
    "slices": (1, 64),
    "launch_us": (0, 1e6),
    "seconds": (0, 10**5),
}


@dataclass(frozen=True, kw_only=True)
class OsdpRequest:
    """Training of `model` (a name, or the path of a config.json) on a data-parallel group of `devices`.

    `memory_gb`: GiB of a device. `batch`: samples a device and step; None: the fastest per sample, up to `max_batch`.
    `sequence_length`: tokens of a sample. `slices`: the most that an operator is cut into. `launch_us`: microseconds
    to start a collective. `seconds`: limit of the search.

    Raises:
        UserError: a number is out of its range.
    """

    model: str
    devices: int
    memory_gb: float
    batch: int | None = None
    max_batch: int = 512
    sequence_length: int = 2048
    slices: int = 4
    modes: tuple[Mode, ...] = MODES
    recompute: bool = False
    prefetch: bool = False
    dtype: DType = "bfloat16"
    hardware: str = "h100"
    launch_us: float = 10.0
    seconds: float = 1.0

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            if getattr(self, name) is not None:
                check_range(f"--{name.replace('_', '-')}", getattr(self, name), low, high)

    def problem(self) -> OsdpProblem:
        """The problem with whole operators.

        Raises:
            UserError: the model or the hardware is not known, or a mode is not.
        """
        hardware = load_hardware(self.hardware)
        training = Training(
            sequence_length=self.sequence_length,
            flops=hardware.flops(self.dtype),
            dtype=self.dtype,
            recompute=self.recompute,
        )
        return decoder_problem(
            architecture(self.model),
            training,
            links=Links.ring(hardware, self.devices, launch_s=self.launch_us * 1e-6),
            memory_bytes=int(self.memory_gb * GIB),
            modes=self.modes,
            prefetch=self.prefetch,
        )


def choose(request: OsdpRequest) -> tuple[OsdpPlan, dict[Mode, OsdpPlan | None]]:
    """The best plan, and by mode the best one with this mode for all operators (None: it does not fit).

    Raises:
        UserError: as `OsdpRequest.problem`, or nothing fits.
    """
    whole = request.problem()
    # Whole operators have the lower latency, sliced ones the smaller gathers.
    slicings = sorted({request.slices, *(2**i for i in range(request.slices.bit_length()))})
    problems = [sliced(whole, slices) for slices in slicings]
    batches = range(1, request.max_batch + 1) if request.batch is None else range(request.batch, request.batch + 1)
    uniform = {}
    plan = best_slicing(problems, batches, time_limit_s=request.seconds)
    for mode in MODES:
        plans = [other for problem in problems if (other := uniform_plan(problem, mode, batches))]
        uniform[mode] = min(plans, key=lambda other: other.seconds_per_sample, default=None)
    return plan, uniform
