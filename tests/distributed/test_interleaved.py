"""Interleaved pipelines in more layouts: one AdamW step against transformers, and parameters that change layouts."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.geometry.boxes import device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.shards import Placement
from realhf.parallel.groups import GroupTable
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.plan.planner import plan_between
from tests.distributed.pool import run_distributed
from tests.distributed.test_training_compute import SEQUENCE, WAYS, Case, Outcome, check_step, run_cases
from tests.unit.engine.losses import ONE_RANK, boxes_of, tiny

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FOUR, FIVE, SIX = (tiny(num_layers=n) for n in (4, 5, 6))
TIED = tiny(num_layers=5, tied_embeddings=True)
CASES = {
    "pp2, 2 chunks, 4 layers": Case(pp=2, chunks=2, config=FOUR, micro_batches=4),
    "pp2, 2 chunks, 5 layers": Case(pp=2, chunks=2, config=FIVE, micro_batches=4),
    "pp2, 3 chunks, 6 layers": Case(pp=2, chunks=3, config=SIX, micro_batches=4),
    "pp2, 3 chunks, one micro-batch": Case(pp=2, chunks=3, config=SIX, micro_batches=1),
    "pp2, 2 chunks, 7 micro-batches": Case(pp=2, chunks=2, config=FIVE, micro_batches=7),
    "pp3, 2 chunks, 5 micro-batches": Case(pp=3, chunks=2, config=SIX, micro_batches=5),
    "pp4, 2 chunks, 6 micro-batches": Case(pp=4, chunks=2, config=tiny(num_layers=9), micro_batches=6),
    "tp2 pp2, 2 chunks": Case(tp=2, pp=2, chunks=2, config=FIVE, micro_batches=4),
    "dp2 pp2, 2 chunks": Case(dp=2, pp=2, chunks=2, config=FIVE, micro_batches=3),
    "tied, pp2, 2 chunks": Case(pp=2, chunks=2, config=TIED, micro_batches=4),
    "tied, dp2 pp2, 2 chunks, recomputed": Case(
        dp=2, pp=2, chunks=2, config=TIED, micro_batches=2, compute=WAYS["full"]
    ),
    "fewer tokens than ranks, tp2 pp2, 2 chunks": Case(
        tp=2, pp=2, chunks=2, config=FOUR, lengths=(1, 3), micro_batches=8, compute=SEQUENCE
    ),
    "scalar, tp2 pp2, 2 chunks": Case(
        tp=2, pp=2, chunks=2, config=tiny(num_layers=4, head="scalar"), compute=WAYS["sequence"]
    ),
}


def run_all(rank: int) -> dict[str, Outcome]:
    return run_cases(CASES, GroupTable([case.layout for case in CASES.values()], rank))


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Outcome]]:
    return run_distributed(run_all, 4)


@pytest.mark.parametrize("name", CASES)
def test_one_step_is_that_of_transformers(name: str, ranks: list[dict[str, Outcome]]) -> None:
    check_step(CASES[name], {rank: ranks[rank][name] for rank in CASES[name].layout.mesh.devices})


WAYS_THERE = (
    Layout(DeviceMesh(0, 4), ParallelStrategy(dp=2, pp=2, chunks=2)),
    Layout(DeviceMesh(0, 4), ParallelStrategy(tp=2, pp=2)),
    Layout(DeviceMesh(1, 2), ParallelStrategy(pp=2, chunks=2)),
    Layout(DeviceMesh(0, 3), ParallelStrategy(pp=3)),
    Layout(DeviceMesh(0, 4), ParallelStrategy(tp=2, pp=2, chunks=2)),
)


def reallocate_along(rank: int) -> dict[str, np.ndarray]:
    """The boxes that this rank has at the end of a way through all the layouts."""
    table = GroupTable(WAYS_THERE, rank)

    def model_in(layout: Layout) -> ShardedModel | None:
        inside = rank in layout.mesh.devices
        return ShardedModel(ModelSpec(TIED, table.groups(layout), torch.float64)) if inside else None

    source = model_in(WAYS_THERE[0])
    assert source is not None
    source.initialise(seed=5)
    for before, after in pairwise(WAYS_THERE):
        target = model_in(after)
        plan = plan_between(TIED, Placement(before), Placement(after), 2, element_bytes=8)
        ours, wanted = source.residency.held() if source else [], target.residency.held() if target else []
        execute(Reallocation(plan, rank, ours, wanted, model_name="actor"))
        source = target
    assert source is not None
    return {name: local.numpy().copy() for name, (_, local) in boxes_of(source).items()}


def whole(config: DecoderConfig) -> dict[str, torch.Tensor]:
    model = ShardedModel(ModelSpec(config, ONE_RANK, torch.float64))
    model.initialise(seed=5)
    return {name: local for name, (_, local) in boxes_of(model).items()}


def test_parameters_keep_every_bit_on_a_way_through_layouts() -> None:
    layout, expected = WAYS_THERE[-1], whole(TIED)
    found = run_distributed(reallocate_along, 4)
    for rank in layout.mesh.devices:
        boxes = device_boxes(TIED, layout, rank)
        assert {box.name for box in boxes} == found[rank].keys()
        for box in boxes:
            where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            np.testing.assert_array_equal(found[rank][box.name], expected[box.name][where].numpy())
