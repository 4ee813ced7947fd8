"""Fully sharded data parallelism: one AdamW step against transformers and against ZeRO-1 of the same layout, generation
from shards, and the bytes that a rank keeps."""

import gc
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import Computation
from realhf.engine.interface import GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.engine.train.data_parallel import NativeParameters, place_of
from realhf.engine.train.gathering import GatheredUnit
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.shards import shard_boxes, units
from realhf.parallel.groups import GroupTable, ParallelGroups
from tests.distributed.pool import run_distributed
from tests.distributed.test_training_compute import FAMILIES, Case, alone, built, oracle, relative
from tests.unit.engine.losses import next_token_loss, split_like, tiny, trained_tokens, value_loss

pytestmark = pytest.mark.distributed

WORLD_SIZE = 4
TIED = tiny(tied_embeddings=True, num_layers=3)


def way(**changes: Any) -> Computation:
    return Computation(data_parallel="fsdp", **changes)


DEFAULT = {
    "dp2": Case(dp=2, micro_batches=2, compute=way()),
    "dp2, first": Case(
        dp=2, micro_batches=2, config=tiny(num_layers=4), compute=way(recomputation="full", recomputed_layers=2)
    ),
    "dp2 tp2, sequence selective": Case(dp=2, tp=2, compute=way(sequence_parallel=True, recomputation="selective")),
    "tied, dp2 pp2": Case(dp=2, pp=2, micro_batches=4, config=TIED, compute=way()),
}
SLOW = {
    "dp2 pp2, 2 chunks": Case(dp=2, pp=2, chunks=2, micro_batches=4, config=tiny(num_layers=5), compute=way()),
    "tied, dp2 pp2, 2 chunks, selective": Case(
        dp=2,
        pp=2,
        chunks=2,
        micro_batches=4,
        config=tiny(num_layers=4, tied_embeddings=True),
        compute=way(recomputation="selective"),
    ),
    "one layer a chunk, dp2 pp2": Case(
        dp=2, pp=2, chunks=2, micro_batches=2, config=tiny(num_layers=4), compute=way(recomputation="full")
    ),
    "dp2 tp2": Case(dp=2, tp=2, compute=way()),
    "dp2 pp2": Case(dp=2, pp=2, micro_batches=4, compute=way()),
    "dp2 pp2, full": Case(dp=2, pp=2, micro_batches=4, compute=way(recomputation="full")),
    "tied, dp4, selective": Case(dp=4, config=TIED, compute=way(recomputation="selective")),
    "float32, dp2 tp2": Case(dp=2, tp=2, compute=way()),
    "float32, tied, dp2 pp2": Case(dp=2, pp=2, config=TIED, compute=way(recomputation="full")),
    "one layer a stage, dp2 pp2": Case(dp=2, pp=2, config=tiny(num_layers=2), micro_batches=4, compute=way()),
    "tied, dp2 tp2, sequence full": Case(
        dp=2, tp=2, config=TIED, compute=way(sequence_parallel=True, recomputation="full")
    ),
    "dp2 tp2, sequence": Case(dp=2, tp=2, compute=way(sequence_parallel=True)),
    "scalar, dp2 pp2": Case(dp=2, pp=2, config=tiny(head="scalar"), micro_batches=4, compute=way()),
    "scalar, dp4, full": Case(dp=4, config=tiny(head="scalar"), compute=way(recomputation="full")),
    **{
        f"{family}, {name}": Case(**shape, config=config, compute=compute)
        for family, config in FAMILIES.items()
        for name, shape, compute in (
            ("dp2 tp2", {"dp": 2, "tp": 2}, way()),
            ("dp4", {"dp": 4}, way()),
            ("dp2 pp2, selective", {"dp": 2, "pp": 2, "micro_batches": 4}, way(recomputation="selective")),
        )
    },
}
MEASURED = "dp2"
# Relative errors: of outputs, losses and norms; of gradients and the update, each against its norm. Adam divides small
# numbers by small numbers: in float32 an update can only be held to some per cent.
FLOAT64, FLOAT32 = (1e-9, 1e-7, 1e-7), (1e-4, 1e-4, 0.02)
GENERATION = GenerationOptions(max_new_tokens=4, eos_token=1)


@dataclass
class Step:
    """What one rank saw of a forward pass and a step; pieces of parameters with the place of each in the whole."""

    outputs: list[np.ndarray]
    loss: float | None
    grad_norm: float | None
    gradients: list[tuple[Box, np.ndarray]]
    parameters: list[tuple[Box, np.ndarray]]
    sequences: list[list[int]] = field(default_factory=list)


@dataclass
class Outcome:
    sharded: Step
    zero1: Step
    kept_bytes: tuple[int, int]  # by all tensors of the model after its step, fsdp and ZeRO-1; where MEASURED
    gathered: list[int]  # elements of the units that had memory, whenever one more began to be gathered
    gathered_afterwards: int


def run_all(rank: int, cases: dict[str, Case]) -> dict[str, Outcome]:
    gc.freeze()  # what a rank begins with is not looked through again
    table = GroupTable([case.layout for case in cases.values()], rank)
    return {
        name: run_both(
            case,
            table.groups(case.layout),
            is_measured=name == MEASURED,
            dtype=torch.float32 if name.startswith("float32") else torch.float64,
        )
        for name, case in cases.items()
        if rank in case.layout.mesh.devices
    }


def run_both(case: Case, groups: ParallelGroups, *, is_measured: bool, dtype: torch.dtype = torch.float64) -> Outcome:
    live_bytes = bytes_of_all_tensors if is_measured else lambda: 0
    gathered: list[int] = []
    start = GatheredUnit.start_gather
    before = live_bytes()
    model = built(case.config, groups, case.compute, dtype)
    parameters = model.parameters
    assert isinstance(parameters, NativeParameters)

    def gather(unit: Any, *args: Any) -> None:
        start(unit, *args)
        gathered.append(memory_of_units(parameters))

    with mock.patch.object(GatheredUnit, "start_gather", gather):
        sharded = one_step(model, case)
    afterwards, kept = memory_of_units(parameters), live_bytes() - before
    sharded.sequences = generated(model, case)
    assert memory_of_units(parameters) == 0
    before = live_bytes()
    twin = built(case.config, groups, replace(case.compute, data_parallel="zero1"), dtype)
    zero1 = one_step(twin, case)
    kept_by_zero1 = live_bytes() - before
    zero1.sequences = generated(twin, case)
    return Outcome(sharded, zero1, (kept, kept_by_zero1), gathered, afterwards)


def memory_of_units(parameters: NativeParameters) -> int:
    """Elements."""
    flats = [unit.arena.flat for unit in parameters.gathered.values()]
    return sum(flat.untyped_storage().nbytes() // flat.itemsize for flat in flats)


def bytes_of_all_tensors() -> int:
    gc.collect()
    tensors = [
        x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided
    ]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def one_step(model: ShardedModel, case: Case) -> Step:
    groups, parameters = model.groups, model.parameters
    batch = case.batch.split(case.dp)[groups.dp_index]
    outputs = model.forward(batch, "tokens", split_like, case.micro_batches).get("output", [])
    loss = value_loss if case.config.head == "scalar" else next_token_loss
    seen: list[torch.Tensor] = []
    reduce_gradients = parameters.reduce_gradients

    def keep(**options: bool) -> None:
        reduce_gradients(**options)
        seen.append(parameters.gradient.clone())  # before clipping

    with mock.patch.object(parameters, "reduce_gradients", keep):
        stats = model.train_step(batch, "tokens", loss, trained_tokens, case.micro_batches)
    boxes = [
        (box, place_of(at, parameters.updated))
        for box, at in shard_boxes(case.config, groups.layout, groups.rank, parameters.data_parallel)
    ]

    def parts(vector: torch.Tensor) -> list[tuple[Box, np.ndarray]]:
        return [(box, vector[at : at + box.size].view(box.shape).numpy().copy()) for box, at in boxes]

    return Step(
        [output.numpy() for output in outputs],
        stats["loss"][0] if stats else None,
        stats["grad_norm"][0] if stats else None,
        parts(seen[0]),
        parts(parameters.flat),
    )


def generated(model: ShardedModel, case: Case) -> list[list[int]]:
    if case.config.head == "scalar" or case.chunks > 1:
        return []
    prompts = case.batch.split(model.groups.layout.strategy.dp)[model.groups.dp_index]
    output = model.generate(prompts, GenerationRequest(GENERATION, prompt_key="tokens", sample_key=(1, 0)))
    return [sequence.tolist() for sequence in output.sequences]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Outcome]]:
    return run_distributed(run_all, WORLD_SIZE, DEFAULT)


@pytest.fixture(scope="module")
def slow_ranks() -> list[dict[str, Outcome]]:
    return run_distributed(run_all, WORLD_SIZE, SLOW)


@pytest.mark.parametrize("name", DEFAULT)
def test_one_step_is_that_of_transformers(name: str, ranks: list[dict[str, Outcome]]) -> None:
    check(DEFAULT[name], [ranks[rank][name] for rank in DEFAULT[name].layout.mesh.devices])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_one_step_of_every_kind(name: str, slow_ranks: list[dict[str, Outcome]]) -> None:
    tolerances = FLOAT32 if name.startswith("float32") else FLOAT64
    check(SLOW[name], [slow_ranks[rank][name] for rank in SLOW[name].layout.mesh.devices], tolerances)


def check(case: Case, outcomes: list[Outcome], tolerances: tuple[float, float, float] = FLOAT64) -> None:
    """`outcomes` of the layout's ranks."""
    of_values, of_gradients, of_update = tolerances
    expected = (alone if case.config in FAMILIES.values() else oracle)(case.config, case.lengths)
    last = [outcomes[case.layout.output_device(dp)].sharded for dp in range(case.dp)]
    assert relative(np.concatenate([x for step in last for x in step.outputs]), expected.outputs) < of_values
    assert sum(step.loss for step in last) == pytest.approx(expected.loss, rel=of_values)
    norm = np.sqrt(sum((g**2).sum() for g in expected.gradients.values()))
    assert all(step.grad_norm == pytest.approx(norm, rel=of_values) for step in last)

    gradients = whole(expected.gradients, [p for o in outcomes for p in o.sharded.gradients])
    after = whole(expected.after, [p for o in outcomes for p in o.sharded.parameters])
    of_zero1 = whole(expected.after, [p for o in outcomes for p in o.zero1.parameters])
    update = distance(expected.after, expected.before)
    assert distance(gradients, expected.gradients) < of_gradients * norm
    assert distance(after, expected.after) < of_update * update
    # Sums over micro-batches and ranks are made in another order, which is all that differs.
    assert distance(after, of_zero1) < 1e-3 * of_update * update
    assert [o.sharded.sequences for o in outcomes] == [o.zero1.sequences for o in outcomes]


@pytest.mark.parametrize("name", DEFAULT)
def test_a_rank_gathers_two_units_at_most(name: str, ranks: list[dict[str, Outcome]]) -> None:
    case = DEFAULT[name]
    for rank in case.layout.mesh.devices:
        outcome = ranks[rank][name]
        sizes = sorted(unit.flat.size for unit in units(case.config, case.layout, rank, "fsdp"))
        assert 0 < max(outcome.gathered) <= sum(sizes[-2:])
        assert outcome.gathered_afterwards == 0


def test_all_that_is_kept_between_steps_is_divided(ranks: list[dict[str, Outcome]]) -> None:
    case = DEFAULT[MEASURED]
    for rank in case.layout.mesh.devices:
        kept, by_zero1 = ranks[rank][MEASURED].kept_bytes
        held = sum(box.size for box in device_boxes(case.config, case.layout, rank))
        # Parameters, gradients and the two states of AdamW, 8 bytes each; shards are padded.
        assert 8 * 4 * held / case.dp <= kept <= 1.05 * 8 * 4 * held / case.dp
        assert by_zero1 >= 8 * (2 * held + 2 * held / case.dp)


def whole(like: dict[str, np.ndarray], pieces: list[tuple[Box, np.ndarray]]) -> dict[str, np.ndarray]:
    """Global arrays from pieces that cover them; where pieces overlap, they must agree to the last bit."""
    arrays = {name: np.full(array.shape, np.nan) for name, array in like.items()}
    for box, local in pieces:
        target = arrays[box.name][tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        assert (np.isnan(target) | (target == local)).all(), f"two ranks have different values of {box}"
        target[...] = local
    return arrays


def distance(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert ours.keys() == expected.keys()
    return float(np.sqrt(sum(((ours[name] - expected[name]) ** 2).sum() for name in expected)))
