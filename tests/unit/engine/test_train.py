"""A training step on one rank: micro-batches, statistics, what it refuses, its optimizer state as boxes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.forward import run_stage
from realhf.engine.interface import Stats
from realhf.engine.model import ShardedModel
from realhf.engine.packing import PackedMicroBatch, pack_micro_batch
from realhf.engine.returned import InterfaceError
from realhf.engine.train import step as step_module
from realhf.engine.train.step import reaching
from realhf.parallel.vocabulary import Logits, WholeLogits
from tests.unit.engine.losses import ONE_RANK, boxes_of, next_token_loss, random_batch, tiny, trained_tokens

CONFIG = tiny(num_layers=2)


def model(dtype: torch.dtype = torch.float64, **optimizer: float) -> ShardedModel:
    config = OptimizerConfig(**{"lr": 1e-2, **optimizer})
    made = ShardedModel(ModelSpec(CONFIG, ONE_RANK, dtype, optimizer=config, total_optimizer_steps=10))
    made.initialise(seed=0)
    return made


def step(trained: ShardedModel, batch: Batch, micro_batches: int = 1) -> Stats:
    return trained.train_step(batch, "tokens", next_token_loss, trained_tokens, micro_batches)


def test_micro_batches_change_nothing() -> None:
    one, four = model(), model()
    for seed in range(3):
        batch = random_batch(CONFIG, 8, seed=seed)
        whole, parts = step(one, batch), step(four, batch, micro_batches=4)
        assert whole.keys() == parts.keys() == {"loss", "accuracy", "grad_norm", "lr"}
        assert whole["loss"][1] == parts["loss"][1] == trained_tokens(batch)
        for key in whole:
            assert parts[key] == pytest.approx(whole[key], rel=1e-10)
    torch.testing.assert_close(four.parameters.flat, one.parameters.flat, rtol=1e-9, atol=1e-10)


def test_loss_falls_in_bfloat16_too() -> None:
    trained = model(torch.bfloat16)
    batch = random_batch(CONFIG, 8)
    losses = [step(trained, batch, micro_batches=2)["loss"] for _ in range(10)]
    assert losses[-1][0] < 0.7 * losses[0][0]
    assert boxes_of(trained)["model.norm.weight"][1].dtype == torch.bfloat16
    master = [local for box, local in trained.trainer.state() if box.name == "model.norm.weight@master"]
    assert [local.dtype for local in master] == [torch.float32]


def test_clipping_limits_the_gradient() -> None:
    clipped, free = model(max_grad_norm=1e-3), model(max_grad_norm=1e3)
    batch = random_batch(CONFIG, 4)
    norm = step(free, batch)["grad_norm"]
    assert step(clipped, batch)["grad_norm"] == norm  # of the gradient before clipping
    assert free.parameters.gradient.norm().item() == pytest.approx(norm[0])
    assert used_gradient(clipped).norm().item() == pytest.approx(1e-3, rel=1e-2)


def used_gradient(trained: ShardedModel) -> Tensor:
    """What the first step of AdamW took for the gradient: its first moment is (1 - beta1) of it."""
    assert trained.trainer.optimizer.step_count == 1
    return trained.trainer.optimizer.state["exp_avg"] / (1 - OptimizerConfig().beta1)


def test_clipping_by_hand() -> None:
    """A loss whose gradient is known: the sum of the final norm's weights times the tokens' number."""
    trained = model(max_grad_norm=0.5, weight_decay=0.0)
    norm = boxes_of(trained)["model.norm.weight"][1]
    parameter = trained.decoder.model.norm.weight

    def loss(output: Tensor, batch: Batch) -> tuple[Tensor, Stats]:
        return 3.0 * parameter.sum() * len(batch), {}

    before = norm.clone()
    stats = trained.train_step(random_batch(CONFIG, 4), "tokens", loss, lambda batch: float(len(batch)), 2)
    # Each of the 32 elements has the gradient 3 x 4 / 4, the norm is 3 sqrt(32); clipped, all are 0.5 / sqrt(32).
    assert stats["grad_norm"][0] == pytest.approx(3 * 32**0.5)
    gradient = used_gradient(trained)[used_gradient(trained) != 0]
    torch.testing.assert_close(gradient, torch.full((32,), 0.5 / 32**0.5, dtype=gradient.dtype), rtol=1e-6, atol=0)
    # The first step of AdamW is lr x sign(gradient), whatever its size.
    torch.testing.assert_close(norm, before - stats["lr"][0], rtol=1e-6, atol=0)


def test_a_gradient_of_almost_nothing_is_not_divided_by_it() -> None:
    trained = model(max_grad_norm=1e-6, warmup_steps=4)
    parameter = trained.decoder.model.norm.weight
    each = 1e-6 / 32**0.5

    def loss(output: Tensor, batch: Batch) -> tuple[Tensor, Stats]:
        return each * parameter.sum() * len(batch), {"of each": (float(len(batch)), 1.0)}

    stats = trained.train_step(random_batch(CONFIG, 4), "tokens", loss, lambda batch: float(len(batch)), 2)
    assert stats["grad_norm"] == (pytest.approx(1e-6), 1.0)
    assert stats["lr"] == (2.5e-3, 1.0)  # of this step, the first of four
    assert stats["of each"] == (4.0, 2.0)
    assert stats["loss"] == (pytest.approx(each * parameter.sum().item() * 4, rel=1e-2), 4.0)
    gradient = used_gradient(trained)[used_gradient(trained) != 0]
    torch.testing.assert_close(gradient, torch.full((32,), each / 2, dtype=gradient.dtype), rtol=1e-9, atol=0)


def test_weights_may_sum_to_less_than_one_and_what_was_updated_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, batch = model(), random_batch(CONFIG, 4)
    steps: list[int] = []
    monkeypatch.setattr(trained.parameters, "publish", lambda: steps.append(trained.trainer.optimizer.step_count))
    stats = trained.train_step(batch, "tokens", next_token_loss, lambda part: len(part) / 8, 2)
    assert stats["loss"][1] == 0.5
    assert steps == [1], "once, behind the update"


def test_sums_over_ranks_are_in_float64_over_the_groups_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[tuple[Any, torch.dtype, float]] = []

    def all_reduce(tensor: Tensor, group: Any) -> None:
        summed.append((group, tensor.dtype, tensor.item()))
        tensor *= 4

    trained = model()
    monkeypatch.setattr(step_module.dist, "all_reduce", all_reduce)
    groups: Any = SimpleNamespace(model="the model", data="the data", is_last_stage=True)
    monkeypatch.setattr(trained.decoder, "groups", groups)
    trained.parameters.gradient.fill_(0.0)[0] = 3.0
    assert trained.trainer._norm() == 6.0
    assert trained.trainer._sum_over_data(0.1) == 0.4
    assert summed == [("the model", torch.float64, 9.0), ("the data", torch.float64, 0.1)]


def outputs(kind: str) -> tuple[Any, Tensor]:
    """What a model's head may put out, and the tensor of it that a backward pass has to come to."""
    head = torch.ones(2, 3, requires_grad=True) * 2
    if kind == "tensor":
        return head, head
    made = Logits.__new__(Logits) if kind == "logits" else WholeLogits.__new__(WholeLogits)
    object.__setattr__(made, "hidden" if kind == "logits" else "logits", head)
    return made, head


@pytest.mark.parametrize("kind", ["tensor", "logits", "whole logits"])
def test_a_backward_pass_comes_to_the_head_whatever_the_loss_is_of(kind: str) -> None:
    output, head = outputs(kind)
    loss = head.square().sum() + 1.0
    for _ in range(100):  # each way through the graph is gone once
        loss = loss + loss * 0.5
    assert reaching(loss, output) is loss
    came = []
    head.register_hook(came.append)
    other = torch.ones((), requires_grad=True)
    twice = other * 3
    for _ in range(40):
        twice = twice + twice
    for constant in (twice / 2**40, torch.tensor(4.0, requires_grad=True)):
        reached = reaching(constant, output)
        assert reached is not constant
        assert reached.item() == constant.item()
        reached.backward(retain_graph=True)
        assert [gradient.tolist() for gradient in came] == [[[0.0] * 3] * 2]
        came.clear()
    assert other.grad == 3.0


@pytest.mark.parametrize("wide", [True, False], ids=["float32 gradients", "bfloat16 gradients"])
def test_bfloat16_follows_a_loop_written_out(wide: bool) -> None:
    """Master weights, moments and (unless asked otherwise) sums of gradients in float32, one parameter at a time."""
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.3, schedule="constant", fp32_gradients=wide)
    trained, loop = (
        ShardedModel(ModelSpec(CONFIG, ONE_RANK, torch.bfloat16, optimizer=optimizer, total_optimizer_steps=3))
        for optimizer in (config, None)
    )
    trained.initialise(seed=0)
    loop.initialise(seed=0)
    parameters = {name: p.requires_grad_() for name, p in loop.decoder.named_parameters()}
    masters = {name: p.detach().float() for name, p in parameters.items()}
    first = {name: torch.zeros_like(p) for name, p in masters.items()}
    second = {name: torch.zeros_like(p) for name, p in masters.items()}
    for step_number in range(1, 4):
        batch = random_batch(CONFIG, 8, seed=step_number)
        stats = step(trained, batch, micro_batches=4)
        sums = {n: torch.zeros_like(p, dtype=torch.float32 if wide else torch.bfloat16) for n, p in parameters.items()}
        for places in batch.balanced("tokens", 4):
            part = batch.select(places)
            packed = pack_micro_batch(part.data["tokens"], torch.device("cpu"))
            loss = next_token_loss(run_stage(loop.decoder, packed, None), part)[0] / trained_tokens(batch)
            for name, gradient in zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True):
                sums[name] += gradient
        norm = sum(g.double().square().sum() for g in sums.values()).sqrt()
        assert norm > 0.3
        # Autograd adds up the embedding's gradient in bfloat16, the engine in the dtype of its sums.
        assert stats["grad_norm"][0] == pytest.approx(norm.item(), rel=1e-4)
        for name, total in sums.items():
            gradient = total.float() * (0.3 / (norm.item() + 1e-6))
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            step_size = first[name] / (1 - 0.9**step_number) / ((second[name] / (1 - 0.95**step_number)).sqrt() + 1e-8)
            masters[name] = masters[name] * (1 - 1e-2 * 0.1) - 1e-2 * step_size
            # From the engine's own, so that a rounding at a border does not take the two apart: compared at once.
            # The two sums of the embedding's gradient may round it to neighbours.
            rtol = 2**-6 if name == "model.embed_tokens.weight" else 2**-7
            torch.testing.assert_close(boxes_of(trained)[name][1], masters[name].bfloat16(), rtol=rtol, atol=5e-5)
            with torch.no_grad():
                parameters[name].copy_(boxes_of(trained)[name][1])
    state = {box.name: local for box, local in trained.trainer.state()}
    assert trained.parameters.gradient.dtype == (torch.float32 if wide else torch.bfloat16)
    for name, master in masters.items():
        is_embedding = name == "model.embed_tokens.weight"
        within = {"rtol": 2**-6, "atol": 1e-4} if is_embedding else {"rtol": 1e-5, "atol": 5e-6}
        torch.testing.assert_close(state[f"{name}@master"], master, **within)
        rtol, atol = (2**-6, 1e-5) if is_embedding else (2e-4, 1e-7)
        torch.testing.assert_close(state[f"{name}@exp_avg"], first[name], rtol=rtol, atol=atol)


def _with_nan(output: Tensor, batch: Batch) -> tuple[Tensor, Stats]:
    loss, stats = next_token_loss(output, batch)
    return loss * torch.tensor(float("nan")), stats


def _with_a_gradient_of_nan(output: Tensor, batch: Batch) -> tuple[Tensor, Stats]:
    loss, stats = next_token_loss(output, batch)
    return loss + (loss * 0).sqrt(), stats


def _with_an_infinite_norm(output: Logits, batch: Batch) -> tuple[Tensor, Stats]:
    """Every gradient is finite, and the sum of their squares is not."""
    loss, stats = next_token_loss(output, batch)
    return loss + 1e200 * (output.hidden - output.hidden.detach()).sum(), stats


def _without_gradient(output: Tensor, batch: Batch) -> tuple[Tensor, Stats]:
    loss, stats = next_token_loss(output, batch)
    return loss.detach(), stats


@pytest.mark.parametrize(
    ("loss", "weight", "error", "text"),
    [
        (
            _with_a_gradient_of_nan,
            trained_tokens,
            FloatingPointError,
            "optimizer step 1: the gradient norm is nan; the loss here was",
        ),
        (
            _with_an_infinite_norm,
            trained_tokens,
            FloatingPointError,
            "optimizer step 1: the gradient norm is inf; the loss here was",
        ),
        (_with_nan, trained_tokens, InterfaceError, r"the loss of samples \d, \d is nan, must be finite; lower"),
        (
            _without_gradient,
            trained_tokens,
            InterfaceError,
            r"the loss is a tensor \[\] of float64, without a",
        ),
        (lambda output, batch: None, trained_tokens, InterfaceError, "the loss function returned None, must be a"),
        (next_token_loss, lambda batch: 0.0, ValueError, "optimizer step 1: the loss weights .* sum to 0.0"),
        (next_token_loss, lambda batch: -1.0, ValueError, "the loss weights of the mini-batch sum to -2.0"),
        (next_token_loss, lambda batch: float("inf"), ValueError, "the loss weights of the mini-batch sum to inf"),
        (next_token_loss, lambda batch: float("nan"), ValueError, "the loss weights of the mini-batch sum to nan"),
    ],
)
def test_refuses_what_would_spoil_the_parameters(
    loss: Callable, weight: Callable, error: type[Exception], text: str
) -> None:
    trained, batch = model(), random_batch(CONFIG, 4)
    step(trained, batch)
    before = trained.parameters.flat.clone()
    state = [local.clone() for _, local in trained.trainer.state()]
    with pytest.raises(error, match=text):
        trained.train_step(batch, "tokens", loss, weight, 2)
    assert torch.equal(trained.parameters.flat, before)
    assert all(torch.equal(local, old) for (_, local), old in zip(trained.trainer.state(), state, strict=True))
    assert trained.trainer.optimizer.step_count == 1
    step(trained, batch)
    assert trained.parameters.flat.isfinite().all()


def test_a_copy_made_from_boxes_continues_alike() -> None:
    original, copy = model(), model()
    for seed in range(2):
        step(original, random_batch(CONFIG, 4, seed=seed))
    for name, (box, local) in boxes_of(original).items():
        assert boxes_of(copy)[name][0] == box
        boxes_of(copy)[name][1].copy_(local)
    copy.residency.written()
    moments = original.trainer.state()
    assert len(moments) == 2 * len(boxes_of(original))
    for (box, local), (same, other) in zip(moments, copy.trainer.state(), strict=True):
        assert box == same
        assert local.shape == box.shape
        other.copy_(local)
    copy.trainer.optimizer.step_count = original.trainer.optimizer.step_count
    batch = random_batch(CONFIG, 4, seed=9)
    assert step(original, batch) == step(copy, batch)
    assert torch.equal(original.parameters.flat, copy.parameters.flat)


def test_a_model_without_an_optimizer_has_no_gradients() -> None:
    frozen = ShardedModel(ModelSpec(CONFIG, ONE_RANK, torch.float32))
    assert frozen.trainer is None
    assert all(p.grad is None and not p.requires_grad for p in frozen.decoder.parameters())


@pytest.mark.parametrize("lengths", [[3, 1, 2, 3, 1], [2, 2, 2], [1], [5, 4, 3]])
def test_packing_sorts_by_length_and_restores(lengths: list[int]) -> None:
    sequences = [torch.arange(n) + 10 * i for i, n in enumerate(lengths)]
    packed = pack_micro_batch(sequences, torch.device("cpu"))
    assert packed.attend.runs == [(lengths.count(n), n) for n in sorted(set(lengths))]
    assert (packed.restore is None) == (lengths == sorted(lengths))
    assert packed.positions.tolist() == (packed.tokens % 10).tolist()
    restored = packed.tokens if packed.restore is None else packed.tokens[packed.restore]
    assert restored.tolist() == torch.cat(sequences).tolist()


@pytest.mark.parametrize(("tokens", "rows"), [(64, 64), (65, 96), (500, 512), (513, 576), (640, 640)])
def test_the_number_of_rows_is_one_of_few(tokens: int, rows: int) -> None:
    sequences = [torch.arange(1, 1 + n) for n in (tokens - 20, 20)]
    packed = pack_micro_batch(sequences, torch.device("cpu"))
    assert len(packed.tokens) == len(packed.positions) == sum(n * length for n, length in packed.attend.runs) == rows
    assert packed.restore is not None
    assert packed.tokens[packed.restore].tolist() == torch.cat(sequences).tolist()
    assert packed.positions[packed.restore].tolist() == [*range(tokens - 20), *range(20)]


def test_padding_changes_neither_outputs_nor_gradients() -> None:
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, torch.float64))
    model.initialise(0)
    parameters = [p.requires_grad_() for p in model.decoder.parameters()]
    batch = random_batch(CONFIG, 24, seed=0)
    sequences = batch.data["tokens"]
    together = pack_micro_batch(sequences, torch.device("cpu"))
    assert len(together.tokens) > sum(map(len, sequences)) > 64
    alone = [pack_micro_batch([sequence], torch.device("cpu")) for sequence in sequences]
    assert all(len(packed.tokens) == len(sequence) for packed, sequence in zip(alone, sequences, strict=True))

    def logits(packed: PackedMicroBatch) -> torch.Tensor:
        return run_stage(model.decoder, packed, None).full()

    expected = torch.cat([logits(packed) for packed in alone])
    actual = logits(together)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(actual)
    torch.testing.assert_close(
        torch.autograd.grad((actual * weights).sum(), parameters),
        torch.autograd.grad((expected * weights).sum(), parameters),
        rtol=1e-10, atol=1e-10,
    )  # fmt: skip
