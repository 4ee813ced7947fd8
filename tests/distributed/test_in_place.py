"""The peak of parameters while a copy is filled in place and taken back: that of the larger part and one bucket, on ten
pairs of layouts, over gloo and over the host's memory."""

import weakref
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realhf.architecture.compute import Computation, DataParallel
from realhf.cpu import host_group
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.engine.residency.in_place import PageByPage
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.micro_dp import grouped_like
from realhf.geometry.shards import Placement
from realhf.parallel.groups import GroupTable, ParallelGroups
from realhf.realloc.execute import carriers
from realhf.realloc.execute.carriers import Carrier, carrier_between
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.plan.planner import plan_between
from tests.distributed.pool import run_distributed
from tests.unit.engine.losses import tiny
from tests.unit.engine.test_in_place import resident_bytes

pytestmark = pytest.mark.distributed

CONFIG = tiny(hidden_size=128, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=4, vocab_size=2048)
BUCKET_BYTES = 2**18
RANKS = 4
PAIRS = [  # dp, tp, pp of the home; tp, pp of the copy
    (1, 4, 1, 2, 1), (1, 4, 1, 1, 1), (1, 2, 2, 2, 1), (1, 2, 2, 1, 2), (1, 2, 2, 1, 1),
    (1, 1, 4, 1, 2), (1, 1, 4, 1, 1), (2, 2, 1, 1, 1), (2, 1, 2, 1, 1), (4, 1, 1, 1, 1),
]  # fmt: skip
TRANSPORTS = ("gloo", "host memory")


@dataclass
class Held:
    """Bytes of `vectors`, page by page, and of buffers; the most of them so far."""

    vectors: list[Tensor] = field(default_factory=list)
    buffers: int = 0
    peak: int = 0

    def look(self) -> None:
        self.peak = max(self.peak, self.buffers + resident_bytes(*self.vectors))

    def buffers_like(self, views: list[Tensor]) -> list[Tensor]:
        buffers = _buffers_like(views)
        self._add(sum(view.nbytes for view in views))
        weakref.finalize(buffers[0].untyped_storage(), self._add, -sum(view.nbytes for view in views))
        return buffers

    def _add(self, size_bytes: int) -> None:
        self.buffers += size_bytes
        self.look()


_buffers_like = carriers.buffers_like


@dataclass(frozen=True)
class Outcome:
    """Of a rank, in bytes. is_whole: the copy had its parameters, and the home is as before."""

    peak: int
    home: int
    copy: int
    is_whole: bool


def layouts_of(pair: tuple[int, ...]) -> tuple[Layout, Layout]:
    dp, tp, pp, of_copy, stages = pair
    mesh, size = DeviceMesh(0, RANKS), RANKS // (of_copy * stages)
    home, copy = Layout(mesh, ParallelStrategy(dp, tp, pp)), Layout(mesh, ParallelStrategy(size, of_copy, stages))
    return home, grouped_like(home, copy, CONFIG.num_layers) or copy


def parameters(groups: ParallelGroups, data_parallel: DataParallel = "zero1") -> ShardedModel:
    compute = Computation(data_parallel=data_parallel)
    return ShardedModel(ModelSpec(CONFIG, groups, torch.float32, compute=compute))


def moved(rank: int, table: GroupTable, pair: tuple[int, ...], carrier: Carrier, held: Held) -> Outcome:
    home_layout, layout = layouts_of(pair)
    # A home that a copy has whole is divided in another way.
    data_parallel: DataParallel = "fsdp" if home_layout == layout else "zero1"
    copy, expected = (parameters(table.groups(layout)) for _ in range(2))
    home, twin = (parameters(table.groups(home_layout), data_parallel) for _ in range(2))
    copy.residency.free()
    for model in (expected, home, twin):
        model.initialise(seed=7)
    home.residency._passage = PageByPage(BUCKET_BYTES, held.look)
    source, target = Placement(home_layout, data_parallel), Placement(layout)
    plan = plan_between(CONFIG, source, target, RANKS, element_bytes=4, bucket_bytes=BUCKET_BYTES // 2)
    held.vectors, held.peak = [home.parameters.flat, copy.parameters.flat], 0
    dist.barrier()
    home.residency.lend_to(copy.residency, in_place=True)
    execute(Reallocation(plan, rank, home.residency.readable(), copy.residency.held(), carrier))
    held.look()
    parts = zip(copy.residency.held(), expected.residency.held(), strict=True)
    is_whole = all(torch.equal(part, other) for (_, part), (_, other) in parts)
    dist.barrier()
    home.residency.take_back_from(copy.residency)
    held.look()
    is_whole &= torch.equal(home.parameters.flat, twin.parameters.flat)
    return Outcome(held.peak, home.parameters.flat.nbytes, copy.parameters.flat.nbytes, is_whole)


def run_all(rank: int, transport: str) -> list[Outcome]:
    held = Held()
    carriers.buffers_like = held.buffers_like  # type: ignore[assignment]  # in a process of its own
    group = dist.new_group(backend=host_group.BACKEND) if transport == "host memory" else None
    carrier = carrier_between(group)
    table = GroupTable([layout for pair in PAIRS for layout in layouts_of(pair)], rank)
    return [moved(rank, table, pair, carrier, held) for pair in PAIRS]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_peak_is_that_of_the_larger_part_and_a_bucket(transport: str) -> None:
    for outcomes in zip(*run_distributed(run_all, RANKS, transport), strict=True):
        for found in outcomes:
            assert found.is_whole
            assert found.copy > found.home
            assert found.copy <= found.peak <= 1.05 * (found.copy + BUCKET_BYTES)
            assert found.peak < found.home + found.copy
