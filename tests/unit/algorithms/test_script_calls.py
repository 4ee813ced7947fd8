"""The calls of scripts that make rollouts, and their functions, on the workers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.algorithms.script.evaluate import Evaluation, split_stats
from realhf.algorithms.script.own_method import OwnMethodInterface
from realhf.algorithms.script.rollouts import GenerateInterface, LogprobsInterface, ScoreInterface, ValuesInterface
from realhf.algorithms.script.rows import divided
from realhf.algorithms.script.update import MeasureInterface, UpdateInterface
from realhf.api import Columns, GenerationOptions, inputs, loss_function
from realhf.api.script.config import Generate, Logprobs, Measure, OwnMethod, Score, Update, Values
from realhf.api.script.views import Application, ColumnOf, View
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, GenerationOutput, GenerationRequest
from realhf.engine.returned import InterfaceError
from tests.unit.algorithms.script_rollouts import (
    ANSWERS,
    PROMPTS,
    ROLLOUT,
    logprobs_of,
    pairs,
    rollouts,
    term,
    update_of,
)


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


def test_a_function_whose_numbers_are_not_finite_is_named(context: Any) -> None:
    def broken(rollout: Columns) -> Any:
        return {"advantage": [torch.tensor([float("nan") if i == 2 else 0.0]) for i in range(4)]}

    view = View(ROLLOUT.columns, Application(0, broken, (ROLLOUT,), ()))
    with pytest.raises(InterfaceError, match=r"broken: column 'advantage', sample 6, has nan at \[0\]"):
        Evaluation(rollouts(), context(), ()).data(view)


def test_a_first_generation_has_the_random_numbers_of_the_seed(
    language_model: Any, context: Any, prompts: Batch
) -> None:
    config = Generate(max_new_tokens=4, eos_token=-1)
    made = GenerateInterface(config).generate(language_model(), prompts, context(seed=5)).outputs
    request = GenerationRequest(GenerationOptions(max_new_tokens=4, eos_token=-1), sample_key=(5, 0))
    plain = language_model().generate(prompts, request)
    assert all(torch.equal(a, b) for a, b in zip(made["seq"], plain.sequences, strict=True))
    assert set(made) == {"seq", "logprob", "drawn_logprob", "margin"}  # logits are kept on demand alone
    silent = context(holds_outputs=False)
    assert GenerateInterface(config).generate(language_model(), prompts, silent).outputs == {}


@pytest.mark.parametrize(
    ("given", "planned", "room"), [(None, None, None), (64, None, 64), (None, 32, 32), (64, 32, 64)]
)
def test_a_generation_has_the_room_of_its_options_or_of_the_plan(
    context: Any, prompts: Batch, given: int | None, planned: int | None, room: int | None
) -> None:
    """Where there is one, it tells how many sequences lost their place."""

    class Asked:
        def generate(self, batch: Batch, request: GenerationRequest) -> GenerationOutput:
            assert request.room == room
            return GenerationOutput(preemptions=3)

    config = Generate(max_new_tokens=4, eos_token=-1, kv_cache_tokens=given)
    result = GenerateInterface(config).generate(Asked(), prompts, context(kv_cache_tokens=planned))  # type: ignore
    assert result.stats.get("preemptions") == (None if room is None else (3.0, 1.0))


def test_generation_takes_its_prompts_from_the_column_of_its_view(
    language_model: Any, context: Any, prompts: Batch
) -> None:
    config = Generate(max_new_tokens=4, eos_token=-1, batch=inputs(prompt="question"), outputs=("seq", "l"))
    others = prompts.with_data(question=prompts.data["prompt"], prompt=[torch.tensor([1])] * len(prompts))
    made = GenerateInterface(config).generate(language_model(), others, context()).outputs
    assert set(made) == {"seq", "l", "drawn_logprob", "margin"}
    for sequence, prompt, logprob in zip(made["seq"], prompts.data["prompt"], made["l"], strict=True):
        assert torch.equal(sequence[: len(prompt)], prompt)
        assert len(sequence) == len(prompt) + 4 == len(prompt) + len(logprob)


def test_ranks_that_hold_no_outputs_give_none(language_model: Any, scalar_model: Any, context: Any) -> None:
    silent, batch = context(holds_outputs=False), rollouts()
    both, view = pairs()
    for result in (
        LogprobsInterface(Logprobs(batch=ROLLOUT, outputs=("x",))).inference(language_model(), batch, silent),
        LogprobsInterface(Logprobs(batch=view, rows="pairs")).inference(language_model(), both, silent),
        ValuesInterface(Values(batch=ROLLOUT, outputs=("x",))).inference(scalar_model(), batch, silent),
        ScoreInterface(Score(batch=ROLLOUT, outputs=("x",), statistics=("x",))).inference(
            scalar_model(), batch, silent
        ),
        UpdateInterface(update_of(term())).train_step(language_model(), [batch], silent),
    ):
        assert (result.outputs, result.stats) == ({}, {})


def test_the_statistic_of_scores(scalar_model: Any, context: Any) -> None:
    model = scalar_model()
    score = ScoreInterface(Score(batch=ROLLOUT, outputs=("cost",), statistics=("cost_mean", "cost_square")))
    result = score.inference(model, rollouts(), context(micro_batches=2))
    assert set(result.outputs) == {"cost"}
    costs = torch.cat(result.outputs["cost"])
    assert result.stats["cost_mean"] == pytest.approx((float(costs.sum()), 4.0))
    assert result.stats["cost_square"] == pytest.approx((float(costs.square().sum()), 4.0))
    each = ScoreInterface(Score(batch=ROLLOUT, per_token=True, statistics=("mean",)))
    result = each.inference(model, rollouts(), context(micro_batches=2))
    assert [len(x) for x in result.outputs["reward"]] == [3, 1, 2, 4]
    assert [x[-1:].tolist() for x in result.outputs["reward"]] == costs[:, None].tolist(), "the last is the response's"
    assert result.stats == {"mean": pytest.approx((float(torch.cat(result.outputs["reward"]).sum()), 4.0))}
    plain = ScoreInterface(Score(batch=ROLLOUT))
    assert plain.inference(model, rollouts(), context()).stats == {}


def test_generation_under_a_name(language_model: Any, context: Any, prompts: Batch) -> None:
    view, model = View((("prompt", "prompt"),)), language_model()
    made = []
    for name, prefix in (("", ""), ("second", "second_")):
        outputs = (f"{prefix}seq", f"{prefix}logprob")
        config = Generate(max_new_tokens=4, eos_token=-1, batch=view, outputs=outputs, name=name)
        made.append(GenerateInterface(config).generate(model, prompts, context()).outputs)
    assert {"seq", "logprob"} <= made[0].keys()
    assert {"second_seq", "second_logprob"} <= made[1].keys()
    same = [torch.equal(a, b) for a, b in zip(made[0]["seq"], made[1]["second_seq"], strict=True)]
    assert not all(same)  # other random numbers


def test_logprobs_values_and_scores(language_model: Any, scalar_model: Any, context: Any) -> None:
    model, critic, batch = language_model(), scalar_model(), rollouts()
    config = Logprobs(batch=ROLLOUT, outputs=("other_ref_logprob",), temperature=0.7)
    found = LogprobsInterface(config).inference(model, batch, context()).outputs["other_ref_logprob"]
    for x, y in zip(found, logprobs_of(model, batch.data["seq"], batch.data["prompt"], 0.7), strict=True):
        assert torch.allclose(x, y, atol=1e-12)
    values = ValuesInterface(Values(batch=ROLLOUT))
    assert [len(x) for x in values.inference(critic, batch, context()).outputs["value"]] == [3, 1, 2, 4]
    score = ScoreInterface(Score(batch=ROLLOUT))
    rewards = score.inference(critic, batch, context()).outputs["reward"]
    assert torch.allclose(rewards[0], critic.module(batch.data["seq"][0][None])[0, -1], atol=1e-12)


def test_logprobs_of_pairs(language_model: Any, context: Any) -> None:
    model, (batch, view) = language_model(), pairs()
    each = {side: logprobs_of(model, batch.data[side], batch.data["prompt"]) for side in ("chosen", "rejected")}
    for per_token in (False, True):
        config = Logprobs(batch=view, rows="pairs", per_token=per_token)
        found = LogprobsInterface(config).inference(model, batch, context()).outputs
        for side, values in each.items():
            for x, y in zip(found[f"{side}_ref_logprob"], values, strict=True):
                assert torch.allclose(x, y if per_token else y.sum().view(1), atol=1e-12)


def test_a_method_of_ones_own(language_model: Any, context: Any) -> None:
    def surprise(model: Any, batch: Batch, context: Any, factor: float) -> CallResult:
        return CallResult(outputs={"surprise": [factor * seq.double().sum().view(1) for seq in batch.data["seq"]]})

    config = OwnMethod(batch=ROLLOUT, outputs=("surprise",), makes=("surprise",), function=surprise, arguments=(2.0,))
    for method in (OwnMethodInterface(config).inference, OwnMethodInterface(config).generate):
        found = method(language_model(), rollouts(), context())
        assert found.outputs["surprise"][1].item() == 2.0 * sum(PROMPTS[1] + ANSWERS[1])


def test_a_method_of_ones_own_that_trains_gets_mini_batches(language_model: Any, context: Any) -> None:
    def train(model: Any, mini_batches: list[Batch], context: Any, *, factor: float) -> Any:
        assert [batch.ids for batch in mini_batches] == [(4,), (5, 6, 7)]
        return CallResult(stats={"factor": (factor, 1.0)})

    def nothing(*given: Any) -> None:
        return None

    config = OwnMethod(batch=ROLLOUT, function=train, keywords=(("factor", 3.0),))
    mini_batches = divided(rollouts(), [1, 3])
    assert OwnMethodInterface(config).train_step(language_model(), mini_batches, context()).stats["factor"] == (3.0, 1)
    with pytest.raises(InterfaceError, match="nothing returned a NoneType, must be a CallResult"):
        OwnMethodInterface(OwnMethod(batch=ROLLOUT, function=nothing)).inference(None, rollouts(), context())


def marked(rollout: Columns, context: Any) -> Any:
    """A tensor function that needs the context, and whose statistics are the context's step."""
    return {"mark": [torch.full((1,), float(context.step))] * len(rollout)}, {"marks": (float(context.step), 1.0)}


def takes_marks(model: Any, batch: Any, context: Any) -> CallResult:
    batches = [batch] if isinstance(batch, Batch) else batch
    return CallResult(stats={"own": (sum(x.item() for part in batches for x in part.data["mark"]), 1.0)})


@pytest.mark.parametrize("name", ["logprobs", "values", "score", "generate", "infer", "train", "update", "measure"])
def test_calls_evaluate_their_functions_and_give_the_statistics_of_those_they_report(
    language_model: Any, scalar_model: Any, context: Any, name: str
) -> None:
    view = View(ROLLOUT.columns, Application(7, marked, (ROLLOUT,), ()))

    def loss(logprob: Tensor, batch: Batch) -> Any:
        return -logprob, {"own": (sum(x.item() for x in batch.data["mark"]), 1.0)}

    def stats(reports: tuple[int, ...], **surroundings: Any) -> Any:
        given: dict[str, Any] = {"batch": view, "reports": reports}
        model, batch, now = language_model(), rollouts(), context(step=3, **surroundings)
        bound = loss_function(loss)()
        match name:
            case "logprobs":
                return LogprobsInterface(Logprobs(**given, outputs=("x",))).inference(model, batch, now)
            case "values":
                return ValuesInterface(Values(**given, outputs=("x",))).inference(scalar_model(), batch, now)
            case "score":
                return ScoreInterface(Score(**given, outputs=("x",))).inference(scalar_model(), batch, now)
            case "generate":
                return OwnMethodInterface(OwnMethod(**given, function=takes_marks)).generate(model, batch, now)
            case "infer":
                return OwnMethodInterface(OwnMethod(**given, function=takes_marks)).inference(model, batch, now)
            case "train":
                method = OwnMethodInterface(OwnMethod(**given, function=takes_marks)).train_step
                return method(model, divided(batch, [1, 3]), now)
            case "update":
                return UpdateInterface(Update(bound, **given)).train_step(model, [batch], now)
        return MeasureInterface(Measure(bound, **given)).inference(model, batch, now)

    found = stats((7,)).stats
    assert found["marks"] == (3.0, 1.0)
    assert found.get("own", (12.0, 1.0)) == (12.0, 1.0)
    assert "marks" not in stats((6,)).stats
    if name not in ("generate", "infer", "train"):  # a method of one's own says itself what it gives
        silent = stats((7,), holds_outputs=False)
        assert (silent.outputs, silent.stats) == ({}, {})


def test_pairs_give_the_statistics_that_they_report(language_model: Any, context: Any) -> None:
    batch, view = pairs()
    view = View(view.columns, Application(7, marked, (view,), ()))
    outputs = ("a", "b")
    made = LogprobsInterface(Logprobs(batch=view, reports=(7,), outputs=outputs, rows="pairs")).inference(
        language_model(), batch, context(step=2, micro_batches=2)
    )
    assert made.stats == {"marks": (2.0, 1.0)}
    assert set(made.outputs) == {"a", "b"}


def test_what_a_function_gives_beside_its_columns(context: Any) -> None:
    """Two columns without statistics are no pair; three things are not columns and statistics."""

    def two(rollout: Columns) -> Any:
        return {"one": [torch.ones(1)] * 4, "two": [torch.zeros(1)] * 4}

    def three(rollout: Columns) -> Any:
        return two(rollout), {}, {}

    def data(function: Any) -> Any:
        return Evaluation(rollouts(), context(), (0,)).data(View((), Application(0, function, (ROLLOUT,), ())))

    assert set(data(two)) == {"prompt", "seq", "one", "two"}
    with pytest.raises(InterfaceError, match="the tensor function three returned a tuple, must be a dict of columns"):
        data(three)
    assert split_stats(({"a": 1}, {"b": (1.0, 2.0)})) == ({"a": 1}, {"b": (1.0, 2.0)})
    assert split_stats([1, 2]) == ([1, 2], {})


def test_functions_get_keywords_and_the_columns_of_others(context: Any) -> None:
    """A function's columns go into another's, which adds its own to those of its views."""

    def first(rollout: Columns) -> Any:
        return {"length": [torch.tensor([float(len(seq))]) for seq in rollout.seq]}, {"first": (1.0, 1.0)}

    def second(other: Columns, *, scale: float, lengths: list[Tensor]) -> Any:
        assert other.names == ("prompt", "seq", "length")
        return {"scaled": [scale * x for x in lengths]}, {"second": (1.0, 2.0)}

    inner = View(ROLLOUT.columns, Application(0, first, (ROLLOUT,), ()))
    applied = Application(1, second, (inner,), (("scale", 2.0), ("lengths", ColumnOf(inner, "length"))))
    evaluation = Evaluation(rollouts(), context(), (0, 1))
    batch = evaluation.batch(View(inner.columns, applied))
    assert (batch.ids, batch.together, list(batch.data)) == ((4, 5, 6, 7), 1, ["prompt", "seq", "length", "scaled"])
    assert [x.item() for x in batch.data["scaled"]] == [10.0, 8.0, 8.0, 10.0]
    assert evaluation.stats == {"first": (1.0, 1.0), "second": (1.0, 2.0)}
    both = Evaluation(Batch((4, 5, 6, 7), rollouts().data, together=2), context(), ())
    assert both.batch(ROLLOUT).together == 2
    columns = both.columns(View((("answer", "seq"),)))
    assert (columns.names, columns.ids) == (("answer",), (4, 5, 6, 7))


def test_columns_of_own_methods_go_to_their_keys(language_model: Any, context: Any) -> None:
    def two(model: Any, batch: Batch, context: Any) -> CallResult:
        return CallResult(outputs={"a": [torch.ones(1)] * 4, "b": [torch.zeros(1)] * 4})

    config = OwnMethod(batch=ROLLOUT, outputs=("first_a",), makes=("a",), function=two)
    found = OwnMethodInterface(config).inference(language_model(), rollouts(), context())
    assert {key: value[0].item() for key, value in found.outputs.items()} == {"first_a": 1.0, "b": 0.0}
