"""What a script cannot do: by test the piece of text that the message points to, and the message."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from realhf.api import (
    Columns,
    Examples,
    Pairs,
    Policy,
    Prompts,
    RewardModel,
    UserError,
    loss_function,
    tensor_function,
)
from tests.unit.api.script.scripts import Hyperparameters, joined, some_loss, wrong


def line_of(text: str) -> str:
    """FILE:LINE of a piece of this file."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(text)]
    return f"{Path(__file__).name}:{number}: "


def test_control_flow_by_data(experiment: Any) -> None:
    def of_method(prompts: Prompts, actor: Policy, reward: RewardModel, hp: Hyperparameters) -> None:
        scores = reward.score(actor.generate(prompts, hp))
        if scores.mean() > 0:  # (1)
            actor.update(scores, some_loss)

    text = wrong(experiment, of_method)
    assert line_of("# (1)") in text
    assert "no column 'mean'; its columns are reward" in text

    def of_column(prompts: Prompts, actor: Policy, reward: RewardModel, hp: Hyperparameters) -> None:
        scores = reward.score(actor.generate(prompts, hp))
        if scores.reward > 0:  # (2)
            actor.update(scores, some_loss)

    text = wrong(experiment, of_column)
    assert line_of("# (2)") in text
    assert "a comparison of column 'reward' of reward.score" in text
    assert "tensor function" in text


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (bool, "the truth"),
        (float, "the number"),
        (int, "the number"),
        (len, "the length"),
        (list, "the iteration"),
        (lambda x: x[0], "an element"),
        (lambda x: x + 1, "the arithmetic"),
        (lambda x: 2 * x, "the arithmetic"),
        (lambda x: x == x, "a comparison"),
        (lambda x: "seq" in x, "the content"),
    ],
)
def test_values_are_not_known(experiment: Any, use: Any, what: str) -> None:
    for name in ("", "seq"):

        def script(prompts: Prompts, actor: Policy, hp: Hyperparameters) -> None:
            rollout = actor.generate(prompts, hp)
            use(getattr(rollout, name) if name else rollout)  # noqa: B023

        text = wrong(experiment, script)
        assert f"{what} of " in text
        assert Path(__file__).name in text.partition(": ")[0]


def test_a_name_that_is_taken(experiment: Any) -> None:
    def script(prompts: Prompts, actor: Policy, hp: Hyperparameters) -> None:
        first = actor.generate(prompts, hp)  # (3)
        second = actor.generate(prompts, hp)  # (4)
        actor.update(joined(first, second), some_loss)

    text = wrong(experiment, script)
    assert line_of("# (4)") in text
    assert f"first at {Path(__file__)}" in text
    assert "name='second'" in text


def test_a_call_after_the_training_of_its_model(experiment: Any) -> None:
    def script(prompts: Prompts, actor: Policy, hp: Hyperparameters) -> None:
        actor.update(actor.generate(prompts, hp), some_loss)
        actor.generate(prompts, hp, name="later")  # (5)

    text = wrong(experiment, script)
    assert line_of("# (5)") in text
    assert "actor.generate comes after actor.update" in text


def test_what_nobody_uses(experiment: Any) -> None:
    def idle_model(examples: Examples, policy: Policy, other: Policy) -> None:
        policy.update(examples, some_loss)

    assert "idle_model: the model 'other' is in no call" in wrong(experiment, idle_model)

    def idle_function(examples: Examples, policy: Policy) -> None:
        joined(examples)  # (6)
        policy.update(examples, some_loss)

    text = wrong(experiment, idle_function)
    assert line_of("# (6)") in text
    assert "nothing reads the result of joined" in text

    def idle_data(examples: Examples, prompts: Prompts, policy: Policy) -> None:
        policy.update(examples, some_loss)

    assert "nothing reads the data 'prompts'" in wrong(experiment, idle_data)

    def no_training(prompts: Prompts, actor: Policy, hp: Hyperparameters) -> None:
        actor.generate(prompts, hp)

    assert "no_training trains no model" in wrong(experiment, no_training)


def test_arguments_of_the_wrong_kind(experiment: Any) -> None:
    def prompts_alone(prompts: Prompts, actor: Policy) -> None:
        actor.update(prompts, some_loss)  # (7)

    text = wrong(experiment, prompts_alone)
    assert line_of("# (7)") in text
    assert "actor.update reads the column 'seq', and the data 'prompts' (of the parameters) has prompt" in text

    def a_model(prompts: Prompts, actor: Policy) -> None:
        actor.update(actor, some_loss)  # (8)

    assert line_of("# (8)") in wrong(experiment, a_model)

    def no_loss(examples: Examples, policy: Policy) -> None:
        policy.update(examples, 3)  # (9)

    text = wrong(experiment, no_loss)
    assert line_of("# (9)") in text
    assert "needs a loss, and was given a int" in text

    def no_options(prompts: Prompts, actor: Policy) -> None:
        actor.generate(prompts, 3)  # (10)

    assert "needs GenerationOptions" in wrong(experiment, no_options)

    def columns_in_loss(examples: Examples, policy: Policy) -> None:
        policy.update(examples, some_loss(examples.tokens))  # (11)

    text = wrong(experiment, columns_in_loss)
    assert line_of("# (11)") in text
    assert "reads columns from the batch" in text


def test_an_error_in_the_script_has_its_line(experiment: Any) -> None:
    def script(examples: Examples, policy: Policy) -> None:
        policy.learn(examples)  # (12)

    text = wrong(experiment, script)
    assert line_of("# (12)") in text
    assert "AttributeError" in text


def test_a_function_that_is_not_there(experiment: Any) -> None:
    missing = tensor_function("realhf.algorithms.functional:absent")

    def script(examples: Examples, policy: Policy) -> None:
        policy.update(missing(examples), some_loss)  # (13)

    text = wrong(experiment, script)
    assert line_of("# (13)") in text
    assert "has no function 'absent'" in text
    nowhere = loss_function("no_such_module:loss")

    def other(examples: Examples, policy: Policy) -> None:
        policy.update(examples, nowhere)  # (14)

    text = wrong(experiment, other)
    assert line_of("# (14)") in text
    assert "no module 'no_such_module'" in text


def test_a_function_that_is_not_there_is_reported_where_it_is_used(experiment: Any, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("helpers", tmp_path / "helpers.py")
    assert spec
    assert spec.loader
    (tmp_path / "helpers.py").write_text(
        "from realhf.api import *\n"
        "def train(policy, examples):\n"
        "    policy.update(examples, loss_function('realhf.algorithms.functional:absent'))\n"
        "def changed(examples):\n"
        "    return tensor_function('realhf.algorithms.functional:absent')(examples)\n"
    )
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)

    def script(examples: Examples, policy: Policy) -> None:
        helpers.train(policy, examples)

    assert wrong(experiment, script).startswith(f"{tmp_path}/helpers.py:3: 'realhf.algorithms.functional:absent': ")

    def other(examples: Examples, policy: Policy) -> None:
        policy.update(helpers.changed(examples), some_loss)

    assert wrong(experiment, other).startswith(f"{tmp_path}/helpers.py:5: 'realhf.algorithms.functional:absent': ")


@pytest.mark.parametrize(
    ("annotation", "message"),
    [("", "has no annotation"), (": int", "has the annotation <class 'int'>"), (": Nothing", "cannot be read")],
)
def test_parameters_that_a_script_cannot_have(tmp_path: Path, annotation: str, message: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "from __future__ import annotations\nfrom realhf.api import *\n\n"
        f"@auto(batch_size=8)\ndef mine(examples: Examples, model_{annotation}):\n    pass\n"
    )
    spec = importlib.util.spec_from_file_location("bad", file)
    assert spec
    assert spec.loader
    with pytest.raises(UserError, match=message):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_tensor_function_is_a_function_outside_a_script() -> None:
    assert joined(Columns((0, 1), {"x": [1, 2]})) == {}


def test_columns() -> None:
    columns = Columns((3, 4), {"reward": ["a", "b"]})
    assert (len(columns), columns.ids, columns.reward, columns.get("valid")) == (2, (3, 4), ["a", "b"], None)
    assert "reward" in columns
    with pytest.raises(AttributeError, match="no column 'value'; the columns are reward"):
        _ = columns.value


def test_a_policy_outside_a_script() -> None:
    with pytest.raises(UserError, match="in a script, a function under @auto"):
        Policy().update(Columns((), {}), some_loss)


def test_what_compute_loss_refuses(experiment: Any) -> None:
    def late(examples: Examples, policy: Policy) -> None:
        policy.update(examples, some_loss)
        policy.compute_loss(examples, some_loss)  # (20)

    text = wrong(experiment, late)
    assert line_of("# (20)") in text
    assert "policy.compute_loss comes after policy.update" in text

    def twice(examples: Examples, policy: Policy) -> None:
        policy.compute_loss(examples, some_loss)
        policy.compute_loss(examples, some_loss)  # (21)
        policy.update(examples, some_loss)

    text = wrong(experiment, twice)
    assert line_of("# (21)") in text
    assert "gives statistics that begin with 'computed', and those of policy_inference do too; give one of" in text

    def no_loss(examples: Examples, policy: Policy) -> None:
        policy.compute_loss(examples, 3)

    assert (
        "policy.compute_loss needs a loss, and was given a int; mark one with loss_function and call it with its "
        in (wrong(experiment, no_loss))
    )

    def no_rollout(prompts: Prompts, actor: Policy) -> None:
        actor.compute_loss(prompts, some_loss)

    assert "actor.compute_loss reads the column 'seq'" in wrong(experiment, no_rollout)

    def no_columns(examples: Examples, policy: Policy) -> None:
        policy.compute_loss(policy, some_loss)

    assert "policy.compute_loss reads columns of the step, and was given" in wrong(experiment, no_columns)

    def alone(prompts: Prompts, actor: Policy, hp: Hyperparameters) -> None:
        actor.compute_loss(joined(actor.generate(prompts, hp)), some_loss)

    assert "trains no model; call update" in wrong(experiment, alone)


def test_pairs_are_not_mixed_with_other_rows(experiment: Any, data: Path) -> None:
    def mixed(pairs: Pairs, texts: Examples, actor: Policy) -> None:
        actor.update(pairs, some_loss, also=[(texts, some_loss, 0.5)])

    with pytest.raises(
        UserError, match=r"test_refused_scripts\.py:[0-9]+: actor\.update has several losses, one of them on pairs"
    ):
        _ = experiment(mixed).rpcs
