"""The time that the engine takes for gathering and reducing a slice, besides their collectives, measured on a small
module."""

import statistics
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from realhf.architecture.compute import Mode
from realhf.planning.model.osdp.collective_costs import NO_COSTS, CollectiveCosts
from realhf.planning.model.osdp.problem import Links
from realhf.wrapping.choice import OsdpOptions, choose, problem_of
from realhf.wrapping.measuring import OptimizerCosts, SampleCosts, seconds_of
from realhf.wrapping.operators import operators_of
from realhf.wrapping.trained import OsdpModule

OPERATORS, FEATURES, SAMPLES = 16, 32, 4  # so small that nothing but their number takes time
WARM_UPS, READINGS = 2, 5
USES = 3  # a sharded slice in a step: two gathers and a reduction
NOTHING = SampleCosts(
    bytes_per_sample=0, seconds_per_sample=0.0, uses=Counter(), products=Counter(), used_elsewhere=frozenset()
)


def handling_seconds(
    group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype, costs: CollectiveCosts
) -> float:
    """Seconds of each gather, and of each reduction, beside its collective (`costs`); never below 0, and the same on
    all ranks."""
    if group is None:
        return 0.0
    slices = [_step_seconds(mode, group, device, dtype) for mode in ("zero1", "sharded")]
    taken = torch.tensor((slices[1] - slices[0]) / OPERATORS / USES, dtype=torch.float64, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    size_bytes = FEATURES * FEATURES * dtype.itemsize
    known = (2 * costs.all_gather.seconds(size_bytes) + costs.reduce_scatter.seconds(size_bytes)) / USES
    return max(taken.item() - known, 0.0)


def _step_seconds(mode: Mode, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> float:
    """The median of a step of the small module with all operators in one mode."""
    linears = (nn.Linear(FEATURES, FEATURES, bias=False, device="meta") for _ in range(OPERATORS))
    module = nn.Sequential(*linears).to_empty(device=device).to(dtype)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    operators = operators_of(module)
    free = (NOTHING, OptimizerCosts(state_bytes=0.0, update_s=0.0))
    problem = problem_of(operators, dtype.itemsize, free, Links(num_devices=group.size(), measured=NO_COSTS), 2**40)
    plan = choose([problem], OsdpOptions(modes=mode), 1, group)
    wrapped = OsdpModule(module, operators, plan, lambda vectors: torch.optim.SGD(vectors), group, prefetch=True)
    inputs = torch.zeros(SAMPLES, FEATURES, dtype=dtype, device=device)

    def step() -> None:
        wrapped(inputs).sum().backward()
        wrapped.step()

    seconds = [seconds_of(step, device) for _ in range(WARM_UPS + READINGS)]
    return statistics.median(seconds[WARM_UPS:])
