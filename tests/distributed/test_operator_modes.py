"""Operators replicated, divided and sharded in slices, in all mixes: five AdamW steps against one process, the same
generation, and what is gathered at a time (OSDP, IJCAI 2023)."""

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.architecture.compute import MODES, Computation, ModeRules, modes_text
from realhf.architecture.model import DecoderConfig
from realhf.engine.train.data_parallel import NativeParameters
from realhf.engine.train.gathering import GatheredUnit
from realhf.geometry.boxes import Box
from realhf.geometry.operators import can_be_cut, operators
from realhf.geometry.shards import units
from realhf.parallel.groups import GroupTable, ParallelGroups
from tests.distributed.pool import run_distributed
from tests.distributed.test_fsdp import bytes_of_all_tensors, generated
from tests.distributed.test_training_compute import FAMILIES, Case, built
from tests.unit.engine.losses import ONE_RANK, next_token_loss, tiny, trained_tokens, value_loss

pytestmark = pytest.mark.distributed

WORLD_SIZE, STEPS = 4, 5
TIED = tiny(tied_embeddings=True, num_layers=2)
TWO = tiny(num_layers=2)
SHARDED = ("*", "sharded")


def way(*rules: tuple[str, str], **changes: Any) -> Computation:
    return Computation(data_parallel=rules, **changes)


def mixed(config: DecoderConfig, seed: int, slices: Sequence[int] = (1, 2, 4, 8)) -> ModeRules:
    """A random mode for every operator and slice."""
    draw = random.Random(seed)
    rules = []
    for name in operators(config):
        modes = ("replicated", "zero1") if name == "norms" else MODES
        count = draw.choice(slices) if can_be_cut(name, config) else 1
        rules.append((name, modes_text([draw.choice(modes) for _ in range(count)])))
    return tuple(rules)


DEFAULT = {
    "all replicated": Case(dp=2, config=TWO, compute=way(("*", "replicated"))),
    "all sharded": Case(dp=2, config=TWO, compute=way(SHARDED)),
    "all in 4 slices, one at a time, dp4": Case(
        dp=4, config=TWO, compute=way(SHARDED, ("layers.*.*", "4 sharded"), ("embedding", "4 sharded"), prefetch=False)
    ),
    "mixed, slices of uneven size, full": Case(
        dp=2,
        config=TWO,
        compute=way(*mixed(TWO, 1), ("head", "2 sharded + 3 replicated"), recomputation="full"),
    ),
    "mixed, dp2 tp2, sequence selective": Case(
        dp=2, tp=2, config=TWO, compute=way(*mixed(TWO, 2), recomputation="selective", sequence_parallel=True)
    ),
    "mixed, tied, dp2 pp2": Case(dp=2, pp=2, config=TIED, micro_batches=4, compute=way(*mixed(TIED, 3))),
}
SLOW = {
    **{
        f"{count} slices{', full' if recomputation == 'full' else ''}, dp{dp}": Case(
            dp=dp, config=TWO, compute=way(SHARDED, ("layers.*.*", f"{count} sharded"), recomputation=recomputation)
        )
        for count in (2, 8)
        for recomputation in ("off", "full")
        for dp in (2, 4)
    },
    "all sharded, tied, dp2 pp2, 2 chunks": Case(
        dp=2,
        pp=2,
        chunks=2,
        micro_batches=4,
        config=tiny(num_layers=4, tied_embeddings=True),
        compute=way(SHARDED, recomputation="selective"),
    ),
    "mixed, critic, dp2 tp2": Case(
        dp=2, tp=2, config=tiny(head="scalar", num_layers=2), compute=way(*mixed(tiny(head="scalar", num_layers=2), 4))
    ),
    **{
        f"mixed, {family}, {name}": Case(
            **shape, config=replace(config, num_layers=2), compute=way(*mixed(replace(config, num_layers=2), 5))
        )
        for family, config in FAMILIES.items()
        for name, shape in (("dp4", {"dp": 4}), ("dp2 tp2", {"dp": 2, "tp": 2}))
    },
}


@dataclass
class Outcome:
    """What one rank saw in five steps, its part of the parameters after them, and the gathered elements at each start
    of a gather."""

    losses: list[float]
    norms: list[float]
    parameters: list[tuple[Box, np.ndarray]]
    sequences: list[list[int]]
    gathered: list[int]
    kept_bytes: int  # by all tensors of the model after the steps


def run_all(rank: int, cases: dict[str, Case]) -> dict[str, Outcome]:
    gc.freeze()  # what a rank begins with is not looked through again and again
    table = GroupTable([case.layout for case in cases.values()], rank)
    return {
        name: trained(case, table.groups(case.layout))
        for name, case in cases.items()
        if rank in case.layout.mesh.devices
    }


def trained(case: Case, groups: ParallelGroups, *, is_measured: bool = True) -> Outcome:
    live_bytes = bytes_of_all_tensors if is_measured else lambda: 0
    before = live_bytes()
    model = built(case.config, groups, case.compute)
    parameters, gathered = model.parameters, []
    assert isinstance(parameters, NativeParameters)
    start = GatheredUnit.start_gather

    def gather(unit: GatheredUnit, *args: Any) -> None:
        start(unit, *args)
        gathered.append(memory_of_units(parameters))

    batch = case.batch.split(groups.layout.strategy.dp)[groups.dp_index]
    loss = value_loss if case.config.head == "scalar" else next_token_loss
    losses, norms = [], []
    with mock.patch.object(GatheredUnit, "start_gather", gather):
        for _ in range(STEPS):
            stats = model.train_step(batch, "tokens", loss, trained_tokens, case.micro_batches)
            losses.append(stats["loss"][0] if stats else 0.0)
            norms.append(stats["grad_norm"][0] if stats else 0.0)
    assert memory_of_units(parameters) == 0
    kept_bytes = live_bytes() - before
    held = [(box, local.numpy().copy()) for box, local in model.residency.held()]
    return Outcome(losses, norms, held, generated(model, case), gathered, kept_bytes)


def memory_of_units(parameters: NativeParameters) -> int:
    """Elements."""
    flats = [unit.arena.flat for unit in parameters.gathered.values()]
    return sum(flat.untyped_storage().nbytes() // flat.itemsize for flat in flats)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Outcome]]:
    return run_distributed(run_all, WORLD_SIZE, DEFAULT)


@pytest.fixture(scope="module")
def slow_ranks() -> list[dict[str, Outcome]]:
    return run_distributed(run_all, WORLD_SIZE, SLOW)


@pytest.mark.parametrize("name", DEFAULT)
def test_five_steps_are_those_of_one_process(name: str, ranks: list[dict[str, Outcome]]) -> None:
    check(DEFAULT[name], [ranks[rank][name] for rank in DEFAULT[name].layout.mesh.devices])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_five_steps_of_every_kind(name: str, slow_ranks: list[dict[str, Outcome]]) -> None:
    check(SLOW[name], [slow_ranks[rank][name] for rank in SLOW[name].layout.mesh.devices])


LAYOUTS = ({"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2})


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=6, max_size=6))
def test_five_steps_of_random_mixes(seeds: list[int]) -> None:
    cases = {}
    for seed in seeds:
        config, layout = random.Random(seed).choice([TWO, TIED]), LAYOUTS[seed % len(LAYOUTS)]
        recomputation = ("off", "selective", "full")[seed % 3]
        compute = way(*mixed(config, seed), recomputation=recomputation, prefetch=seed % 2 == 0)
        cases[f"{seed}"] = Case(**layout, config=config, compute=compute)
    outcomes = run_distributed(run_all, WORLD_SIZE, cases)
    for name, case in cases.items():
        check(case, [outcomes[rank][name] for rank in case.layout.mesh.devices])


def check(case: Case, outcomes: list[Outcome]) -> None:
    """`outcomes` of the layout's ranks, against one process."""
    alone = trained(replace(case, compute=Computation()), ONE_RANK, is_measured=False)
    last = [outcomes[case.layout.output_device(dp)] for dp in range(case.dp)]
    np.testing.assert_allclose(np.sum([step.losses for step in last], axis=0), alone.losses, rtol=1e-9)
    for step in last:
        np.testing.assert_allclose(step.norms, alone.norms, rtol=1e-7)
    expected = {box.name: array for box, array in alone.parameters}
    found = {name: np.full(array.shape, np.nan) for name, array in expected.items()}
    for outcome in outcomes:
        for box, local in outcome.parameters:
            target = found[box.name][tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
            assert (np.isnan(target) | (target == local)).all(), f"two ranks have different values of {box}"
            target[...] = local
    norm = np.sqrt(sum((array**2).sum() for array in expected.values()))
    assert np.sqrt(sum(((found[name] - expected[name]) ** 2).sum() for name in expected)) < 1e-7 * norm
    sequences = [outcomes[case.layout.output_device(dp)].sequences for dp in range(case.dp)]
    assert [sequence for part in sequences for sequence in part] == alone.sequences[: 10**6 if sequences[0] else 0]


@pytest.mark.parametrize("name", DEFAULT)
def test_what_is_gathered_at_a_time(name: str, ranks: list[dict[str, Outcome]]) -> None:
    """One slice, two where the next is gathered meanwhile, and never more."""
    case = DEFAULT[name]
    for rank in case.layout.mesh.devices:
        here = units(case.config, case.layout, rank, case.compute.data_parallel)
        sizes = sorted(unit.flat.size for unit in here if unit.mode == "sharded")
        gathered = ranks[rank][name].gathered
        at_most = 2 if case.compute.prefetch or case.config.tied_embeddings else 1
        assert max(gathered, default=0) <= sum(sizes[-at_most:])
        assert bool(gathered) == bool(sizes)


@pytest.mark.parametrize("name", DEFAULT)
def test_what_is_kept_between_steps(name: str, ranks: list[dict[str, Outcome]]) -> None:
    """Parameters and gradients of what a rank keeps, two states of what it updates; 8 bytes each."""
    case = DEFAULT[name]
    for rank in case.layout.mesh.devices:
        index = case.layout.coordinates(rank)[0]
        here = units(case.config, case.layout, rank, case.compute.data_parallel)
        numbers = sum(2 * len(unit.kept(index)) + 2 * len(unit.updated(index)) for unit in here)
        assert 8 * numbers <= ranks[rank][name].kept_bytes <= 1.05 * 8 * numbers


def test_modes_change_no_bit_with_one_micro_batch() -> None:
    """Sums over ranks are made in one order, whichever ranks keep them."""
    ways = {mode: Case(dp=2, config=TWO, micro_batches=1, compute=way(("*", mode))) for mode in ("replicated", "zero1")}
    outcomes = run_distributed(run_all, 2, ways)
    for rank in range(2):
        first, second = (outcomes[rank][mode].parameters for mode in ways)
        by_name = {box.name: local for box, local in second}
        assert all((local == by_name[box.name]).all() for box, local in first)


def test_without_data_parallelism_nothing_is_divided() -> None:
    model = built(TWO, ONE_RANK, way(SHARDED, ("layers.*.*", "4 sharded")), torch.float32)
    assert {box.name: tuple(local.shape) for box, local in model.residency.held()} == {
        spec.name: spec.shape for specs in operators(TWO).values() for spec in specs
    }
