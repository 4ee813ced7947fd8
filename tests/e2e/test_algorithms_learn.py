"""Every ready experiment of rollouts learns: random weights write every seventh letter as a vowel, and soon most.

benchmarks/learning.py has what they reach on a task.
"""

import json
from pathlib import Path

import pytest

from realhf.data import sort_task
from realhf.experiments import ready_file
from tests.e2e.forked import quickly_finished

pytestmark = pytest.mark.distributed

REWARDS = '''
def vowels(response):
    """The share of letters that are vowels."""
    return sum(letter in "aeiou" for letter in response) / max(1, len(response))


def rare(response):
    """The share of letters from the end of the alphabet."""
    return sum(letter in "uvwxyz" for letter in response) / max(1, len(response))
'''
SIZES = {"hidden-size": 32, "intermediate-size": 48, "num-layers": 2, "num-heads": 4, "num-kv-heads": 4}
MODEL = [word for name, size in SIZES.items() for word in (f"--architecture.{name}", str(size))]
CRITIC = ("--critic.lr", "1e-2")
# By experiment: its hyperparameters' name and further options. By default the first one; the others are more of it.
EXPERIMENTS = {
    "grpo": ("grpo", ()),
    "rloo": ("rloo", ()),
    "reinforce++": ("reinforce", ()),
    "remax": ("remax", ()),
    "ppo": ("ppo", CRITIC),
    "ppo-ptx": ("ppo", (*CRITIC, "--examples.data", "{data}/sft.jsonl", "--ppo.ptx-coef", "0.01")),
    "safe-rlhf": ("safe", (*CRITIC, "--cost-critic.lr", "1e-2", "--cost", "{rewards}:rare", "--safe.kl-coef", "0")),
}


@pytest.mark.parametrize(
    "name", [name if name == "grpo" else pytest.param(name, marks=pytest.mark.slow) for name in EXPERIMENTS]
)
def test_it_learns(name: str, tmp_path: Path) -> None:
    data, rewards = sort_task.ensure(tmp_path / "data"), tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    files = ("--data", data / "prompts.jsonl", "--eval-data", data / "evaluation.jsonl", "--tokenizer", data)
    files = (*files, "--eval-temperature", "1")
    options, words = EXPERIMENTS[name]
    more = [word.format(data=data, rewards=rewards) for word in words]
    length = (f"--{options}.max-new-tokens", "6")
    size = ("--actor.lr", "1e-2", "--batch-size", "64", "--steps", "40", "--num-workers", "1", *MODEL)
    run = quickly_finished(
        tmp_path / "run", ready_file(name), *files, "--reward", f"{rewards}:vowels", *length, *size, *more
    )
    before, after = (json.loads(line) for line in (run.path / "evaluations.jsonl").read_text().splitlines())
    assert before["reward_vowels"] < 0.25
    assert after["reward_vowels"] > 0.7
