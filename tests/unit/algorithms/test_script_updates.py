"""The updates of scripts on the workers, against gradients worked out from the model's own log-probabilities."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.algorithms.script.rows import as_rollouts, divided, pairs_of
from realhf.algorithms.script.update import UpdateInterface
from realhf.api import (
    SEQUENCE_MEAN,
    TOKEN_MEAN,
    Columns,
    loss_function,
    sequence_sum_over,
)
from realhf.api.script.config import Term
from realhf.api.script.views import Application, View
from realhf.engine.batch import Batch
from realhf.engine.returned import InterfaceError
from tests.unit.algorithms.script_rollouts import ROLLOUT, logprobs_of, negative, pairs, rollouts, term, update_of


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.module.parameters()])


def clipped(right: Tensor) -> Tensor:
    """Within a norm of 1, as the model here keeps gradients."""
    return right * min(1.0, 1.0 / (float(right.norm()) + 1e-6))


def assert_same(found: Tensor, right: Tensor) -> None:
    assert torch.allclose(found, right, rtol=1e-12, atol=1e-12)


def update(model: Any, context: Any, batch: Batch, term: Term, **settings: Any) -> dict[str, tuple[float, float]]:
    config = update_of(term, **{"reports": (), **settings})
    return UpdateInterface(config).train_step(model, [batch], context()).stats


def check_loss(model: Any, context: Any, batch: Batch, made: Term, expected: Any) -> dict[str, tuple[float, float]]:
    """Whether the gradient of an update is that of `expected(model)`, before clipping by the norm."""
    expected(model).backward()
    right = clipped(gradient(model))
    stats = update(model, context, batch, made)
    assert_same(gradient(model), right)
    return stats


def mean_over(model: Any, weights: list[list[float]], divisor: float, temperature: float = 1.0) -> Tensor:
    batch = rollouts()
    each = logprobs_of(model, batch.data["seq"], batch.data["prompt"], temperature)
    return -sum((x * torch.tensor(w, dtype=torch.float64)).sum() for x, w in zip(each, weights, strict=True)) / divisor


ONES = [[1.0] * 3, [1.0], [1.0] * 2, [1.0] * 4]


@pytest.mark.parametrize(
    ("reduction", "weights", "divisor"),
    [
        (TOKEN_MEAN, ONES, 10),
        (SEQUENCE_MEAN, [[1 / 3] * 3, [1.0], [1 / 2] * 2, [1 / 4] * 4], 4),
        (sequence_sum_over(7), [[1 / 7] * 3, [1 / 7], [1 / 7] * 2, [1 / 7] * 4], 4),
    ],
)
def test_reductions(
    language_model: Any, context: Any, reduction: Any, weights: list[list[float]], divisor: float
) -> None:
    made = term(loss_function(negative, reduction)())
    stats = check_loss(language_model(), context, rollouts(), made, lambda model: mean_over(model, weights, divisor))
    assert stats["actor_loss"][1] == divisor


def test_the_temperature_of_the_rollout(language_model: Any, context: Any) -> None:
    made = term(temperature=0.5)
    check_loss(language_model(), context, rollouts(), made, lambda model: mean_over(model, ONES, 10, 0.5))


def test_weights_multiply_tokens_and_are_in_no_divisor(language_model: Any, context: Any) -> None:
    weight = [[1.0, 0.0, 2.0], [0.5], [1.0, 1.0], [0.0] * 4]
    batch = rollouts(weight=[torch.tensor(w).double() for w in weight])
    view = View((*ROLLOUT.columns, ("weight", "weight")))
    check_loss(language_model(), context, batch, term(batch=view), lambda model: mean_over(model, weight, 10))


@pytest.mark.parametrize(("reduction", "divisor"), [(TOKEN_MEAN, 5), (sequence_sum_over(1), 2)])
def test_samples_that_are_not_valid_count_nowhere(
    language_model: Any, context: Any, reduction: Any, divisor: float
) -> None:
    valid = [torch.tensor([v]) for v in (1.0, 0.0, 1.0, 0.0)]
    reward = [torch.tensor([r]) for r in (1.0, 100.0, 3.0, 100.0)]
    batch = rollouts(valid=valid, reward=reward)
    view = View((*ROLLOUT.columns, ("valid", "valid"), ("reward", "reward")))

    def looks(logprob: Tensor, batch: Batch) -> Any:
        assert batch.ids == (4, 6)
        return -logprob, {"seen": (float(len(batch)), 1.0)}

    made = term(loss_function(looks, reduction)(), view)
    model = language_model()
    weights = [[1.0] * 3, [0.0], [1.0] * 2, [0.0] * 4]
    mean_over(model, weights, divisor).backward()
    right = gradient(model)
    stats = update(model, context, batch, made, reports=("rollout",))
    assert_same(gradient(model), clipped(right))
    assert stats["seen"] == (2.0, 1.0)
    assert stats["reward_mean"] == (4.0, 2.0)
    assert stats["response_length"] == (5.0, 2.0)


def test_ranks_add_up_equally_often_whichever_of_their_samples_are_left_out(
    language_model: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for ever for a rank that does not."""
    sums: list[list[int]] = []
    monkeypatch.setattr(
        context, "sum_over_data_parallel", lambda self, values: sums[-1].append(values.numel()) or values
    )
    view = View((*ROLLOUT.columns, ("valid", "valid")))
    for valid in ((1.0, 1.0, 1.0, 1.0), (1.0, 0.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0), None):
        columns = {} if valid is None else {"valid": [torch.tensor([v]) for v in valid]}
        sums.append([])
        update(language_model(), context, rollouts(**columns), term(batch=view if columns else ROLLOUT))
    assert sums == [[1]] * 4


def test_a_mini_batch_without_a_valid_sample_makes_no_step(language_model: Any, context: Any) -> None:
    batch = rollouts(valid=[torch.zeros(1)] * 4)
    model = language_model()
    model.after_step = lambda: pytest.fail("a step")
    stats = update(model, context, batch, term(batch=View((*ROLLOUT.columns, ("valid", "valid")))))
    assert stats == {"actor_skipped_mini_batches": (1.0, 1.0)}


def test_a_mark_of_validity_per_token_is_refused(language_model: Any, context: Any) -> None:
    batch = rollouts(valid=[torch.ones(3), torch.ones(1), torch.ones(1), torch.ones(1)])
    view = View((*ROLLOUT.columns, ("valid", "valid")))
    with pytest.raises(InterfaceError, match=r"'valid' of sample 4 has the shape \[3\], must be \[1\]"):
        update(language_model(), context, batch, term(batch=view))


def test_a_micro_batch_without_a_valid_sample(language_model: Any, context: Any) -> None:
    batch = rollouts(valid=[torch.tensor([v]) for v in (1.0, 1.0, 0.0, 0.0)])
    view = View((*ROLLOUT.columns, ("valid", "valid")))
    models = [language_model(), language_model()]
    for parts, model in zip((1, 2), models, strict=True):
        update(model, lambda parts=parts: context(micro_batches=parts), batch, term(batch=view))
    assert torch.allclose(gradient(models[0]), gradient(models[1]), atol=1e-12)


def test_what_is_left_out_is_not_computed(language_model: Any, context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But each micro-batch needs a sample, since other ranks have as many; and samples that go together stay so."""
    view, model, computed = View((*ROLLOUT.columns, ("valid", "valid"))), language_model(), []
    monkeypatch.setattr(model, "train_step", lambda batch, *_: computed.append((batch.ids, batch.together)) or {})
    valid = [torch.tensor([v]) for v in (1.0, 0.0, 0.0, 0.0)]
    for parts in (1, 2, 4):
        update(model, lambda parts=parts: context(micro_batches=parts), rollouts(valid=valid), term(batch=view))
    assert computed == [((4,), 1), ((4, 5), 1), ((4, 5, 6, 7), 1)]
    computed.clear()
    two, view = pairs()
    two = two.with_data(valid=[torch.zeros(1), torch.ones(1)])
    update(model, context, two, term(batch=View((*view.columns, ("valid", "valid"))), rows="pairs"))
    assert computed == [((18, 19), 2)]


def test_epochs_and_the_end_by_divergence(language_model: Any, context: Any) -> None:
    old = [x.detach() for x in logprobs_of(language_model(), rollouts().data["seq"], rollouts().data["prompt"])]
    batch, view = rollouts(logprob=old), View((*ROLLOUT.columns, ("logprob", "logprob")))
    counts = []
    for max_kl in (None, 1e-12, 1e9):
        model, steps = language_model(), []
        model.after_step = lambda steps=steps: steps.append(1)
        stats = update(model, context, batch, term(batch=view), epochs=3, max_kl=max_kl)
        counts.append(len(steps))
        assert ("actor_stopped_after" in stats) == (max_kl == 1e-12)
    # In the first step's pass the policy is still that of the rollouts, but for rounding.
    assert counts == [3, 2, 3]


def test_the_divergence_that_ends_an_update_is_the_mean_of_new_over_old(language_model: Any, context: Any) -> None:
    """KL(old || new) of the tokens that the old policy drew: new / old - 1 - log(new / old), by tokens that count."""
    model, valid = language_model(), [1.0, 1.0, 0.0, 1.0]
    now = [x.detach() for x in logprobs_of(model, rollouts().data["seq"], rollouts().data["prompt"])]
    steps = [0.5, -1.0, 9.0, 0.25]  # log(new / old) of the samples' tokens
    batch = rollouts(
        logprob=[x - d for x, d in zip(now, steps, strict=True)], valid=[torch.tensor([v]).double() for v in valid]
    )
    view = View((*ROLLOUT.columns, ("logprob", "logprob"), ("valid", "valid")))
    stats = update(model, context, batch, term(batch=view), max_kl=1e9)
    each = [math.exp(d) - 1 - d for d in steps]
    assert stats["actor_kl_from_rollout"] == pytest.approx((3 * each[0] + each[1] + 4 * each[3], 8.0))
    assert "actor_kl_from_rollout" not in update(language_model(), context, batch, term(batch=view))
    # Of the first loss alone, though the examples of another have a column of that name too.
    batch = batch.with_data(other_logprob=[x - 2.0 for x in now])
    other = View((*ROLLOUT.columns, ("logprob", "other_logprob")))
    terms = (term(batch=view), term(batch=other, coef=0.5))
    config = update_of(*terms, max_kl=1e9)
    stats = UpdateInterface(config).train_step(language_model(), [batch], context()).stats
    assert stats["actor_kl_from_rollout"] == pytest.approx((3 * each[0] + each[1] + 4 * each[3], 8.0))


def test_statistics_of_an_update_have_the_model_s_name(language_model: Any, context: Any) -> None:
    def loss(logprob: Tensor, batch: Batch) -> Any:
        return -logprob, {"mine": (1.0, 2.0)}

    reward = [torch.tensor([float(r)]) for r in range(4)]
    batch = rollouts(reward=reward)
    view = View((*ROLLOUT.columns, ("reward", "reward")))
    stats = update(language_model(), context, batch, term(loss_function(loss)(), view), reports=("rollout",))
    assert set(stats) == {*("actor_loss", "actor_grad_norm", "actor_lr", "mine", "reward_mean", "response_length")}
    assert "reward_mean" not in update(language_model(), context, batch, term(batch=view))

    # A tensor function's statistics are of all samples, and take the place of those of what is trained on.
    def filtered(rollout: Columns) -> Any:
        return {"valid": [torch.tensor([float(i % 2)]) for i in range(4)]}, {"reward_mean": (6.0, 4.0)}

    applied = View(view.columns, Application(0, filtered, (view,), ()))
    chosen = term(batch=applied)
    stats = update(language_model(), context, batch, chosen, reports=("rollout", 0))
    assert stats["reward_mean"] == (6.0, 4.0)
    assert stats["response_length"] == (5.0, 2.0)
    stats = update(language_model(), context, batch, chosen, reports=("rollout",))
    assert stats["reward_mean"] == (4.0, 2.0)


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_rank_with_nothing_to_learn_from_takes_the_step_of_the_others(
    language_model: Any, context: Any, is_empty: bool
) -> None:
    """Its gradient is zero, and it takes part in all that they do; also where no response has a token."""
    made: list[Any] = []

    def train_step(batch: Batch, key: str, loss: Any, weight: Any, micro_batches: int) -> Any:
        model.optimizer.zero_grad()
        value, stats = loss(model.head(batch, key), batch)
        value.backward()
        made.append((value.item(), weight(batch), stats))
        return stats

    model = language_model()
    model.train_step = train_step
    batch = rollouts(valid=[torch.zeros(1)] * 4)
    if is_empty:
        batch = batch.with_data(seq=batch.data["prompt"])
    view = View((*ROLLOUT.columns, ("valid", "valid")))
    peers = [torch.tensor([[7.0]], dtype=torch.float64)]
    update(model, lambda: context(peers=peers), batch, term(batch=view))
    assert made == [(0.0, 0.0, {})]
    assert (gradient(model) == 0).all()


def test_a_second_loss_is_divided_by_the_weight_of_all_ranks(language_model: Any, context: Any) -> None:
    """Another rank has 30 tokens of the first loss and 12 of the second: the second counts 0.5 x 40 / 18."""
    tokens = [torch.tensor([1, 6, 5])] * 3 + [torch.tensor([3])]
    examples = View((("tokens", "tokens"), ("prompt_length", "prompt_length")))
    batch = rollouts(tokens=tokens, prompt_length=[torch.tensor([1])] * 4)
    losses: list[float] = []

    def train_step(batch: Batch, key: str, loss: Any, weight: Any, micro_batches: int) -> Any:
        losses.append(loss(model.head(batch, key), batch)[0].item())
        assert weight(batch) == 10
        return {}

    model = language_model()
    model.train_step = train_step
    terms = (term(), term(batch=examples, rows="examples", coef=0.5))
    peers = [torch.tensor([30.0, 12.0], dtype=torch.float64)]
    config = update_of(*terms)
    UpdateInterface(config).train_step(model, [batch], context(peers=peers))
    own = -sum(x.sum().item() for x in logprobs_of(model, batch.data["seq"], batch.data["prompt"]))
    other = -sum(x.sum().item() for x in logprobs_of(model, tokens, [t[:1] for t in tokens]))
    assert losses == [pytest.approx(own + 0.5 * 40 / 18 * other)]


def test_two_losses_make_one_step(language_model: Any, context: Any) -> None:
    """The rollouts' mean plus 0.5 times the examples' mean, each over its own tokens."""
    tokens = [torch.tensor(t) for t in ([1, 2, 3], [1, 6, 5, 4], [1, 2, 2], [3, 3])]
    examples = View((("tokens", "tokens"), ("prompt_length", "prompt_length")))
    batch = rollouts(tokens=tokens, prompt_length=[torch.tensor([1])] * 4)
    for parts in (1, 2):
        model = language_model()
        prompts = [t[:1] for t in tokens]
        other = -torch.cat(logprobs_of(model, tokens, prompts)).mean()
        (mean_over(model, ONES, 10) + 0.5 * other).backward()
        right, steps = gradient(model), []
        model.after_step = lambda steps=steps: steps.append(1)
        terms = (term(), term(batch=examples, rows="examples", coef=0.5))
        config = update_of(*terms)
        UpdateInterface(config).train_step(model, [batch], context(micro_batches=parts))
        assert_same(gradient(model), clipped(right))
        assert len(steps) == 1


MASKED = View(tuple((key, key) for key in ("tokens", "prompt_length", "loss_mask")))


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 0, 1], [0, 1, 1]])
def test_a_second_loss_of_texts_under_a_mask(language_model: Any, context: Any, mask: list[int]) -> None:
    """The mean over the texts' tokens in the loss is added to that over all of the rollouts; without a token in the
    loss it adds nothing."""
    tokens = [torch.tensor([1, 2, 3])] * 4
    masked = {"loss_mask": [torch.tensor(mask)] * 4, "prompt_length": [torch.tensor([1])] * 4}
    model, steps = language_model(), []
    of_text = logprobs_of(model, tokens[:1], [tokens[0][:1]])[0] * torch.tensor(mask[1:])
    (mean_over(model, ONES, 10) - 0.5 * of_text.sum() / max(1, sum(mask))).backward()
    right = clipped(gradient(model))
    model.after_step = lambda: steps.append(1)
    config = update_of(term(), term(batch=MASKED, rows="examples", coef=0.5))
    stats = UpdateInterface(config).train_step(model, [rollouts(tokens=tokens, **masked)], context()).stats
    assert (len(steps), stats["actor_loss"][1]) == (1, 10)
    assert_same(gradient(model), right)


def test_each_loss_has_the_columns_of_its_own_rows(language_model: Any, context: Any) -> None:
    """Weights of the rollouts alone, a mask of the texts alone, a column that both have under one name. A rollout that
    is not valid is in neither loss."""
    seen: dict[str, Any] = {}

    def of_rollouts(logprob: Tensor, batch: Batch) -> Tensor:
        seen["rollouts"] = (set(batch.data), batch.ids, [x.item() for x in batch.data["mark"]])
        return -logprob

    def of_texts(logprob: Tensor, batch: Batch) -> Tensor:
        seen["texts"] = (set(batch.data), batch.ids, [x.item() for x in batch.data["mark"]])
        return -logprob

    tokens, weight = [torch.tensor([1, 2, 3])] * 4, [[1.0, 0.0, 2.0], [0.5], [1.0, 1.0], [0.0] * 4]
    valid = [torch.tensor([v]) for v in (1.0, 1.0, 0.0, 1.0)]
    batch = rollouts(
        tokens=tokens,
        prompt_length=[torch.tensor([1])] * 4,
        loss_mask=[torch.tensor([0, 0, 1])] * 4,
        weight=[torch.tensor(w).double() for w in weight],
        valid=valid,
        first=[torch.tensor([i]) for i in range(4)],
        second=[torch.tensor([-i]) for i in range(4)],
    )
    view = View((*ROLLOUT.columns, ("weight", "weight"), ("valid", "valid"), ("mark", "first")))
    model = language_model()
    (
        mean_over(model, [*weight[:2], [0.0, 0.0], weight[3]], 8)
        - logprobs_of(model, tokens[:1], [tokens[0][:1]])[0][1]
    ).backward()
    right = clipped(gradient(model))
    terms = (
        term(loss_function(of_rollouts)(), view),
        term(loss_function(of_texts)(), View((*MASKED.columns, ("mark", "second"))), rows="examples"),
    )
    UpdateInterface(update_of(*terms)).train_step(model, [batch], context())
    assert seen == {
        "rollouts": ({"prompt", "seq", "weight", "valid", "mark"}, (4, 5, 7), [0, 1, 3]),
        "texts": (
            {"prompt", "seq", "tokens", "prompt_length", "loss_mask", "in_loss", "mark"},
            (4, 5, 6, 7),
            [0, -1, -2, -3],
        ),
    }
    assert_same(gradient(model), right)


def test_examples_with_a_mask(language_model: Any, context: Any) -> None:
    tokens = [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7])]
    batch = Batch(
        (0, 1),
        {
            "tokens": tokens,
            "prompt_length": [torch.tensor([1]), torch.tensor([0])],
            "loss_mask": [torch.tensor([0, 1, 0, 1]), torch.tensor([1, 1, 1])],
        },
    )
    view = View(tuple((key, key) for key in batch.data))

    def expected(model: Any) -> Tensor:
        first, second = logprobs_of(model, tokens, [tokens[0][:1], tokens[1][:1]])
        return -(first[0] + first[2] + second.sum()) / 4

    check_loss(language_model(), context, batch, term(batch=view, rows="examples"), expected)


def test_examples_with_a_mask_by_sequences(language_model: Any, context: Any) -> None:
    """The mean over a text's own tokens in the loss, then over texts; one without any is a zero among them."""
    tokens = [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7]), torch.tensor([1, 2])]
    masks = [[0, 1, 0, 1], [0, 0, 1], [0, 0]]
    batch = Batch(
        (0, 1, 2),
        {
            "tokens": tokens,
            "prompt_length": [torch.tensor([1])] * 3,
            "loss_mask": [torch.tensor(mask) for mask in masks],
        },
    )
    view = View(tuple((key, key) for key in batch.data))

    def expected(model: Any) -> Tensor:
        first, second, _ = logprobs_of(model, tokens, [t[:1] for t in tokens])
        return -((first[0] + first[2]) / 2 + second[1]) / 3

    made = term(loss_function(negative, SEQUENCE_MEAN)(), view, rows="examples")
    check_loss(language_model(), context, batch, made, expected)


def test_rows_of_every_kind_as_rollouts() -> None:
    batch, _ = pairs()
    rows = as_rollouts(batch, "pairs")
    assert (rows.ids, rows.together) == ((16, 17, 18, 19), 2)
    assert [seq.tolist() for seq in rows.data["seq"]] == [[1, 3, 4], [1, 6], [1, 2, 5], [1, 2, 7, 7]]
    assert [prompt.tolist() for prompt in rows.data["prompt"]] == [[1], [1], [1, 2], [1, 2]]
    again = pairs_of(rows)
    assert again.ids == (8, 9)
    assert [x.item() for x in again.data["margin"]] == [0.5, 1.0]
    assert "seq" not in again.data
    many = Batch((0, 1, 2, 3), {key: column * 2 for key, column in batch.data.items()})
    assert pairs_of(as_rollouts(many, "pairs")).ids == (0, 1, 2, 3)
    assert [x.item() for x in pairs_of(as_rollouts(many, "pairs")).data["margin"]] == [0.5, 1.0] * 2
    # A text without a prompt begins with a token that nothing predicts.
    tokens = [torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3])]
    examples = Batch((0, 1), {"tokens": tokens, "prompt_length": [torch.tensor([0]), torch.tensor([2])]})
    rows = as_rollouts(examples, "examples")
    assert [prompt.tolist() for prompt in rows.data["prompt"]] == [[5], [1, 2]]
    assert (rows.ids, rows.together, "in_loss" in rows.data) == ((0, 1), 1, False)
    masked = examples.with_data(loss_mask=[torch.tensor([1, 0, 1]), torch.tensor([1, 1, 0])])
    assert [mask.tolist() for mask in as_rollouts(masked, "examples").data["in_loss"]] == [[0, 1], [0]]
    assert as_rollouts(rollouts(), "rollout").ids == (4, 5, 6, 7)
    assert [part.ids for part in divided(rollouts(), [1, 3])] == [(4,), (5, 6, 7)]
    assert [part.together for part in divided(replace(rollouts(), together=2), [2, 2])] == [2, 2]


def preference(chosen: Tensor, rejected: Tensor, batch: Batch) -> Tensor:
    assert (batch.ids, len(batch.data["margin"])) == ((8, 9), 2)
    return -torch.nn.functional.logsigmoid(chosen - rejected - torch.cat(batch.data["margin"]))


def test_pairs_have_sums_of_logprobs(language_model: Any, context: Any) -> None:
    batch, view = pairs()

    def expected(model: Any) -> Tensor:
        sides = [
            torch.stack([x.sum() for x in logprobs_of(model, batch.data[side], batch.data["prompt"])])
            for side in ("chosen", "rejected")
        ]
        return preference(*sides, batch).mean()

    made = term(loss_function(preference)(), view, rows="pairs")
    stats = check_loss(language_model(), context, batch, made, expected)
    assert stats["actor_loss"][1] == 2.0


def test_chosen_and_rejected_answers_of_three_pairs(language_model: Any, context: Any) -> None:
    seen: list[list[float]] = []

    def loss(chosen: Tensor, rejected: Tensor, batch: Batch) -> Tensor:
        seen.extend([chosen.tolist(), rejected.tolist()])
        return rejected - chosen

    model, prompts = language_model(), [torch.tensor([1])] * 3
    sides = {
        "chosen": [torch.tensor([1, *answer]) for answer in ([2, 3], [4], [5, 5, 6])],
        "rejected": [torch.tensor([1, *answer]) for answer in ([7], [3, 3, 2], [2])],
    }
    expected = [[x.sum().item() for x in logprobs_of(model, side, prompts)] for side in sides.values()]
    batch = Batch((0, 1, 2), {"prompt": prompts, **sides})
    view = View(tuple((key, key) for key in batch.data))
    update(model, context, batch, term(loss_function(loss)(), view, rows="pairs"))
    assert seen == [pytest.approx(values) for values in expected]


def test_a_reduction_of_tokens_changes_nothing_for_pairs(language_model: Any, context: Any) -> None:
    batch, view = pairs()
    stats = [
        update(language_model(), context, batch, term(loss_function(preference, reduction)(), view, rows="pairs"))
        for reduction in (TOKEN_MEAN, SEQUENCE_MEAN)
    ]
    assert stats[0] == stats[1]

    def reduced(chosen: Tensor, rejected: Tensor, batch: Batch) -> Any:
        return (chosen - rejected).mean()

    with pytest.raises(InterfaceError, match=r"reduced returned \[\], must be \[2\]: one number for each pair, not"):
        update(language_model(), context, batch, term(loss_function(reduced)(), view, rows="pairs"))

    def number(logprob: Tensor, batch: Batch) -> Any:
        return 3.0

    with pytest.raises(InterfaceError, match=r"number returned float, must be \[10\]: one number for each response to"):
        update(language_model(), context, rollouts(), term(loss_function(number)()))


def test_pairs_of_a_reward_model_have_scores(scalar_model: Any, context: Any) -> None:
    batch, view = pairs()

    def expected(model: Any) -> Tensor:
        sides = [
            torch.stack([model.module(sequence[None])[0, -1, 0] for sequence in batch.data[side]])
            for side in ("chosen", "rejected")
        ]
        return preference(*sides, batch).mean()

    made = term(loss_function(preference)(), view, rows="pairs")
    check_loss(scalar_model(), context, batch, made, expected)


def test_values_learn(scalar_model: Any, context: Any) -> None:
    def squares(value: Tensor, batch: Batch) -> Tensor:
        return (value - 1) ** 2

    def expected(model: Any) -> Tensor:
        values = [model.module(seq[None])[0, len(p) - 1 : -1, 0] for seq, p in zip(*columns, strict=True)]
        return ((torch.cat(values) - 1) ** 2).mean()

    columns = rollouts().data["seq"], rollouts().data["prompt"]
    check_loss(scalar_model(), context, rollouts(), term(loss_function(squares)()), expected)


def test_entropies_on_demand(language_model: Any, context: Any) -> None:
    def bonus(logprob: Tensor, batch: Batch, *, entropy: Tensor) -> Tensor:
        return -logprob - 0.1 * entropy

    def expected(model: Any) -> Tensor:
        entropies = []
        for seq, prompt in zip(rollouts().data["seq"], rollouts().data["prompt"], strict=True):
            logits = model.module(seq[None])[0][len(prompt) - 1 : -1]
            entropies.append(torch.distributions.Categorical(logits=logits).entropy())
        return mean_over(model, ONES, 10) - 0.1 * torch.cat(entropies).mean()

    check_loss(language_model(), context, rollouts(), term(loss_function(bonus)()), expected)


def test_a_loss_of_the_wrong_shape_is_named(language_model: Any, context: Any) -> None:
    def reduced(logprob: Tensor, batch: Batch) -> Tensor:
        return -logprob.mean()

    with pytest.raises(InterfaceError, match=r"the loss reduced returned \[\], must be \[10\]"):
        update(language_model(), context, rollouts(), term(loss_function(reduced)()))
