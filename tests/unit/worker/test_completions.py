"""The completions that people see of a step: which samples, and their texts."""

from typing import Any

import pytest
import torch
from msgspec import json

from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult
from realhf.rewards.details import RewardDetails
from realhf.transport.messages import BatchKey, Completion
from realhf.worker.completions import MOST_CHARACTERS, completions, shown_samples
from tests.unit.api.calls import call, rule

STEP = BatchKey("train", 5)


class Rows:
    """Prompts of two tokens: the sample's id and 7. A text is its tokens with dots."""

    def samples(self, step: int) -> int:
        assert step == 5
        return 8

    def tokens(self, step: int, sample_ids: list[int]) -> list[dict[str, list[int]]]:
        assert step == 5
        return [{"prompt": [sample, 7]} for sample in sample_ids]

    def text(self, tokens: list[int]) -> str:
        return ".".join(map(str, tokens))


class RowsWithoutPrompts(Rows):
    def tokens(self, step: int, sample_ids: list[int]) -> list[dict[str, list[int]]]:
        return [{"tokens": [sample]} for sample in sample_ids]


def data(*samples: int) -> list[Batch]:
    """In two mini-batches."""
    halves = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    return [Batch(ids, {"seq": [torch.tensor([i, 7, 10 + i]) for i in ids]}) for ids in halves]


def rewards(*samples: int, **fields: Any) -> CallResult:
    return CallResult(outputs={"reward": [torch.tensor([sample / 2]) for sample in samples]}, **fields)


def test_rewards_of_tokens_are_shown_by_their_sum() -> None:
    """Other numbers than one, or one a token, are no reward of the response."""
    for given, shown in (([0.5], 0.5), ([0.5, 1.0], 1.5), ([0.5, 1.0, 1.0], None), ([], None)):
        result = CallResult(outputs={"reward": [torch.tensor(given)]})
        batch = [Batch((1,), {"seq": [torch.tensor([1, 7, 11, 12])]})]
        [found] = completions(RULE, STEP, batch, result, Rows(), None)
        assert found.reward == shown


def test_they_are_spread_over_the_batch_and_others_in_the_next_step() -> None:
    found = [shown_samples(BatchKey("train", step), 8, 3) for step in range(9)]
    assert found[:3] == [[0, 2, 4], [1, 3, 5], [2, 4, 6]]
    assert found[6] == [0, 2, 6]
    assert found[8] == found[0]
    assert {sample for samples in found for sample in samples} == set(range(8))
    assert shown_samples(STEP, 2, 3) == [0, 1], "no more than there are"


def test_evaluations_show_the_same_ones_each_time() -> None:
    assert shown_samples(BatchKey("evaluation", 0), 8, 2) == [0, 4]
    assert shown_samples(BatchKey("evaluation", 1), 8, 2) == []


RULE, MODEL = rule("judge", ["seq"], ["reward"]), call("judge", inputs=["seq"], outputs=["reward"])


@pytest.mark.parametrize("judge", [RULE, MODEL])
def test_each_rank_gives_the_texts_of_its_own(judge: object) -> None:
    samples = (7, 5, 3, 1)
    assert shown_samples(STEP, 8, 3) == [1, 5, 7]
    found = completions(judge, STEP, data(*samples), rewards(*samples), Rows(), 3)  # type: ignore[arg-type]
    assert found == (
        Completion(sample=7, prompt="7.7", response="17", reward=3.5),
        Completion(sample=5, prompt="5.7", response="15", reward=2.5),
        Completion(sample=1, prompt="1.7", response="11", reward=0.5),
    )


def test_other_calls_give_none() -> None:
    judge = rule("judge", ["seq"], ["reward"])
    assert completions(judge, STEP, data(1, 5), rewards(1, 5), Rows(), 0) == ()
    assert completions(judge, STEP, data(1, 5), CallResult(), Rows(), 3) == (), "a rank without outputs"
    assert completions(judge, STEP, data(1, 5), rewards(1, 5), RowsWithoutPrompts(), 3) == ()
    assert completions(rule("judge", ["x"], ["reward"]), STEP, data(1, 5), rewards(1, 5), Rows(), 3) == ()


def test_what_a_call_says_of_a_sample_comes_with_it() -> None:
    answer = "x" * 2 * MOST_CHARACTERS
    each = RewardDetails(rewards={"right": 1.0, "short": None}, columns={"answer": answer}, notes={"number": 42})
    result = rewards(1, 5, details={5: each})
    plain, detailed = completions(RULE, STEP, data(1, 5), result, Rows(), 3)
    assert (detailed.details.rewards, detailed.details.notes) == (each.rewards, each.notes)
    assert len(detailed.details.columns["answer"]) == MOST_CHARACTERS + 5
    assert json.encode(plain) == b'{"sample":1,"prompt":"1.7","response":"11","reward":0.5}', "no word of details"
    assert json.decode(json.encode(detailed), type=Completion) == detailed


def test_a_long_text_loses_its_middle() -> None:
    class LongRows(Rows):
        def text(self, tokens: list[int]) -> str:
            return "a" * MOST_CHARACTERS + "b" * MOST_CHARACTERS

    [found] = completions(rule("judge", ["seq"], ["reward"]), STEP, data(1), rewards(1), LongRows(), 3)
    assert found.response.startswith("aaa")
    assert "a ... b" in found.response
    assert len(found.response) == MOST_CHARACTERS + 5
