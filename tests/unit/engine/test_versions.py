"""A model with several versions of its parameters: what was written comes back, whatever was selected between."""

import pytest
import torch

from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.models.checkpoint_index import newer_kinds, state_owners
from realhf.planning.model.memory import PlacedModel
from tests.unit.engine.losses import ONE_RANK, random_batch, split_like, tiny

CONFIG = tiny(num_layers=2)
BATCH = random_batch(CONFIG, 4)


def model_with(numbers: tuple[int, ...]) -> ShardedModel:
    """Version i has the initial weights of seed i."""
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, torch.float64, versions=numbers))
    for number in numbers:
        model.residency.select_version(number)
        model.initialise(number)
    return model


def outputs(model: ShardedModel) -> torch.Tensor:
    return torch.cat(model.forward(BATCH, "tokens", split_like, micro_batches=1)["output"])


def test_each_version_computes_with_its_own_values() -> None:
    model = model_with((3, 4, 5))
    expected = {number: outputs(model_with((number,))) for number in (3, 4, 5)}
    for number in (4, 4, 3, 5, 3):
        model.residency.select_version(number)
        assert model.residency.version == number
        assert torch.equal(outputs(model), expected[number])
        for other in (3, 4, 5):  # to be read, whichever computes
            of_seed = dict(model_with((other,)).residency.held())
            assert all(torch.equal(tensor, of_seed[box]) for box, tensor in model.residency.readable(other))
    assert model.residency.versions == [3, 4, 5]
    with pytest.raises(LookupError, match=r"version 6 are asked for, and here are those of \[3, 4, 5\]"):
        model.residency.select_version(6)


def test_what_is_overwritten_is_a_newer_version() -> None:
    model = model_with((0, 1))
    model.residency.select_version(0)
    model.initialise(2)
    model.residency.begin_at_version(2)
    assert model.residency.versions == [1, 2]
    model.residency.select_version(1)
    assert torch.equal(outputs(model), outputs(model_with((1,))))
    model.residency.select_version(2)
    assert torch.equal(outputs(model), outputs(model_with((2,))))


def test_at_the_start_all_are_the_same() -> None:
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, torch.float64, versions=range(-2, 1)))
    model.initialise(7)
    model.residency.fill_versions()
    expected = outputs(model_with((7,)))
    for number in (0, -2, -1):
        model.residency.select_version(number)
        assert torch.equal(outputs(model), expected)


def test_all_are_written_the_oldest_as_the_parameters() -> None:
    model = model_with((3, 4, 5))
    for selected in (3, 5):
        model.residency.select_version(selected)
        state = model.state()
        owned = state_owners(CONFIG, ONE_RANK.layout, "float32", with_optimizer=False, versions=3)[0]
        assert [box for box, _ in state] == owned
        for kind, number in zip(("", *newer_kinds(3)), (3, 4, 5), strict=True):
            expected = {box.name: tensor for box, tensor in model_with((number,)).state()}
            written = {box.name: tensor for box, tensor in state if box.name.partition("@")[2] == kind}
            assert len(written) == len(expected)
            for name, tensor in written.items():
                assert torch.equal(tensor, expected[name.partition("@")[0]])


def test_they_wait_in_host_memory_together_and_have_the_planned_memory() -> None:
    model = model_with((0, 1, 2))
    vectors = [model.residency.vectors(number)[0] for number in (0, 1, 2)]
    planned = PlacedModel(CONFIG, ONE_RANK.layout.strategy, "float64").static_bytes(trained=False, versions=3)
    padding = sum(vector.nbytes for vector in vectors) - planned
    assert 0 <= padding < 0.01 * planned
    expected = outputs(model_with((1,)))
    model.residency.offload()
    assert all(vector.untyped_storage().nbytes() == 0 for vector in vectors)
    model.residency.load()
    model.residency.select_version(1)
    model.residency.offload()
    model.residency.load()
    assert torch.equal(outputs(model), expected)
