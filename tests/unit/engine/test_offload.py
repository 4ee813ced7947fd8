"""A model that waits in host memory between its uses: the same bits as one that stays, and no memory meanwhile."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.engine.backend import ModelSpec
from realhf.engine.interface import GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.engine.residency.offload import HostCopy, allocate, pinned_blocks
from realhf.planning.model.memory import PlacedModel
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, split_like, tiny, trained_tokens

CONFIG = tiny(num_layers=2)
BATCH = random_batch(CONFIG, 4)
MIB = 2**20
STAYS: Callable[[ShardedModel], None] = lambda model: None  # noqa: E731


def goes_and_comes(model: ShardedModel) -> None:
    model.residency.offload()
    assert device_bytes(model) == 0
    model.residency.load()


def device_bytes(model: ShardedModel) -> int:
    """What parameters, gradients and optimizer states have on the device."""
    vectors = [model.parameters.flat]
    if model.trainer is not None:
        vectors += [model.parameters.gradient, *model.trainer.optimizer.on_device()]
    return sum(vector.untyped_storage().nbytes() for vector in vectors)


def trained(optimizer: OptimizerConfig, dtype: torch.dtype, between: Callable[[ShardedModel], None]) -> list[Tensor]:
    """Everything that the model has after three steps, with `between` before each of them, and its outputs."""
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, dtype, optimizer=optimizer, total_optimizer_steps=3))
    model.initialise(seed=0)
    for _ in range(3):
        between(model)
        model.train_step(BATCH, "tokens", next_token_loss, trained_tokens, micro_batches=2)
    between(model)
    outputs = model.forward(BATCH, "tokens", split_like, micro_batches=2)["output"]
    between(model)
    options = GenerationOptions(max_new_tokens=4, eos_token=1)
    rollouts = model.generate(BATCH, GenerationRequest(options, prompt_key="tokens", sample_key=(0, 0)))
    assert model.trainer is not None
    states = [state.clone() for state in model.trainer.optimizer.state.values()]
    return [model.parameters.flat.clone(), *states, *outputs, *rollouts.sequences, *rollouts.logprobs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload_states", [False, True])
def test_every_bit_is_the_same(dtype: torch.dtype, offload_states: bool) -> None:
    optimizer = OptimizerConfig(lr=1e-2, offload_states=offload_states)
    expected, got = (trained(optimizer, dtype, between) for between in (STAYS, goes_and_comes))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize(("optimizer", "elements"), [(None, 1), (OptimizerConfig(), 4)])
def test_it_has_the_planned_memory_or_none(optimizer: OptimizerConfig | None, elements: int) -> None:
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, torch.float32, optimizer=optimizer))
    planned = PlacedModel(CONFIG, ONE_RANK.layout.strategy, "float32").static_bytes(trained=optimizer is not None)
    assert planned == elements * 4 * sum(p.numel() for p in model.decoder.parameters())
    whole = device_bytes(model)
    assert planned <= whole <= 1.02 * planned, "places between parameters are left empty"
    model.residency.offload()
    model.residency.offload()
    assert device_bytes(model) == 0
    with model.residency.loaded():
        assert device_bytes(model) == whole
    assert device_bytes(model) == 0
    model.residency.load()
    model.residency.load()
    with model.residency.loaded():
        pass
    assert device_bytes(model) == whole


def test_what_has_not_changed_is_not_copied_again() -> None:
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, torch.float32))
    model.initialise(seed=0)
    model.residency.offload()
    model.residency.load()
    model.parameters.flat.zero_()  # behind its back: the values on the host are older
    model.residency.offload()
    model.residency.load()
    assert model.parameters.flat.any()
    model.parameters.flat.zero_()
    model.residency.written()
    model.residency.offload()
    model.residency.load()
    assert not model.parameters.flat.any()


def test_readers_get_the_parameters_alone() -> None:
    model = ShardedModel(
        ModelSpec(CONFIG, ONE_RANK, torch.float32, optimizer=OptimizerConfig(), total_optimizer_steps=2)
    )
    model.initialise(seed=0)
    before = model.forward(BATCH, "tokens", split_like, micro_batches=1)["output"]
    model.residency.offload()
    model.residency.load(states=False)
    assert device_bytes(model) == model.parameters.flat.nbytes
    after = model.forward(BATCH, "tokens", split_like, micro_batches=1)["output"]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    model.residency.load()
    model.train_step(BATCH, "tokens", next_token_loss, trained_tokens, micro_batches=1)
    model.residency.offload()
    model.residency.offload()
    assert device_bytes(model) == 0


@pytest.mark.parametrize(
    ("size_bytes", "blocks"),
    [
        (0, []),
        (1, [1]),
        (MIB, [MIB]),
        (MIB + 2, [MIB, 2]),
        (2 * MIB, [2 * MIB]),
        (7 * MIB - 4, [4 * MIB, 2 * MIB, MIB - 4]),
        (64 * MIB, [64 * MIB]),
        (300 * MIB + 6, [64 * MIB] * 4 + [32 * MIB, 8 * MIB, 4 * MIB, 6]),
    ],
)
def test_blocks_of_pinned_memory_by_hand(size_bytes: int, blocks: list[int]) -> None:
    assert pinned_blocks(size_bytes) == blocks


def test_blocks_that_are_rounded_up_take_little_more() -> None:
    for size_bytes in (2**35 + 2, 13_476_831_232, 268_435_458, 135_790_592, 12_345_678, 1_048_578, 14):
        blocks = pinned_blocks(size_bytes)
        assert sum(blocks) == size_bytes
        assert all(block % 8 == 0 for block in blocks[:-1])  # whole elements of every dtype
        rounded_up = sum(2 ** (block - 1).bit_length() for block in blocks)  # as torch does
        assert rounded_up - size_bytes < MIB / 2


def test_vectors_that_are_cut_come_back_bit_by_bit() -> None:
    """The copies of a GPU, from and to memory that is not pinned."""
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(length, generator=generator) for length in (MIB + 3, 0, 5)]
    vectors.append(torch.randn(MIB + 1, generator=generator).bfloat16())
    waiting = HostCopy(vectors, cut=pinned_blocks)
    for _ in range(2):
        before = [vector.clone() for vector in vectors]
        waiting.offload()
        assert not any(vector.untyped_storage().nbytes() for vector in vectors)
        for vector in vectors:
            allocate(vector)
            vector.zero_()  # so that nothing is right by what happens to be in memory
        waiting.load()
        assert all(torch.equal(vector, value) for vector, value in zip(vectors, before, strict=True))
        for vector in vectors:
            vector.mul_(3)
        waiting.has_changed = True


USES: dict[str, Callable[[ShardedModel], object]] = {
    "training": lambda model: model.train_step(BATCH, "tokens", next_token_loss, trained_tokens, micro_batches=1),
    "inference": lambda model: model.forward(BATCH, "tokens", split_like, micro_batches=1),
    "reallocation to it": lambda model: model.residency.held(),
    "reallocation from it": lambda model: model.residency.readable(),
    "lending": lambda model: model.residency.lend_to(model.residency),
    "an older version": lambda model: model.residency.readable(1),
    "a change of version": lambda model: model.residency.select_version(1),
}


@pytest.mark.parametrize("use", USES)
def test_a_home_that_waits_in_host_memory_is_not_used(use: str) -> None:
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, torch.float32, optimizer=OptimizerConfig(), versions=(0, 1)))
    model.residency.offload()
    with pytest.raises(AssertionError, match="the parameters wait in host memory"):
        USES[use](model)
    model.residency.load()
    USES["reallocation from it"](model)
