"""The calls of scripts on the workers, against numbers worked out by hand from the model's own log-probabilities."""

from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.algorithms.script.evaluate import Evaluation
from realhf.algorithms.script.own_method import OwnMethodInterface
from realhf.algorithms.script.rollouts import GenerateInterface, LogprobsInterface, ScoreInterface, ValuesInterface
from realhf.algorithms.script.update import UpdateInterface
from realhf.api import SEQUENCE_MEAN, TOKEN_MEAN, Columns, loss_function, sequence_sum_over
from realhf.api.script.config import Generate, Logprobs, OwnMethod, Score, Term, Update, Values
from realhf.api.script.views import Application, ColumnOf, View
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult
from realhf.engine.returned import InterfaceError

ROLLOUT = View((("prompt", "prompt"), ("seq", "seq")))
PROMPTS = [[1, 4], [1, 5, 6], [1, 3], [1]]
ANSWERS = [[2, 3, 4], [5], [6, 7], [2, 2, 5, 3]]


def rollouts(**columns: list[Tensor]) -> Batch:
    """Four samples with responses of 3, 1, 2 and 4 tokens."""
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    sequences = [torch.tensor(prompt + answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    return Batch((4, 5, 6, 7), {"prompt": prompts, "seq": sequences, **columns})


def logprobs_of(model: Any, sequences: list[Tensor], prompts: list[Tensor], temperature: float = 1.0) -> list[Tensor]:
    """Per sample [response], computed one sequence at a time."""
    out = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        logits = model.module(sequence[None])[0] / temperature
        every = logits.log_softmax(-1)[:-1].gather(1, sequence[1:, None])[:, 0]
        out.append(every[len(prompt) - 1 :])
    return out


def negative(logprob: Tensor, batch: Batch) -> Tensor:
    return -logprob


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.module.parameters()])


def update(model: Any, context: Any, batch: Batch, term: Term, **settings: Any) -> dict[str, tuple[float, float]]:
    config = Update(model="actor", view=term.view, terms=(term,), **settings)
    return UpdateInterface(config).train_step(model, [batch], context()).stats


def term(loss: Any = None, view: View = ROLLOUT, **settings: Any) -> Term:
    return Term(view=view, rows=settings.pop("rows", "rollout"), loss=loss or loss_function(negative)(), **settings)


def check_loss(model: Any, context: Any, batch: Batch, made: Term, expected: Any) -> dict[str, tuple[float, float]]:
    """Whether the gradient of an update is that of `expected(model)`, before clipping by the norm."""
    expected(model).backward()
    right = gradient(model)
    right = right * min(1.0, 1.0 / (float(right.norm()) + 1e-6))
    stats = update(model, context, batch, made)
    assert torch.allclose(gradient(model), right, atol=1e-12)
    return stats


def mean_over(model: Any, weights: list[list[float]], divisor: float, temperature: float = 1.0) -> Tensor:
    batch = rollouts()
    each = logprobs_of(model, batch.data["seq"], batch.data["prompt"], temperature)
    return -sum((x * torch.tensor(w)).sum() for x, w in zip(each, weights, strict=True)) / divisor


ONES = [[1.0] * 3, [1.0], [1.0] * 2, [1.0] * 4]


@pytest.mark.parametrize(
    ("reduction", "weights", "divisor"),
    [
        (TOKEN_MEAN, ONES, 10),
        (SEQUENCE_MEAN, [[1 / 3] * 3, [1.0], [1 / 2] * 2, [1 / 4] * 4], 4),
        (sequence_sum_over(8), [[1 / 8] * 3, [1 / 8], [1 / 8] * 2, [1 / 8] * 4], 4),
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
    check_loss(language_model(), context, batch, term(view=view), lambda model: mean_over(model, weight, 10))


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
    stats = update(model, context, batch, made, rollout_statistics=True)
    assert torch.allclose(gradient(model), right * min(1.0, 1.0 / (float(right.norm()) + 1e-6)), atol=1e-12)
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
        update(language_model(), context, rollouts(**columns), term(view=view if columns else ROLLOUT))
    assert sums == [[1]] * 4


def test_a_mini_batch_without_a_valid_sample_makes_no_step(language_model: Any, context: Any) -> None:
    batch = rollouts(valid=[torch.zeros(1)] * 4)
    model = language_model()
    model.after_step = lambda: pytest.fail("a step")
    stats = update(model, context, batch, term(view=View((*ROLLOUT.columns, ("valid", "valid")))))
    assert stats == {"actor_skipped_mini_batches": (1.0, 1.0)}


def test_a_mark_of_validity_per_token_is_refused(language_model: Any, context: Any) -> None:
    batch = rollouts(valid=[torch.ones(3), torch.ones(1), torch.ones(1), torch.ones(1)])
    view = View((*ROLLOUT.columns, ("valid", "valid")))
    with pytest.raises(InterfaceError, match=r"'valid' of sample 4 has the shape \[3\], must be \[1\]"):
        update(language_model(), context, batch, term(view=view))


def test_a_micro_batch_without_a_valid_sample(language_model: Any, context: Any) -> None:
    batch = rollouts(valid=[torch.tensor([v]) for v in (1.0, 1.0, 0.0, 0.0)])
    view = View((*ROLLOUT.columns, ("valid", "valid")))
    models = [language_model(), language_model()]
    for parts, model in zip((1, 2), models, strict=True):
        update(model, lambda parts=parts: context(micro_batches=parts), batch, term(view=view))
    assert torch.allclose(gradient(models[0]), gradient(models[1]), atol=1e-12)


def test_epochs_and_the_end_by_divergence(language_model: Any, context: Any) -> None:
    old = [x.detach() for x in logprobs_of(language_model(), rollouts().data["seq"], rollouts().data["prompt"])]
    batch, view = rollouts(logprob=old), View((*ROLLOUT.columns, ("logprob", "logprob")))
    counts = []
    for max_kl in (None, 0.0, 1e9):
        model, steps = language_model(), []
        model.after_step = lambda steps=steps: steps.append(1)
        stats = update(model, context, batch, term(view=view), epochs=3, max_kl=max_kl)
        counts.append(len(steps))
        assert ("actor_stopped_after" in stats) == (max_kl == 0.0)
    # In the first step's pass the policy is still that of the rollouts.
    assert counts == [3, 2, 3]


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
        terms = (term(), term(view=examples, rows="examples", coef=0.5))
        config = Update(model="actor", view=ROLLOUT, terms=terms)
        UpdateInterface(config).train_step(model, [batch], context(micro_batches=parts))
        assert torch.allclose(gradient(model), right * min(1.0, 1.0 / (float(right.norm()) + 1e-6)), atol=1e-12)
        assert len(steps) == 1


def test_a_second_loss_without_a_token_adds_nothing(language_model: Any, context: Any) -> None:
    """The mask of every text is zero."""
    tokens = [torch.tensor([1, 2, 3])] * 4
    masked = {"loss_mask": [torch.zeros(3, dtype=torch.int64)] * 4}
    batch = rollouts(tokens=tokens, prompt_length=[torch.tensor([1])] * 4, **masked)
    examples = View(tuple((key, key) for key in ("tokens", "prompt_length", "loss_mask")))
    model = language_model()
    mean_over(model, ONES, 10).backward()
    right = gradient(model)
    terms = (term(), term(view=examples, rows="examples", coef=0.5))
    UpdateInterface(Update(model="actor", view=ROLLOUT, terms=terms)).train_step(model, [batch], context())
    assert torch.allclose(gradient(model), right * min(1.0, 1.0 / (float(right.norm()) + 1e-6)), atol=1e-12)


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

    check_loss(language_model(), context, batch, term(view=view, rows="examples"), expected)


def pairs() -> tuple[Batch, View]:
    data = {
        "prompt": [torch.tensor([1]), torch.tensor([1, 2])],
        "chosen": [torch.tensor([1, 3, 4]), torch.tensor([1, 2, 5])],
        "rejected": [torch.tensor([1, 6]), torch.tensor([1, 2, 7, 7])],
        "margin": [torch.tensor([0.5]), torch.tensor([1.0])],
    }
    return Batch((8, 9), data), View(tuple((key, key) for key in data))


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


def test_pairs_of_a_reward_model_have_scores(scalar_model: Any, context: Any) -> None:
    batch, view = pairs()

    def expected(model: Any) -> Tensor:
        sides = [
            torch.stack([model.module(sequence[None])[0, -1, 0] for sequence in batch.data[side]])
            for side in ("chosen", "rejected")
        ]
        return preference(*sides, batch).mean()

    made = term(loss_function(preference)(), view, rows="pairs", is_scalar=True)
    check_loss(scalar_model(), context, batch, made, expected)


def test_values_learn(scalar_model: Any, context: Any) -> None:
    def squares(value: Tensor, batch: Batch) -> Tensor:
        return (value - 1) ** 2

    def expected(model: Any) -> Tensor:
        values = [model.module(seq[None])[0, len(p) - 1 : -1, 0] for seq, p in zip(*columns, strict=True)]
        return ((torch.cat(values) - 1) ** 2).mean()

    columns = rollouts().data["seq"], rollouts().data["prompt"]
    check_loss(scalar_model(), context, rollouts(), term(loss_function(squares)(), is_scalar=True), expected)


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


# --- Tensor functions.


def test_a_function_runs_once_with_columns_context_and_values(context: Any) -> None:
    runs = []

    def doubled(rollout: Columns, reward: list[Tensor], factor: float, context: Any) -> Any:
        runs.append((rollout.names, rollout.ids, context.step))
        return {"twice": [r * factor for r in reward]}, {"runs": (1.0, 1.0)}

    batch = rollouts(baseline_reward=[torch.tensor([float(i)]) for i in range(4)])
    scores = View((("reward", "baseline_reward"),))
    applied = Application(0, doubled, (ROLLOUT, ColumnOf(scores, "reward"), 2.0), ())
    view = View((*ROLLOUT.columns, ("baseline_reward", "baseline_reward")), applied)
    evaluation = Evaluation(batch, context(step=3), reports=(0,))
    data = evaluation.data(view)
    assert evaluation.data(View(view.columns, applied)) is data
    assert runs == [(("prompt", "seq"), (4, 5, 6, 7), 3)]
    assert [x.item() for x in data["twice"]] == [0.0, 2.0, 4.0, 6.0]
    assert list(data) == ["prompt", "seq", "baseline_reward", "twice"]
    assert evaluation.stats == {"runs": (1.0, 1.0)}
    silent = Evaluation(batch, context(), reports=())
    silent.data(view)
    assert silent.stats == {}


def test_a_function_that_gives_no_columns_is_named(context: Any) -> None:
    def nothing(rollout: Columns) -> None:
        return None

    view = View(ROLLOUT.columns, Application(0, nothing, (ROLLOUT,), ()))
    with pytest.raises(InterfaceError, match="the tensor function nothing returned a NoneType"):
        Evaluation(rollouts(), context(), ()).data(view)


# --- Generation and inference.


def test_generation_under_a_name(language_model: Any, context: Any, prompts: Batch) -> None:
    view, model = View((("prompt", "prompt"),)), language_model()
    made = []
    for name, prefix in (("", ""), ("second", "second_")):
        outputs = (("seq", f"{prefix}seq"), ("logprob", f"{prefix}logprob"))
        config = Generate(max_new_tokens=4, eos_token=-1, view=view, outputs=outputs, name=name)
        made.append(GenerateInterface(config).generate(model, prompts, context()).outputs)
    assert {"seq", "logprob"} <= made[0].keys()
    assert {"second_seq", "second_logprob"} <= made[1].keys()
    same = [torch.equal(a, b) for a, b in zip(made[0]["seq"], made[1]["second_seq"], strict=True)]
    assert not all(same)  # other random numbers


def test_logprobs_values_and_scores(language_model: Any, scalar_model: Any, context: Any) -> None:
    model, critic, batch = language_model(), scalar_model(), rollouts()
    config = Logprobs(view=ROLLOUT, outputs=(("ref_logprob", "other_ref_logprob"),), temperature=0.7)
    found = LogprobsInterface(config).inference(model, batch, context()).outputs["other_ref_logprob"]
    for x, y in zip(found, logprobs_of(model, batch.data["seq"], batch.data["prompt"], 0.7), strict=True):
        assert torch.allclose(x, y, atol=1e-12)
    values = ValuesInterface(Values(view=ROLLOUT, outputs=(("value", "value"),)))
    assert [len(x) for x in values.inference(critic, batch, context()).outputs["value"]] == [3, 1, 2, 4]
    score = ScoreInterface(Score(view=ROLLOUT, outputs=(("reward", "reward"),)))
    rewards = score.inference(critic, batch, context()).outputs["reward"]
    assert torch.allclose(rewards[0], critic.module(batch.data["seq"][0][None])[0, -1], atol=1e-12)


def test_logprobs_of_pairs(language_model: Any, context: Any) -> None:
    model, (batch, view) = language_model(), pairs()
    outputs = (("chosen_ref_logprob", "chosen_ref_logprob"), ("rejected_ref_logprob", "rejected_ref_logprob"))
    each = {side: logprobs_of(model, batch.data[side], batch.data["prompt"]) for side in ("chosen", "rejected")}
    for per_token in (False, True):
        config = Logprobs(view=view, outputs=outputs, rows="pairs", per_token=per_token)
        found = LogprobsInterface(config).inference(model, batch, context()).outputs
        for side, values in each.items():
            for x, y in zip(found[f"{side}_ref_logprob"], values, strict=True):
                assert torch.allclose(x, y if per_token else y.sum().view(1), atol=1e-12)


def test_a_method_of_ones_own(language_model: Any, context: Any) -> None:
    def surprise(model: Any, batch: Batch, context: Any, factor: float) -> CallResult:
        return CallResult(outputs={"surprise": [factor * seq.double().sum().view(1) for seq in batch.data["seq"]]})

    config = OwnMethod(view=ROLLOUT, outputs=(("surprise", "surprise"),), function=surprise, arguments=(2.0,))
    found = OwnMethodInterface(config).inference(language_model(), rollouts(), context())
    assert found.outputs["surprise"][1].item() == 2.0 * sum(PROMPTS[1] + ANSWERS[1])
