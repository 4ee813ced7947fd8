"""The reward of a script whose data are a task."""

from pathlib import Path
from typing import Any

import pytest

from realhf.api import (
    GenerationOptions,
    Policy,
    Prompts,
    Reward,
    UserError,
    auto,
)
from tests.unit.api.script.scripts import joined, some_loss
from tests.unit.data.tokenizers_of_families import write_qwen

GCD, SUMS, CODE = "reasoning-gym:gcd:size=8", "reasoning-gym:chain_sum:size=8", "human-eval"


def script(prompts: Prompts, actor: Policy, reward: Reward, options: GenerationOptions) -> None:
    rollout = actor.generate(prompts, options)
    actor.update(joined(rollout, reward.score(rollout)), some_loss)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    write_qwen(folder := tmp_path_factory.mktemp("tokenizer"))
    return str(folder / "tokenizer.json")


def rewards(data: str, held_out: str | tuple[str, ...], tokenizer: str, **options: Any) -> list[tuple[str, ...]]:
    """The functions of training and of each evaluation."""
    sets = (held_out,) if isinstance(held_out, str) else held_out
    fields = {"prompts": Prompts(data=data), "tokenizer": tokenizer, "eval_data": sets}
    made = auto(batch_size=8)(script)(**fields, options=GenerationOptions(max_new_tokens=4), reward=Reward(**options))
    evaluations = [made.evaluation] if isinstance(held_out, str) else made.evaluation.values()
    calls = [call for group in (made.rpcs, *(one.rpcs for one in evaluations)) for call in group]
    return [call.interface_impl.rewards for call in calls if hasattr(call.interface_impl, "rewards")]


def test_a_task_brings_its_reward_where_none_is_given(tokenizer: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n' * 8)
    of_task, of_code = ("ready:reasoning_gym",), ("ready:unit_tests(before='before')",)
    assert rewards(GCD, SUMS, tokenizer) == [of_task, of_task]
    assert rewards(GCD, CODE, tokenizer) == [of_task, of_code]
    assert rewards(GCD, (f"code={CODE}", SUMS), tokenizer) == [of_task, of_code, of_task], "each set its own"
    own = ("ready:numeric", "ready:exact_match=0.5")
    assert rewards(GCD, SUMS, tokenizer, functions=own) == [own, own]
    with pytest.raises(UserError, match=r"there is no reward; give .*; a task \(`realhf data --list`\) brings its own"):
        rewards(str(rows), SUMS, tokenizer)


def test_the_same_questions_are_no_evaluation(tokenizer: str) -> None:
    with pytest.raises(UserError, match="'gcd' has seed=0 in --data too"):
        rewards(GCD, "reasoning-gym:gcd:size=4", tokenizer)
    with pytest.raises(UserError, match="'gcd' has seed=0 in --data too"):
        rewards(GCD, (SUMS, "again=reasoning-gym:gcd:size=4"), tokenizer)
