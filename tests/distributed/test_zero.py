"""ZeRO-1 and fully sharded data parallelism against transformers and torch's AdamW, and their state saved in one layout
and continued in another.

All of it runs in one world of four processes, in which pickle raises while a model trains, saves or loads.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import Computation, DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.model import ShardedModel
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.checkpoint import CheckpointReader, snapshot, write_snapshot
from realhf.models.checkpoint_index import STEPS_KEY, finish, state_owners
from realhf.parallel import collectives
from realhf.parallel.collectives import all_gather, reduce_scatter
from realhf.parallel.groups import GroupTable, ParallelGroups
from tests.distributed.pool import run_distributed
from tests.unit.checkpoints import name_of
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, targets, tiny, trained_tokens

pytestmark = pytest.mark.distributed

WORLD_SIZE, SAMPLES, STEPS, SAVED_AT = 4, 12, 4, 2
OPTIMIZER = OptimizerConfig(
    lr=1e-2, weight_decay=0.1, warmup_steps=1, schedule="cosine", final_lr_ratio=0.2, max_grad_norm=0.4
)
PLAIN, TIED = tiny(vocab_size=30), tiny(num_layers=3, tied_embeddings=True)
FIVE_LAYERS = tiny(num_layers=5)
Arrays = dict[str, np.ndarray]


def layout(dp: int = 1, tp: int = 1, pp: int = 1, first: int = 0, chunks: int = 1) -> Layout:
    return Layout(DeviceMesh(first, dp * tp * pp), ParallelStrategy(dp, tp, pp, chunks))


@dataclass(frozen=True)
class Case:
    """Trained in `saved` throughout; what that saves after SAVED_AT steps continues in `loaded`."""

    saved: Layout
    loaded: Layout
    config: DecoderConfig = PLAIN
    dtype: str = "float64"
    how: tuple[DataParallel, DataParallel] = ("zero1", "zero1")


CASES = {
    "dp3, then dp2 pp2": Case(layout(dp=3), layout(dp=2, pp=2)),
    "dp4, then one rank": Case(layout(dp=4), layout(first=3), TIED),
    "dp2 tp2, then pp3": Case(layout(dp=2, tp=2), layout(pp=3, first=1)),
    "tied, dp2 pp2, then dp2 tp2": Case(layout(dp=2, pp=2), layout(dp=2, tp=2), TIED),
    "tied, pp3, then dp4": Case(layout(pp=3), layout(dp=4), TIED),
    "dp2 pp2 in 2 chunks, then pp3": Case(layout(dp=2, pp=2, chunks=2), layout(pp=3), FIVE_LAYERS),
    "bfloat16, dp2 tp2, then dp3": Case(layout(dp=2, tp=2), layout(dp=3), PLAIN, "bfloat16"),
    "fsdp, dp2 tp2, then dp3": Case(layout(dp=2, tp=2), layout(dp=3), how=("fsdp", "zero1")),
    "tied, dp4, then fsdp, dp2 pp2": Case(layout(dp=4), layout(dp=2, pp=2), TIED, how=("zero1", "fsdp")),
    "bfloat16, fsdp, dp2, then tp2": Case(layout(dp=2), layout(tp=2, first=1), TIED, "bfloat16", ("fsdp", "zero1")),
}


@dataclass
class Trained:
    """What a rank saw: its (summed loss, weight) a step, parameters and state, as (box, values)."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    state_at_save: list[tuple[Box, np.ndarray]] = field(default_factory=list)
    parameters: list[tuple[Box, np.ndarray]] = field(default_factory=list)


@dataclass
class Outcome:
    scattered: list[tuple[np.ndarray, np.ndarray]]
    straight: dict[str, Trained]
    continued: dict[str, Trained]


# ---------------------------------------------------------------------------------- on the ranks


def run_all(rank: int, folder: str) -> Outcome:
    layouts = [where for case in CASES.values() for where in (case.saved, case.loaded)]
    table = GroupTable([*layouts, layout(dp=3)], rank)
    outcome = Outcome(scatter_and_gather(table), {}, {})
    for name, case in CASES.items():
        directory = Path(folder) / name
        with no_pickle():
            if rank in case.saved.mesh.devices:
                outcome.straight[name] = train_and_save(case, table, directory)
            dist.barrier()  # the readers wait for the checkpoint
            if rank in case.loaded.mesh.devices:
                outcome.continued[name] = load_and_train(case, table, directory)
            dist.barrier()
    return outcome


@contextmanager
def no_pickle() -> Iterator[None]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("something was unpickled")

    with (
        mock.patch.object(pickle, "load", refuse),
        mock.patch.object(pickle, "loads", refuse),
        mock.patch.object(pickle, "Unpickler", refuse),
        mock.patch.object(torch, "load", refuse),
    ):
        yield


def train_and_save(case: Case, table: GroupTable, directory: Path) -> Trained:
    model, seen = build(case, case.saved, case.how[0], table), Trained()
    model.initialise(seed=5)
    for step in range(STEPS):
        if step == SAVED_AT:
            seen.state_at_save = copies([*model.residency.held(), *model.trainer.state()])
            save_state(directory, model)
        train(model, case.saved, step, seen)
    seen.parameters = copies(model.residency.held())
    return seen


def save_state(directory: Path, model: ShardedModel) -> None:
    """Every rank writes what it alone updates; when it returns on one, the checkpoint is complete."""
    write_snapshot(directory, model.groups.rank, snapshot(model.state()), hashed=True)
    groups, dtype = model.groups, name_of(model.parameters.flat.dtype)
    meet(groups)
    if groups.rank == groups.layout.mesh.first:
        owners = state_owners(model.config, groups.layout, dtype, model.parameters.data_parallel)
        finish(directory, model.config, dtype, owners, {STEPS_KEY: model.trainer.optimizer.step_count})
    meet(groups)


def meet(groups: ParallelGroups) -> None:
    """Returns when all ranks of the layout are here; a layout of one rank has no group."""
    if groups.model is not None:
        dist.barrier(groups.model)


def load_and_train(case: Case, table: GroupTable, directory: Path) -> Trained:
    model, seen = build(case, case.loaded, case.how[1], table), Trained()
    reader = CheckpointReader(directory)
    reader.check_content()
    model.load_state(reader)
    assert model.trainer.optimizer.step_count == SAVED_AT
    seen.state_at_save = copies([*model.residency.held(), *model.trainer.state()])
    for step in range(SAVED_AT, STEPS):
        train(model, case.loaded, step, seen)
    seen.parameters = copies(model.residency.held())
    return seen


def build(case: Case, where: Layout, how: DataParallel, table: GroupTable) -> ShardedModel:
    return ShardedModel(
        ModelSpec(
            case.config,
            table.groups(where),
            getattr(torch, case.dtype),
            optimizer=OPTIMIZER,
            total_optimizer_steps=STEPS,
            compute=Computation(data_parallel=how),
        )
    )


def train(model: ShardedModel, where: Layout, step: int, seen: Trained) -> None:
    batch = batch_of(model.config, step).split(where.strategy.dp)[model.groups.dp_index]
    stats = model.train_step(batch, "tokens", next_token_loss, trained_tokens, micro_batches=3)
    if model.groups.holds_outputs:
        seen.losses.append(stats["loss"])


def batch_of(config: DecoderConfig, step: int) -> Batch:
    return random_batch(config, SAMPLES, seed=step)


def copies(boxed: Any) -> list[tuple[Box, np.ndarray]]:
    return [(box, local.double().numpy().copy()) for box, local in boxed]


def scatter_and_gather(table: GroupTable) -> list[tuple[np.ndarray, np.ndarray]]:
    """(this rank's shard of the sum, the gathered whole) for each of DTYPES by each backend, on ranks 0 to 2."""
    gloo = dist.new_group([0, 1, 2], backend="gloo")
    if table.rank == 3:
        return []
    results = []
    with mock.patch.object(collectives, "BUCKET_BYTES", 2 * 4 * 33):  # 33 float32 elements: 100 = 3 x 33 + 1
        for group, dtype in product((gloo, table.groups(layout(dp=3)).data), DTYPES):
            flat = values(table.rank, dtype)
            own = reduce_scatter(flat, group)
            assert own.data_ptr() == flat[table.rank * 100 :].data_ptr()
            scattered = own.double().numpy().copy()
            all_gather(flat, group)
            results.append((scattered, flat.double().numpy()))
    return results


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3 * 100, generator=generator, dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------------------------- here


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return run_distributed(run_all, WORLD_SIZE, str(tmp_path_factory.mktemp("states")))


@cache
def oracle(config: DecoderConfig) -> tuple[Arrays, Arrays, list[float]]:
    """Initial parameters, those after STEPS steps, mean losses: transformers and torch.optim.AdamW in float64."""
    from tests.unit.models.llama import llama, llama_logits  # here, so that the ranks need not import transformers

    model = ShardedModel(ModelSpec(config, ONE_RANK, torch.float64))
    model.initialise(seed=5)
    hf = llama(config, model)
    before = {name: p.detach().numpy().copy() for name, p in hf.named_parameters()}
    adamw = torch.optim.AdamW(hf.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    # Warm-up of one step, then half a cosine from 1 to 0.2 of the rate over the remaining three steps.
    rates = [0.01, 0.01, 0.01 * (0.2 + 0.8 * 0.75), 0.01 * (0.2 + 0.8 * 0.25)]
    losses = []
    for step in range(STEPS):
        batch = batch_of(config, step)
        tokens, in_loss = targets(batch)
        adamw.zero_grad()
        loss = F.cross_entropy(llama_logits(hf, batch.data["tokens"])[in_loss], tokens[in_loss])
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(hf.parameters(), 0.4) > 0.4  # clipping is part of the comparison
        adamw.param_groups[0]["lr"] = rates[step]
        adamw.step()
        losses.append(loss.item())
    return before, {name: p.detach().numpy().copy() for name, p in hf.named_parameters()}, losses


float64_cases = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == "float64"])


@float64_cases
def test_parameters_and_losses_are_those_of_transformers(name: str, outcomes: list[Outcome]) -> None:
    case = CASES[name]
    before, after, losses = oracle(case.config)
    update = np.sqrt(sum(((after[n] - before[n]) ** 2).sum() for n in before))
    for where, trained in ((case.saved, "straight"), (case.loaded, "continued")):
        for rank in where.mesh.devices:
            square = sum(
                ((local - after[box.name][slices(box)]) ** 2).sum()
                for box, local in getattr(outcomes[rank], trained)[name].parameters
            )
            assert np.sqrt(square) < 1e-7 * update
    straight, continued = mean_losses(name, outcomes, "straight"), mean_losses(name, outcomes, "continued")
    assert straight == pytest.approx(losses, rel=1e-9)
    assert continued == pytest.approx(losses[SAVED_AT:], rel=1e-9)
    assert continued == pytest.approx(straight[SAVED_AT:], rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_what_is_loaded_is_what_was_saved(name: str, outcomes: list[Outcome]) -> None:
    case = CASES[name]
    kinds = {"", "exp_avg", "exp_avg_sq", *(["master"] if case.dtype == "bfloat16" else [])}
    saved = whole([piece for o in outcomes if name in o.straight for piece in o.straight[name].state_at_save])
    loaded = whole([piece for o in outcomes if name in o.continued for piece in o.continued[name].state_at_save])
    assert {key.partition("@")[2] for key in saved} == kinds
    assert saved.keys() == loaded.keys()
    for key, array in saved.items():
        assert not np.isnan(array).any(), f"{key} is not covered"
        np.testing.assert_array_equal(loaded[key], array, err_msg=key)
    moments = np.concatenate([array.ravel() for key, array in saved.items() if key.endswith("@exp_avg")])
    assert (moments != 0).mean() > 0.9


def test_a_rank_keeps_a_part_of_the_states(outcomes: list[Outcome]) -> None:
    def elements(rank: int, suffix: str) -> int:
        pieces = outcomes[rank].straight["dp4, then one rank"].state_at_save
        return sum(box.size for box, _ in pieces if box.name.endswith(suffix))

    parameters = elements(0, ".weight")
    held = [elements(rank, "@exp_avg") for rank in range(4)]
    assert sum(held) == parameters
    assert max(held) < 1.02 * parameters / 4


def test_a_shard_gets_its_sum_and_then_everyone_gets_all(outcomes: list[Outcome]) -> None:
    for i, dtype in enumerate([*DTYPES, *DTYPES]):
        terms = [values(rank, dtype).to(torch.promote_types(dtype, torch.float32)) for rank in range(3)]
        expected = (terms[0] + terms[1] + terms[2]).to(dtype).double().numpy()  # this order, to the last bit
        for rank in range(3):
            assert len(outcomes[rank].scattered) == 2 * len(DTYPES)
            scattered, gathered = outcomes[rank].scattered[i]
            np.testing.assert_array_equal(scattered, expected[rank * 100 : (rank + 1) * 100])
            np.testing.assert_array_equal(gathered, expected)


def mean_losses(name: str, outcomes: list[Outcome], trained: str) -> list[float]:
    ranks = [seen[name] for o in outcomes if name in (seen := getattr(o, trained)) and seen[name].losses]
    steps = zip(*(rank.losses for rank in ranks), strict=True)
    return [sum(loss for loss, _ in parts) / sum(weight for _, weight in parts) for parts in steps]


def whole(pieces: list[tuple[Box, np.ndarray]]) -> Arrays:
    """Global arrays from boxes that cover them; where boxes overlap, they must agree."""
    arrays: Arrays = {}
    for box, _ in pieces:
        end = [offset + extent for offset, extent in zip(box.offset, box.shape, strict=True)]
        shape = np.maximum(end, arrays[box.name]) if box.name in arrays else end
        arrays[box.name] = np.array(shape)
    arrays = {name: np.full(shape, np.nan) for name, shape in arrays.items()}
    for box, local in pieces:
        target = arrays[box.name][slices(box)]
        assert (np.isnan(target) | (target == local)).all(), f"two ranks have different values of {box}"
        arrays[box.name][slices(box)] = local
    return arrays


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
