"""Single ranks of a model of 70 billion parameters on 128 devices, whose process groups answer at once.

torch's "fake" process group takes every rank of any world in one process; tensors are on `meta`, without memory.
"""

from dataclasses import replace

import pytest
import torch

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import Computation
from realhf.architecture.named import LLAMA
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import GroupTable
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE
from realhf.planning.model.memory import PlacedModel
from tests.unit.engine.fake_ranks import as_rank

WORLD = 128


def static_bytes(layout: Layout, rank: int) -> int:
    """Parameters, gradient and optimizer states that the engine makes on a rank."""
    compute = Computation(recomputation="full", sequence_parallel=True)
    with as_rank(rank, WORLD):
        groups = GroupTable([layout], rank).groups(layout)
        spec = ModelSpec(
            LLAMA["llama70b"], groups, torch.bfloat16, "meta", optimizer=OptimizerConfig(), compute=compute
        )
        model = ShardedModel(spec)
    assert model.trainer is not None
    states = model.trainer.optimizer.state.values()
    return sum(x.nbytes for x in (model.parameters.flat, model.parameters.gradient, *states) if x is not None)


@pytest.mark.parametrize(
    "strategy", [ParallelStrategy(4, 8, 4), ParallelStrategy(2, 8, 8), ParallelStrategy(16, 8, 1)], ids=str
)
def test_the_planner_counts_what_the_largest_stage_holds(strategy: ParallelStrategy) -> None:
    """To the byte. A stage between the first and the last has no embedding."""
    layout = Layout(DeviceMesh(0, WORLD), strategy)
    features = replace(ENGINE.on(load_hardware("h100")), recomputation="full", sequence_parallel=True)
    planned = PlacedModel(LLAMA["llama70b"], strategy, "bfloat16", features).static_bytes(trained=True)
    firsts = [layout.device(0, 0, stage) for stage in range(strategy.pp)]
    first, *between, last = (static_bytes(layout, rank) for rank in (*firsts, WORLD - 1))
    assert max(first, last, *between) == planned
    assert len(set(between[:-1])) <= 1
    assert first == pytest.approx(last, rel=1e-5)
