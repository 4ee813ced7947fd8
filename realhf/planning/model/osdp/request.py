"""What `realhf plan --osdp` asks, and the answer: the best modes for the operators of a model."""

from dataclasses import MISSING, dataclass

from realhf.architecture.compute import MODES, Mode
from realhf.architecture.model import DType
from realhf.architecture.named import architecture
from realhf.base.numbers import DEVICES, Bounds
from realhf.base.options import Options, option
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import GIB, MEMORY_GB
from realhf.planning.model.osdp.decoder import decoder_problem
from realhf.planning.model.osdp.problem import Links, OsdpPlan, OsdpProblem, slicings, solve, uniform_plan

BATCH: Bounds = (1, 2**16)


@dataclass(frozen=True, kw_only=True)
class OsdpRequest(Options):
    """Training of `model` (a name, or the path of a config.json) on a data-parallel group.

    Raises:
        UserError: a number is out of its range.
    """

    model: str
    # With one device there is nothing to shard.
    devices: int = option(MISSING, "devices of the data-parallel group", bounds=(2, DEVICES[1]))
    memory_gb: float = option(MISSING, "memory of a device in GiB (2^30 bytes)", bounds=MEMORY_GB)
    batch: int | None = option(None, "samples a device and step (default: the fastest per sample)", bounds=BATCH)
    max_batch: int = option(512, "largest batch to consider (default 512)", bounds=BATCH)
    sequence_length: int = option(2048, "tokens of a sample (default 2048)", bounds=(1, 2**20))
    slices: int = option(4, "cut operators into up to so many slices (default 4)", bounds=(1, 64))
    modes: tuple[Mode, ...] = MODES
    recompute: bool = option(False, "recompute activations: saves memory, gathers again")
    prefetch: bool = option(False, "hold two gathered slices instead of one")
    dtype: DType = option("bfloat16", "default bfloat16")
    hardware: str = option("h100", "a hardware description (default h100)")
    launch_us: float = option(10.0, "cost of starting a collective in microseconds (default 10)", bounds=(0, 1e6))
    seconds: float = option(1.0, "time limit of the search (default 1)", bounds=(0, 10**5))

    def problem(self) -> OsdpProblem:
        """The problem with whole operators.

        Raises:
            UserError: the model or the hardware is not known, or a mode is not.
        """
        hardware = load_hardware(self.hardware)
        given = OsdpProblem(
            operators=(),
            links=Links.ring(hardware, self.devices, launch_s=self.launch_us * 1e-6),
            memory_bytes=int(self.memory_gb * GIB),
            modes=self.modes,
            recompute=self.recompute,
            prefetch=self.prefetch,
        )
        return decoder_problem(
            architecture(self.model),
            given,
            sequence_length=self.sequence_length,
            flops=hardware.flops(self.dtype),
            dtype=self.dtype,
        )


def choose(request: OsdpRequest) -> tuple[OsdpPlan, dict[Mode, OsdpPlan | None]]:
    """The best plan, and by mode the best one with this mode for all operators (None: it does not fit).

    Raises:
        UserError: as `OsdpRequest.problem`, or nothing fits.
    """
    whole = request.problem()
    problems = slicings(whole, request.slices)
    batches = range(1, request.max_batch + 1) if request.batch is None else range(request.batch, request.batch + 1)
    uniform = {}
    plan = solve(problems, batches, time_limit_s=request.seconds)
    for mode in MODES:
        plans = [other for problem in problems if (other := uniform_plan(problem, mode, batches))]
        uniform[mode] = min(plans, key=lambda other: other.seconds_per_sample, default=None)
    return plan, uniform
