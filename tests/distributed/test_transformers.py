"""The transformers backend on two data-parallel ranks, replicated and fully sharded: as on one rank."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import Computation, DataParallel
from realhf.architecture.model import DType, Head
from realhf.engine.interface import GenerationRequest
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.shards import held_boxes
from realhf.models.checkpoint_index import state_owners
from realhf.parallel.groups import GroupTable, ParallelGroups
from tests.distributed.pool import run_distributed
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, split_like, trained_tokens, value_loss
from tests.unit.models.families import computing_in
from tests.unit.models.transformers_families import described, loaded, small

pytestmark = pytest.mark.distributed

TWO = Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2))
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
OPTIONS = GenerationOptions(max_new_tokens=6, eos_token=3, top_p=0.9)


@dataclass
class Seen:
    """Of one rank: its statistics and outputs of two steps, and what it would write into a checkpoint."""

    grad_norms: list[float]
    outputs: list[np.ndarray]
    sequences: list[list[int]]
    state: list[tuple[Box, np.ndarray]]
    elements: int


def one_rank(groups: ParallelGroups, directory: Path, case: "Case") -> Seen:
    head, kind = case.head, case.kind
    config = described(directory).with_head(head)
    arguments = {"optimizer": OPTIMIZER, "total_optimizer_steps": 10, "compute": Computation(data_parallel=kind)}
    batch = random_batch(config, 6).split(groups.layout.strategy.dp)[groups.dp_index]
    loss = value_loss if head == "scalar" else next_token_loss
    seen = Seen([], [], [], [], 0)
    dtype = getattr(torch, case.dtype)
    with computing_in(dtype):
        model = loaded(directory, config, groups, dtype, head == "scalar", **arguments)
        for step in range(2):
            seen.grad_norms.append(model.train_step(batch, "tokens", loss, trained_tokens, 2)["grad_norm"][0])
            model.residency.offload()
            model.residency.load()
            seen.outputs += [x.double().numpy() for x in model.forward(batch, "tokens", split_like, 1)["output"]]
            if head == "lm":
                made = model.generate(batch, GenerationRequest(OPTIONS, sample_key=(1, step), prompt_key="tokens"))
                seen.sequences += [sequence.tolist() for sequence in made.sequences]
                seen.outputs += [logprobs.double().numpy() for logprobs in made.logprobs]
    seen.state = [(box, tensor.double().numpy()) for box, tensor in model.state()]
    seen.elements = model.parameters.flat.numel()
    held = [box for box, _ in model.residency.held()]
    assert held == held_boxes(config, groups.layout, groups.rank, kind)
    owners = state_owners(config, groups.layout, case.dtype, kind)
    assert [box for box, _ in seen.state] == owners[groups.rank]
    return seen


@dataclass(frozen=True)
class Case:
    family: str
    kind: DataParallel
    head: Head = "lm"
    dtype: DType = "float64"


def job(rank: int, folder: Path, cases: list[Case]) -> list[Seen]:
    groups = GroupTable([TWO], rank).groups(TWO)
    return [one_rank(groups, folder / case.family, case) for case in cases]


@pytest.mark.parametrize(
    "cases",
    [
        [Case("Gemma3Text", "zero1"), Case("Gemma3Text", "fsdp"), Case("Gemma3Text", "fsdp", dtype="bfloat16")],
        pytest.param(
            [
                Case("Phi", "fsdp"),
                Case("Phi", "fsdp", dtype="float32"),
                Case("Olmo2", "zero1", "scalar"),
                Case("Olmo2", "fsdp", "scalar"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["default", "others"],
)
def test_two_ranks_are_as_one(cases: list[Case], tmp_path: Path) -> None:
    for family in {case.family for case in cases}:
        small(family, tmp_path / family)
    by_rank: list[list[Seen]] = run_distributed(job, 2, tmp_path, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        alone = one_rank(ONE_RANK, tmp_path / case.family, replace(case, kind="zero1"))
        if case.dtype == "float64":
            check_same(ranks, alone)
        else:  # what is rounded depends on the layout
            rounding = torch.finfo(getattr(torch, case.dtype)).eps
            assert ranks[0].grad_norms == pytest.approx(alone.grad_norms, rel=8 * rounding)
        if case.kind == "fsdp":
            assert max(seen.elements for seen in ranks) < 0.55 * alone.elements


def check_same(ranks: list[Seen], alone: Seen) -> None:
    assert [seen.grad_norms for seen in ranks] == 2 * [pytest.approx(alone.grad_norms, rel=1e-9)]
    for seen, theirs in zip(ranks, halves(alone.outputs), strict=True):
        for ours, other in zip(seen.outputs, theirs, strict=True):
            np.testing.assert_allclose(ours, other, atol=1e-9)
    assert [seen.sequences for seen in ranks] == halves(alone.sequences)
    whole = {box.name: values for box, values in alone.state}
    written = 0
    for box, values in (piece for seen in ranks for piece in seen.state):
        origin = Box(box.name, (0,) * len(box.shape), whole[box.name].shape)
        np.testing.assert_allclose(values, whole[box.name][box.slices_in(origin)], atol=1e-9)
        written += box.size
    assert written == sum(values.size for values in whole.values())


def halves(values: list) -> list[list]:
    """What each of two ranks has of runs of six samples."""
    runs = [values[i : i + 6] for i in range(0, len(values), 6)]
    return [[x for run in runs for x in run[part]] for part in (slice(3), slice(3, 6))]
