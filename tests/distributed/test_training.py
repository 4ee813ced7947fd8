"""Every layout against one process: outputs, loss, gradient norm, parameters after optimizer steps."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import RunError
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.interface import LossFunction
from realhf.engine.model import ShardedModel
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import GroupTable, ParallelGroups
from tests.distributed.pool import run_distributed
from tests.unit.engine.losses import (
    ONE_RANK,
    boxes_of,
    next_token_loss,
    random_batch,
    split_like,
    tiny,
    trained_tokens,
    value_loss,
)

pytestmark = pytest.mark.distributed

WORLD_SIZE, SAMPLES, STEPS = 4, 16, 2
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, warmup_steps=1, max_grad_norm=0.4)
PLAIN, SCALAR, TIED = tiny(), tiny(head="scalar"), tiny(tied_embeddings=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    config: DecoderConfig = PLAIN
    dp: int = 1
    tp: int = 1
    pp: int = 1
    first: int = 0
    micro_batches: int = 2
    dtype: str = "float64"

    @property
    def layout(self) -> Layout:
        strategy = ParallelStrategy(self.dp, self.tp, self.pp)
        return Layout(DeviceMesh(self.first, strategy.size), strategy)


CASES = {
    "dp4": Case(dp=4),
    "tp4": Case(tp=4),
    "pp4": Case(pp=4, micro_batches=8),
    "pp4, one micro-batch": Case(pp=4, micro_batches=1),
    "pp2 tp2": Case(pp=2, tp=2, micro_batches=4),
    "dp2 tp2": Case(dp=2, tp=2),
    "dp2 pp2": Case(dp=2, pp=2, micro_batches=4),
    "pp3, uneven stages, ranks 1 to 3": Case(config=tiny(num_layers=5), pp=3, first=1, micro_batches=4),
    "tp2, grouped queries, ranks 2 and 3": Case(config=tiny(num_kv_heads=2), tp=2, first=2),
    "tied, pp2 tp2": Case(config=TIED, pp=2, tp=2),
    "tied, dp2 pp2": Case(config=TIED, dp=2, pp=2, micro_batches=4),
    "tied, dp2 tp2": Case(config=TIED, dp=2, tp=2),
    "scalar, pp2 tp2": Case(config=SCALAR, pp=2, tp=2),
    "scalar, dp4": Case(config=SCALAR, dp=4, micro_batches=4),
    "float32, dp2 pp2": Case(dp=2, pp=2, dtype="float32"),
    "float32, pp2 tp2": Case(pp=2, tp=2, dtype="float32"),
    "float32, tp4": Case(tp=4, dtype="float32"),
}


@dataclass
class Outcome:
    """What one rank saw in a case."""

    outputs: list[np.ndarray]
    stats: list[dict[str, tuple[float, float]]]
    parameters: dict[str, tuple[Box, np.ndarray]]


def loss_of(config: DecoderConfig) -> LossFunction:
    return value_loss if config.head == "scalar" else next_token_loss


def run_case(case: Case, groups: ParallelGroups) -> Outcome:
    """A forward pass, then training steps on different mini-batches."""
    dtype = getattr(torch, case.dtype)
    model = ShardedModel(ModelSpec(case.config, groups, dtype, optimizer=OPTIMIZER, total_optimizer_steps=4))
    model.initialise(seed=5)
    outputs = model.forward(part(0, case, groups), "tokens", split_like, case.micro_batches).get("output", [])
    stats = [
        model.train_step(part(i, case, groups), "tokens", loss_of(case.config), trained_tokens, case.micro_batches)
        for i in range(STEPS)
    ]
    parameters = {name: (box, local.numpy().copy()) for name, (box, local) in boxes_of(model).items()}
    return Outcome([output.numpy() for output in outputs], stats, parameters)


def part(step: int, case: Case, groups: ParallelGroups) -> Batch:
    batch = random_batch(case.config, SAMPLES, seed=step)
    return batch.split(case.dp)[groups.dp_index]


def run_all(rank: int) -> dict[str, Outcome]:
    table = GroupTable([case.layout for case in CASES.values()], rank)
    return {
        name: run_case(case, table.groups(case.layout))
        for name, case in CASES.items()
        if rank in case.layout.mesh.devices
    }


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    return run_distributed(run_all, WORLD_SIZE)


@cache
def alone(config: DecoderConfig, dtype: str) -> Outcome:
    return run_case(Case(config=config, dtype=dtype, micro_batches=1), ONE_RANK)


@cache
def initial(config: DecoderConfig) -> dict[str, np.ndarray]:
    model = ShardedModel(ModelSpec(config, ONE_RANK, torch.float64))
    model.initialise(seed=5)
    return {name: local.numpy() for name, (_, local) in boxes_of(model).items()}


@pytest.mark.parametrize("name", CASES)
def test_layout_equals_one_process(name: str, outcomes: list[dict[str, Outcome]]) -> None:
    case = CASES[name]
    expected = alone(case.config, case.dtype)
    layout = case.layout
    tolerance = 1e-9 if case.dtype == "float64" else 1e-5

    for rank in layout.mesh.devices:
        dp, _, stage = layout.coordinates(rank)
        ours = outcomes[rank][name]
        if stage != case.pp - 1:
            assert ours.outputs == []
            assert ours.stats == [{}] * STEPS
            continue
        own = expected.outputs[dp * SAMPLES // case.dp : (dp + 1) * SAMPLES // case.dp]
        assert [x.shape for x in ours.outputs] == [x.shape for x in own]
        assert relative(np.concatenate(ours.outputs), np.concatenate(own)) < tolerance

    for step in range(STEPS):
        whole = expected.stats[step]
        of_dp = [outcomes[layout.output_device(dp)][name].stats[step] for dp in range(case.dp)]
        assert of_dp[0].keys() == whole.keys()
        for key in whole.keys() - {"grad_norm", "lr"}:
            value, weight = (sum(stats[key][i] for stats in of_dp) for i in (0, 1))
            assert weight == whole[key][1]
            assert value == pytest.approx(whole[key][0], rel=tolerance), key
        for stats in of_dp:
            assert stats["lr"] == whole["lr"]
            assert stats["grad_norm"] == (pytest.approx(whole["grad_norm"][0], rel=tolerance), 1.0)
        assert whole["grad_norm"][0] > OPTIMIZER.max_grad_norm  # so that clipping is part of the comparison

    before = initial(case.config)
    update = np.sqrt(sum(((expected.parameters[n][1] - before[n]) ** 2).sum() for n in before))
    assert update > 0.01
    for rank in layout.mesh.devices:
        parameters = outcomes[rank][name].parameters
        square = 0.0
        for parameter, (box, local) in parameters.items():
            where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            square += ((local - expected.parameters[parameter][1][where]) ** 2).sum()
        # Adam divides small numbers by small numbers: in float32 an update can only be held to some per cent.
        assert np.sqrt(square) / update < (1e-9 if case.dtype == "float64" else 0.02)


@pytest.mark.parametrize("name", CASES)
def test_replicas_hold_the_same_bits(name: str, outcomes: list[dict[str, Outcome]]) -> None:
    seen: dict[Box, np.ndarray] = {}
    copies = 0
    for rank in CASES[name].layout.mesh.devices:
        for box, local in outcomes[rank][name].parameters.values():
            if box in seen:
                copies += 1
                np.testing.assert_array_equal(local, seen[box], err_msg=f"{box} on rank {rank}")
            seen[box] = local
    case = CASES[name]
    assert (copies > 0) == (case.dp > 1 or case.tp > 1 or (case.pp > 1 and case.config.tied_embeddings))


def relative(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


def wait_for_silent_stage(rank: int) -> str:
    layout = Layout(DeviceMesh(0, 2), ParallelStrategy(pp=2))
    groups = GroupTable([layout], rank).groups(layout)
    if rank == 0:
        return ""  # it stays until all are done, but sends nothing
    model = ShardedModel(ModelSpec(PLAIN, groups, torch.float32, timeout_s=0.5))
    with pytest.raises(RunError) as error:
        model.forward(random_batch(PLAIN, 4), "tokens", split_like, micro_batches=1)
    return str(error.value)


def test_a_silent_stage_ends_the_wait_by_name() -> None:
    message = run_distributed(wait_for_silent_stage, 2)[1]
    assert message.startswith("rank 1 (pipeline stage 1) waited for a message from rank 0, at most 0.5 s")
