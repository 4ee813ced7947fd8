"""The request of `realhf osdp`, and the answer: the best modes for the operators of a model."""

from dataclasses import dataclass
from typing import Annotated

from realhf.architecture.compute import MODES, Mode
from realhf.architecture.model import DType
from realhf.architecture.named import architecture
from realhf.base.numbers import DEVICES, Bounds
from realhf.base.options import Option, Options
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import GIB, MEMORY_GB
from realhf.planning.model.osdp.decoder import decoder_problem
from realhf.planning.model.osdp.problem import Links, OsdpPlan, OsdpProblem, sliced, solve, uniform_plan, with_cuts

BATCH: Bounds = (1, 2**16)


@dataclass(frozen=True, kw_only=True)
class OsdpRequest(Options):
    """Training of `model` (a name, or the path of a config.json) on a data-parallel group.

    Raises:
        UserError: a number is out of its range.
    """

    model: str
    # With one device there is nothing to shard.
    devices: Annotated[int, Option("devices of the data-parallel group", range=(2, DEVICES[1]))]
    memory_gb: Annotated[float, Option("memory of a device in GiB (2^30 bytes)", range=MEMORY_GB)]
    batch: Annotated[int | None, Option("samples a device and step (default: the fastest per sample)", range=BATCH)] = (
        None
    )
    max_batch: Annotated[int, Option("largest batch to consider", range=BATCH)] = 512
    sequence_length: Annotated[int, Option("tokens of a sample", range=(1, 2**20))] = 2048
    slices: Annotated[int, Option("most slices to cut an operator into", range=(1, 64))] = 4
    modes: tuple[Mode, ...] = MODES
    recompute: Annotated[bool, Option("recompute activations: saves memory, gathers again")] = False
    prefetch: Annotated[bool, Option("gather the next slice behind the computation with one: holds two")] = False
    dtype: Annotated[DType, Option("dtype of parameters and activations")] = "bfloat16"
    hardware: Annotated[str, Option("a hardware description", metavar="NAME")] = "h100"
    launch_us: Annotated[float, Option("cost of starting a collective in microseconds", range=(0, 1e6))] = 10.0
    seconds: Annotated[float, Option("time limit of the search", range=(0, 10**5))] = 1.0

    def problem(self) -> OsdpProblem:
        """The problem with whole operators.

        Raises:
            UserError: the model or the hardware is not known, or a mode is not.
        """
        hardware = load_hardware(self.hardware)
        given = OsdpProblem(
            operators=(),
            links=Links.ring(hardware, self.devices, launch_s=self.launch_us * 1e-6, overlap=1.0),
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
    problem = with_cuts(request.problem(), request.slices)
    batches = range(1, request.max_batch + 1) if request.batch is None else range(request.batch, request.batch + 1)
    uniform = {}
    plan = solve([problem], batches, time_limit_s=request.seconds)
    for mode in MODES:
        numbers = {slices for op in problem.operators for slices in op.cuts}
        plans = [other for slices in numbers if (other := uniform_plan(sliced(problem, slices), mode, batches))]
        uniform[mode] = min(plans, key=lambda other: other.seconds_per_sample, default=None)
    return plan, uniform
