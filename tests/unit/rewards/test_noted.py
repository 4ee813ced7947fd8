"""What reward functions of TRL's form get besides samples, and what becomes of what they log."""

import contextlib
import inspect
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trl import GRPOTrainer

from realhf.rewards.messages import Failed, Value, Work
from realhf.rewards.noted import Noted
from realhf.rewards.pool import FunctionOptions, RewardPool
from realhf.rewards.signature import recognise
from realhf.rewards.values import BadValueError
from tests.unit.rewards.conftest import Served
from tests.unit.rewards.samples import of, sample


def test_the_names_of_trl_s_trainer() -> None:
    """They are what TRL's own trainer gives, by its code."""
    code = inspect.getsource(GRPOTrainer._calculate_rewards)
    for name in ("trainer_state", "log_extra", "log_metric"):
        assert f'reward_kwargs["{name}"] = ' in code
    assert [*Noted(of("a")).arguments] == ["trainer_state", "log_extra", "log_metric"]
    for name, ours in (("_log_completion_extra", Noted.log_extra), ("_log_metric", Noted.log_metric)):
        theirs = getattr(GRPOTrainer, name)
        assert [*inspect.signature(theirs).parameters] == [*inspect.signature(ours).parameters]


def test_a_function_gets_what_it_names() -> None:
    def state(completions: Any, trainer_state: Any) -> Any: ...
    def rest(prompts: Any, completions: Any, **kwargs: Any) -> Any: ...
    def column(response: str, log_metric: Any = 7) -> Any: ...

    noted = Noted([sample(step=3, steps=20)])
    found = recognise(state, "f").arguments(noted.samples, noted.arguments)
    assert found.keys() == {"completions", "trainer_state"}
    assert (found["trainer_state"].global_step, found["trainer_state"].max_steps) == (3, 20)
    with pytest.raises(AttributeError, match="no 'epoch'; use these two"):
        _ = found["trainer_state"].epoch
    found = recognise(rest, "f").arguments(noted.samples, noted.arguments)
    assert found.keys() == {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    assert recognise(column, "f").arguments(noted.samples, noted.arguments) == {"response": "4"}, "not of TRL's form"
    assert recognise(state, "f").missing([]) == [], "no column of the data is asked for"


def test_values_reach_the_samples_of_their_call(serve: Callable[..., Served]) -> None:
    def reward(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
        if "x" in completions:
            raise KeyError("x")
        log_metric("mean", 2)
        log_metric("mean", np.float32(0.5))
        log_extra("upper", [one.upper() for one in completions])
        log_extra("code", np.array([ord(one) for one in completions]))
        return [1.0] * len(completions)

    served = serve(reward)
    served.server._score(Work(3, 0, of("ab")), range(2))
    both = served.said()
    assert [(type(one), one.value, one.metrics) for one in both] == [(Value, 1.0, {"mean": 1.25})] * 2
    assert [one.extra for one in both] == [{"upper": "A", "code": 97}, {"upper": "B", "code": 98}]
    served.server._score(Work(4, 0, of("ax")), range(2))  # the batch raises, then each is scored alone
    one, failed = served.said()
    assert (one.extra, one.metrics) == ({"upper": "A", "code": 97}, {"mean": 1.25})
    assert isinstance(failed, Failed)


def test_what_cannot_be_logged() -> None:
    noted = Noted(of("ab"))
    for name, words in (
        ("", "printable name"), ("a\n", "printable name"), (3, "printable name"), ("x" * 65, "of at most 64"),
    ):  # fmt: skip
        for log, value in ((noted.log_metric, 1.0), (noted.log_extra, [1, 2])):
            with pytest.raises(ValueError, match=words):
                log(name, value)  # type: ignore[arg-type,operator]
    with pytest.raises(ValueError, match="names with reward_ are of the rewards"):
        noted.log_metric("reward_total", 1.0)
    for column in ("sample", "prompt", "response", "reward", "reward_total"):
        with pytest.raises(ValueError, match=rf"log_extra\('{column}', ...\): tables of samples have columns"):
            noted.log_extra(column, [1, 2])
    with pytest.raises(ValueError, match="must be finite"):
        noted.log_metric("a", math.nan)
    with pytest.raises(BadValueError, match=r"'high' \(str\)"):
        noted.log_metric("a", "high")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 1 values for 2 samples"):
        noted.log_extra("a", [1])
    for i in range(16):
        noted.log_extra(str(i), [i, i])
    noted.log_extra("0", [7, 8])
    with pytest.raises(ValueError, match="16 columns already"):
        noted.log_extra("16", [1, 2])
    assert noted.metrics == {}
    assert noted.extra(1) == {"0": 8, **{str(i): i for i in range(1, 16)}}


def test_values_have_a_form_in_json() -> None:
    noted = Noted(of("a"))
    values = {"none": None, "true": True, "large": 2**64, "nan": math.nan, "list": [1], "text": "x" * 3000}
    for column, value in values.items():
        noted.log_extra(column, [value])
    text = f"{'x' * 2000}..."
    expected = {"none": None, "true": True, "large": str(2**64), "nan": "nan", "list": "[1]", "text": text}
    assert noted.extra(0) == expected


LOGGING = """
def first(completions, trainer_state, log_metric, log_extra, **kwargs):
    log_metric("share of b", sum(one == "b" for one in completions) / len(completions))
    log_metric("step", trainer_state.global_step)
    log_extra("text", completions)
    return [1.0] * len(completions)

async def second(completions, log_metric, log_extra, **kwargs):
    log_metric("share of b", 1.0)
    log_extra("length", [len(one) for one in completions])
    return [0.5] * len(completions)

def wrong(completions, log_extra, **kwargs):
    log_extra("text", [])
    return [1.0] * len(completions)
"""


def test_calls_count_by_their_samples(tmp_path: Path) -> None:
    """In batches of 4 and 1 the mean is that of the samples, not of the calls."""
    (tmp_path / "logging_rewards.py").write_text(LOGGING)
    names = [f"{tmp_path}/logging_rewards.py:{name}" for name in ("first", "second", "wrong")]
    options = FunctionOptions(batch_samples=4, processes=2, on_error="zero")
    with contextlib.closing(RewardPool(names, options, io.BytesIO())) as pool:
        scores = pool.score(of("abaab"))
    sums = [sum(score.metrics["share of b"][i] for score in scores) for i in (0, 1)]
    assert sums == [2 + 5, 10], "two of five are b, and the second function logs 1 for all"
    assert [score.metrics["step"] for score in scores] == [(2, 1)] * 5
    assert [score.extra for score in scores] == [{"text": one, "length": 1} for one in "abaab"]
    reason = "got 0 values for 1 samples; give one each\n  | logging_rewards.py:14"
    assert reason in scores[0].failures["wrong"].text
