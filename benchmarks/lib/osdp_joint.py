"""What `realhf.osdp` chooses where it counts that gathers are hidden, or may recompute, beside what it chooses without:
measured on a link that is made slow.

Cores that compute also copy the messages of one host, so no gather is hidden there. Here a message arrives later than
it would, and no core works meanwhile, as on a network.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

import torch.distributed as dist
from lib.common import case
from lib.osdp_cases import SLOWEST
from lib.osdp_ranks import Bench, Task, in_ranks
from lib.osdp_shapes import Shape
from lib.osdp_ways import Osdp
from lib.paired import paired_ratio
from torch import Tensor

from realhf.parallel import collectives

wrapping, measuring = map(import_module, ("realhf.wrapping.osdp", "realhf.profiling.collectives"))

LATENCY_S = 1e-4
# The gathers of all parameters in one pass take these parts of a forward pass: in a plan all are hidden, or cost more
# than computing half of the blocks again.
HIDDEN, DEAR = 0.8, 5.0
FORWARD = 1 / 3  # of a step without a link
MEASURED_BYTES = (2**12, 2**16, 2**20)  # larger ones would take long
HIDING = Shape(name="four blocks, many tokens", parts=((4, 320),), vocabulary=512, samples=32)
RECOMPUTING = Shape(name="six blocks, many tokens", parts=((6, 160),), vocabulary=512, samples=32)
PART = 0.5  # of what recomputation of all blocks saves, that is lacking for ZeRO-1


class _Late(dist.Work):
    """Something that arrives at a time, and needs no core until then."""

    def __init__(self, at: float):
        super().__init__()
        self._at = at

    def wait(self, *_: Any) -> bool:
        time.sleep(max(self._at - time.perf_counter(), 0))
        return True


@contextmanager
def slow_link(bytes_per_s: float) -> Iterator[None]:
    """Within it gathers and reductions of this process also take LATENCY_S and their bytes at this bandwidth, one after
    the other. What they cost is measured once, for all ways."""
    gather, scatter = collectives.all_gather_tensor, collectives.reduce_scatter_tensor
    free_at = 0.0  # when the link has sent all that it was given

    def arrives(flat: Tensor, group: dist.ProcessGroup) -> _Late:
        nonlocal free_at
        sent = flat.nbytes * (group.size() - 1) / group.size()
        free_at = max(free_at, time.perf_counter()) + LATENCY_S + sent / bytes_per_s
        return _Late(free_at)

    def late_gather(flat: Tensor, own: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        work, late = gather(flat, own, group=group, async_op=async_op), arrives(flat, group)
        if not async_op:  # integers on which ranks agree
            return work
        work.wait()
        return late

    def late_scatter(own: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
        late = arrives(flat, group)
        scatter(own, flat, group=group)
        late.wait()

    with (
        mock.patch.object(collectives, "all_gather_tensor", late_gather),
        mock.patch.object(collectives, "reduce_scatter_tensor", late_scatter),
        mock.patch.object(measuring, "SIZES_BYTES", MEASURED_BYTES),
        mock.patch.object(measuring, "OVERLAP_BYTES", MEASURED_BYTES[-1]),
        mock.patch.object(wrapping, "measure_collectives", cache(wrapping.measure_collectives)),
        mock.patch.object(wrapping, "handling_seconds", cache(wrapping.handling_seconds)),
        mock.patch.object(wrapping, "measure_overlap", cache(wrapping.measure_overlap)),
    ):
        yield


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Steps with what is chosen with and without; how much of the operators' bytes are sharded; blocks recomputed."""

    seconds: tuple[list[float], list[float]]
    sharded: tuple[float, float]
    recomputed: int
    modes_differ: bool


class _Joint(Bench):
    def link(self, part: float) -> float:
        """The bandwidth at which the gathers of one pass take this part of a forward pass, in bytes a second."""
        alone = self.osdp(modes="replicated")
        forward_s = FORWARD * statistics.median(self.times({"alone": alone})["alone"])
        parameters = sum(op.parameter_bytes for op in alone.plan.chosen.problem.operators)
        return parameters * (1 - 1 / self.mesh.size()) / (part * forward_s)

    def _pair(self, together: Osdp, alone: Osdp) -> Pair:
        plans, seconds = (together.plan, alone.plan), self.times({"together": together, "alone": alone})
        return Pair(
            seconds=(seconds["together"], seconds["alone"]),
            sharded=(_sharded(together), _sharded(alone)),
            recomputed=len(together.plan.recomputed),
            modes_differ=plans[0].modes != plans[1].modes,
        )


class Overlap(_Joint):
    """With room for all replicated."""

    def outcome(self) -> Pair:
        with slow_link(self.link(HIDDEN)):
            with mock.patch.object(wrapping, "measure_overlap", return_value=0.0):
                alone = self.osdp()
            return self._pair(self.osdp(), alone)


class Recomputation(_Joint):
    """With too little for ZeRO-1 and all activations."""

    def outcome(self) -> Pair:
        with slow_link(self.link(DEAR)):
            plain = self.osdp(modes="zero1").plan.memory_bytes
            again = self.osdp(modes="zero1", memory_bytes=plain - 2**20, recompute=True)
            problem = again.plan.chosen.problem
            saved = self.task.shape.samples * problem.bytes_per_sample * PART
            limit = int(plain - min(saved, (plain - again.plan.memory_bytes)))
            return self._pair(self.osdp(memory_bytes=limit, recompute=True), self.osdp(memory_bytes=limit))


def joint_cases(timing_s: float) -> Iterator[dict[str, Any]]:
    """Whether each changes the plan, and the step is no slower by it."""
    for what, bench, shape in (
        ("overlap", Overlap, HIDING),
        ("recomputation", Recomputation, RECOMPUTING),
    ):
        found: Pair = in_ranks(Task(shape=shape, ranks=2, limits=(), timing_s=timing_s), bench)
        ratio = paired_ratio(*found.seconds)
        value, baseline = (statistics.median(each) for each in found.seconds)
        shards = " and ".join(f"{part:.0%}" for part in found.sharded)
        row = case(
            f"{shape.name} on a slow link: chosen with {what} beside without ({shards} sharded, {found.recomputed} "
            f"blocks recomputed): {ratio}",
            value,
            "s",
            baseline=baseline,
            ratio=baseline / value,
            target=1.0,
            holds=found.modes_differ and ratio.value <= SLOWEST,
        )
        yield row | {"interval": [ratio.low, ratio.high]}


def _sharded(way: Osdp) -> float:
    """The part of the parameters that is sharded."""
    plan = way.plan.chosen
    sharded = sum(op.parameter_bytes * count / op.slices for op, mode, count in plan.counts() if mode == "sharded")
    return sharded / sum(op.parameter_bytes for op in plan.problem.operators)
