"""A home whose parameters are in a copy while a call computes there: their memory, and that nothing else changes."""

from collections.abc import Callable

import pytest
import torch

from realhf.api.experiment import OptimizerConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.engine.residency.residency import Where
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import ParallelGroups
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, split_like, tiny, trained_tokens

TINY = tiny(num_layers=2, intermediate_size=20)  # so that parameters have padding behind them
BATCH = random_batch(TINY, 4)


def trained(dtype: torch.dtype) -> ShardedModel:
    model = ShardedModel(ModelSpec(TINY, ONE_RANK, dtype, optimizer=OptimizerConfig(lr=1e-2), total_optimizer_steps=10))
    model.initialise(seed=1)
    step(model)
    return model


def step(model: ShardedModel) -> None:
    model.train_step(BATCH, "tokens", next_token_loss, trained_tokens, micro_batches=1)


def copy_of(home: ShardedModel) -> ShardedModel:
    copy = ShardedModel(ModelSpec(TINY, ONE_RANK, home.parameters.flat.dtype))
    for (box, source), (other, target) in zip(home.residency.held(), copy.residency.held(), strict=True):
        assert box == other
        target.copy_(source)
    return copy


def parameter_bytes(*models: ShardedModel) -> int:
    return sum(model.parameters.flat.untyped_storage().nbytes() for model in models)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_come_back_bit_by_bit_and_training_goes_on_as_without(dtype: torch.dtype) -> None:
    home, other = trained(dtype), trained(dtype)
    before, once = home.parameters.flat.clone(), parameter_bytes(home)
    copy = copy_of(home)
    for _ in range(2):
        home.residency.lend_to(copy.residency)
        assert parameter_bytes(home, copy) == once
        home.residency.take_back_from(copy.residency)
        assert torch.equal(home.parameters.flat, before)  # the padding too
        copy.residency.free()
        assert parameter_bytes(home, copy) == once
        home.residency.offload()
        home.residency.load()
        copy.residency.allocate()
        for (_, source), (_, target) in zip(home.residency.held(), copy.residency.held(), strict=True):
            target.copy_(source)
    step(home)
    step(other)
    assert torch.equal(home.parameters.flat, other.parameters.flat)
    assert not torch.equal(home.parameters.flat, before)


def test_in_place_the_copy_gets_the_parameters_and_gives_its_memory_back() -> None:
    home, other = trained(torch.float32), trained(torch.float32)
    before, once = home.parameters.flat.clone(), parameter_bytes(home)
    copy = ShardedModel(ModelSpec(TINY, ONE_RANK, torch.float32))
    copy.residency.free()
    for _ in range(2):
        home.residency.lend_to(copy.residency, in_place=True)
        assert (home.residency.where, copy.residency.where) == (Where.LENT, Where.HERE)
        assert parameter_bytes(home, copy) == once
        parts = zip(home.residency.readable(), copy.residency.held(), other.residency.held(), strict=True)
        assert all(torch.equal(a, c) and torch.equal(b, c) for (_, a), (_, b), (_, c) in parts)
        home.residency.take_back_from(copy.residency)
        assert (home.residency.where, copy.residency.where) == (Where.HERE, Where.FREED)
        assert parameter_bytes(home, copy) == once
        assert torch.equal(home.parameters.flat, before)  # the padding too
    step(home)
    step(other)
    assert torch.equal(home.parameters.flat, other.parameters.flat)


USES: dict[str, Callable[[ShardedModel], object]] = {
    "training": step,
    "inference": lambda model: model.forward(BATCH, "tokens", split_like, 1),
    "reallocation": lambda model: model.residency.held(),
    "lending": lambda model: model.residency.lend_to(model.residency),
}


@pytest.mark.parametrize("use", USES)
def test_a_home_that_is_lent_is_not_used(use: str) -> None:
    home = trained(torch.float32)
    copy = copy_of(home)
    home.residency.lend_to(copy.residency)
    with pytest.raises(AssertionError, match="the parameters are in a copy"):
        USES[use](home)


def test_who_reads_a_lent_home_finds_its_parameters_in_the_copy() -> None:
    home = trained(torch.float32)
    before = {box: tensor.clone() for box, tensor in home.residency.readable()}
    copy = copy_of(home)
    home.residency.lend_to(copy.residency)
    lent = home.residency.readable()
    assert [box for box, _ in lent] == list(before)
    assert all(torch.equal(tensor, before[box]) for box, tensor in lent)
    home.residency.take_back_from(copy.residency)
    copy.residency.free()
    assert all(torch.equal(tensor, before[box]) for box, tensor in home.residency.readable())


def test_what_lacks_a_part_is_lent_nothing() -> None:
    home = trained(torch.float32)
    half = ShardedModel(
        ModelSpec(TINY, ParallelGroups(Layout(DeviceMesh(0, 2), ParallelStrategy(pp=2)), 0), torch.float32)
    )
    home.residency.lend_to(half.residency)
    assert home.residency.where is not Where.LENT
    home.residency.take_back_from(half.residency)  # of a home that kept its own: nothing to do
    step(home)
