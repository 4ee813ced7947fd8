"""When rewards are told to teach nothing, and the remedies that are named."""

from pathlib import Path
from typing import Any

from realhf.master.uniform_rewards import PATIENCE, RewardWatch, remedies
from realhf.rundir.run import RunSpec

LONG = 100
UNIFORM, DIFFERENT = {"reward_mean": 0.5, "informative_groups": 0.0}, {"reward_mean": 0.5, "informative_groups": 0.25}


def told(*lines: dict[str, float], steps: int = LONG, is_told: bool = False) -> dict[int, str]:
    """The sentences by step, of a run of `steps` steps."""
    watch = RewardWatch(is_told=is_told)
    found = {step: watch.step({"step": step} | line, is_last=step == steps) for step, line in enumerate(lines, start=1)}
    return {step: text for step, text in found.items() if text}


def test_uniform_groups_are_told_once_after_some_steps_in_a_row() -> None:
    text = "in steps 1 to 5 all responses to a prompt had the same reward (reward_mean 0.5)"
    assert told(*[UNIFORM] * 20) == {PATIENCE: f"the rewards teach nothing: {text}"}
    assert told(*[UNIFORM] * 20, is_told=True) == {}
    now_and_then = [UNIFORM, UNIFORM, UNIFORM, UNIFORM, DIFFERENT]
    assert told(*now_and_then * 4) == {}
    assert list(told(*now_and_then, *[UNIFORM] * 9)) == [10]


def test_all_steps_of_a_short_run_are_enough() -> None:
    assert list(told(UNIFORM, UNIFORM, steps=2)) == [2]
    assert list(told(UNIFORM, steps=1)) == [1]
    assert told(DIFFERENT, UNIFORM, steps=2) == {}


def test_without_groups_the_mean_of_the_steps_counts() -> None:
    zero = {"reward_mean": 0.0, "reward_failures": 1.0}
    assert told(*[zero] * 9) == {
        5: "the rewards teach nothing: in steps 1 to 5 the mean reward was the same (reward_mean 0), and reward "
        "functions failed on 100% of the responses"
    }
    assert told({"reward_mean": 0.0}, steps=1) == {}, "one step has nothing to differ from"
    assert told(*({"reward_mean": i / 8} for i in range(20))) == {}
    assert list(told({"reward_mean": 0.5}, *[zero] * 9)) == [6]
    assert told(*[{"loss": 1.0}] * 9) == {}, "no rewards, as in fine-tuning"


def spec(**values: Any) -> RunSpec:
    return RunSpec(
        experiment_file="", experiment_class="", working_directory="", num_workers=1, devices_per_node=1, **values
    )


def test_remedies_name_the_command_and_the_option_of_this_run() -> None:
    of_groups = {"steps": 9, "ppo": {"samples_per_prompt": 1}, "grpo": {"samples_per_prompt": 8}}
    assert remedies(spec(values=of_groups), Path("runs/first"), is_zero=True) == (
        "`realhf status runs/first --samples` shows responses: does the reward find the answers in them? If so, take "
        "an easier task, or a model that does better, or larger groups (--grpo.samples-per-prompt)"
    )
    assert remedies(spec(values={}, samples=0), Path("runs/first"), is_zero=False) == (
        "a run with --samples 3 shows responses: does the reward find the answers in them? If so, take a task that "
        "is neither too hard nor too easy"
    )
