"""Names of TRL and verl are answered with the options that there are."""

import re
from dataclasses import dataclass

import pytest

from realhf import cli
from realhf.api.fields import flags_of
from realhf.base.errors import UserError
from realhf.experiments import ready_experiments
from realhf.lifecycle.other_names import OTHER_NAMES, answer_to, check_names
from realhf.rundir.run import load_experiment_class

READY = {
    one.name: load_experiment_class(str(one.path)) for one in ready_experiments() if one.name in ("grpo", "ppo", "dpo")
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_answers_name_options_that_there_are(name: str) -> None:
    """Of each name an algorithm has the setting, and what the answer calls an option is one of the command's."""
    of_command = {*cli.parser("run")._option_string_actions}
    answers = {algorithm: answer_to(name, flags_of(cls)) for algorithm, cls in READY.items()}
    assert {*answers.values()} != {"this experiment has no such setting"}
    for algorithm, answer in answers.items():
        known = of_command | {flag for flags in flags_of(READY[algorithm]).values() for flag in flags}
        assert {*re.findall(r"--[a-z][\w.-]*", answer)} <= known | {"--reward"}, algorithm
        assert "{" not in answer


@pytest.mark.parametrize(
    ("algorithm", "word", "said"),
    [
        ("ppo", "--learning_rate=1e-6", "--learning_rate: give --actor.lr and --critic.lr"),
        ("dpo", "--num-generations", "--num-generations: this experiment has no such setting"),
        ("ppo", "--epsilon", "--epsilon: give --ppo.policy-clip"),
        ("grpo", "--epsilon", "--epsilon: give --grpo.clip-low"),
        ("grpo", "data.max_response_length=64", "data.max_response_length: give --grpo.max-new-tokens"),
        ("grpo", "+actor_rollout_ref.model.path=x", "+actor_rollout_ref.model.path: give --model DIR"),
    ],
)
def test_the_answer_is_the_experiment_s(algorithm: str, word: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_names(READY[algorithm], ["--steps", "3", word, "1"])
    assert str(caught.value).endswith(f"other names here: {said}")


@dataclass(frozen=True, kw_only=True)
class Own:
    """An experiment with a field of such a name."""

    learning_rate: float = 0.1


def test_an_experiment_s_own_name_is_its_own() -> None:
    check_names(Own, ["--learning-rate", "1", "--learning_rate=1"])
    check_names(READY["grpo"], ["--actor.lr", "1e-6", "--reward", "lora.rank.py:lr=0.5", "--system", "learning-rate"])
