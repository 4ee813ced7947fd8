"""Scripts: the calls that they become, and the line of what is wrong with them."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from realhf.api import (
    INFERENCE,
    Columns,
    Examples,
    GenerationOptions,
    Pairs,
    Policy,
    Prompts,
    Reward,
    RewardModel,
    UserError,
    ValueModel,
    auto,
    loss_function,
    model_method,
    tensor_function,
)
from realhf.api.script.config import SEQUENCES, Generate, Update
from realhf.data import sort_task
from realhf.dataflow.graph import DataflowGraph


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(GenerationOptions):
    max_new_tokens: int = 5
    clip: float = 0.2
    epochs: int = 1


@tensor_function
def joined(*columns: Columns) -> dict[str, Any]:
    return {}


@loss_function
def some_loss(logprob: Any, batch: Any) -> Any:
    return -logprob


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    sort_task.make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def experiment(data: Path) -> Any:
    """Makes the experiment of a script, with a tokenizer, and any file for each of its data."""

    def make(script: Any, **fields: Any) -> Any:
        made = auto(batch_size=8)(script)
        kinds = {name: value for name, value in vars(made()).items() if hasattr(value, "DATASET")}
        files = {name: type(value)(data=str(data / "rows.jsonl")) for name, value in kinds.items()}
        return made(tokenizer=str(data / "tokenizer.json"), **files, **fields)

    return make


def calls(experiment: Any) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """By name the inputs and outputs of the calls, in their order."""
    return {call.name: (call.input_data, call.output_data) for call in experiment.rpcs}


def line_of(text: str) -> str:
    """FILE:LINE of a piece of this file."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(text)]
    return f"{Path(__file__).name}:{number}: "


def test_ppo_becomes_the_six_calls(experiment: Any) -> None:
    def ppo(
        prompts: Prompts, actor: Policy, critic: ValueModel, reference: Policy, reward: RewardModel, hp: Hyperparameters
    ) -> None:
        rollout = actor.generate(prompts, hp)
        batch = joined(rollout, reward.score(rollout), reference.logprobs(rollout), critic.values(rollout))
        actor.update(batch, some_loss())
        critic.update(batch, some_loss())

    made = experiment(ppo, mini_batches=2)
    everything = ("prompt", "seq", "logprob", "reward", "ref_logprob", "value")
    assert calls(made) == {
        "actor_generate": (("prompt",), ("seq", "logprob")),
        "reward_inference": (("seq",), ("reward",)),
        "reference_inference": (("prompt", "seq"), ("ref_logprob",)),
        "critic_inference": (("prompt", "seq"), ("value",)),
        "actor_train_step": (everything, ()),
        "critic_train_step": (everything, ()),
    }
    assert [call.mini_batches for call in made.rpcs] == [1, 1, 1, 1, 2, 2]
    assert {name: setup.optimizer is not None for name, setup in made.models.items()} == {
        "actor": True,
        "critic": True,
        "reference": False,
        "reward": False,
    }
    graph = DataflowGraph(made.rpcs, ["prompt"])
    assert graph.models["critic"].head == graph.models["reward"].head == "scalar"
    assert graph.models["actor"].head == "lm"


def test_the_end_token_is_the_tokenizers(experiment: Any) -> None:
    def script(prompts: Prompts, actor: Policy, hp: Hyperparameters) -> None:
        actor.update(joined(actor.generate(prompts, hp)), some_loss())

    generate, _ = (call.interface_impl for call in experiment(script).rpcs)
    assert isinstance(generate, Generate)
    assert generate.eos_token == sort_task.EOS_TOKEN
    generate, _ = (call.interface_impl for call in experiment(script, hp=Hyperparameters(eos_token=-1)).rpcs)
    assert generate.eos_token == -1


def test_what_reads_a_rollout_is_told_how_it_was_drawn(experiment: Any, data: Path) -> None:
    def script(prompts: Prompts, actor: Policy, reward: Reward, hp: Hyperparameters) -> None:
        rollout = actor.generate(prompts, hp)
        actor.update(joined(reward.score(rollout), rollout), some_loss())

    hp = Hyperparameters(temperature=0.7, stop_strings=("#",), tokenizer=str(data / "tokenizer.json"))
    made = experiment(script, hp=hp, reward=Reward(functions=("r.py:f",), timeout_s=3.0, on_error="drop"))
    _, score, update = (call.interface_impl for call in made.rpcs)
    assert (score.eos_token, score.stop_strings) == (sort_task.EOS_TOKEN, ("#",))
    assert (score.timeout_s, score.on_error, score.tokenizer) == (3.0, "drop", made.tokenizer)
    assert update.terms[0].temperature == 0.7


def test_a_tensor_function_reports_its_statistics_once(experiment: Any) -> None:
    def script(prompts: Prompts, actor: Policy, critic: ValueModel, hp: Hyperparameters) -> None:
        batch = joined(actor.generate(prompts, hp))
        actor.update(batch, some_loss())
        critic.update(joined(batch), some_loss())

    *_, first, second = (call.interface_impl for call in experiment(script).rpcs)
    assert isinstance(first, Update)
    assert isinstance(second, Update)
    assert (first.reports, second.reports) == (("rollout", 0), (1,))


def test_a_second_generation_has_a_name_that_its_readers_take_over(experiment: Any) -> None:
    def remax(prompts: Prompts, actor: Policy, reward: RewardModel, hp: Hyperparameters) -> None:
        rollout = actor.generate(prompts, hp)
        baseline = actor.generate(prompts, Hyperparameters(temperature=0.0), name="baseline")
        actor.update(joined(rollout, reward.score(rollout), reward.score(baseline)), some_loss())

    assert calls(experiment(remax)) == {
        "actor_generate": (("prompt",), ("seq", "logprob")),
        "actor_generate_baseline": (("prompt",), ("baseline_seq", "baseline_logprob")),
        "reward_inference": (("seq",), ("reward",)),
        "reward_inference_baseline": (("baseline_seq",), ("baseline_reward",)),
        "actor_train_step": (("prompt", "seq", "logprob", "reward", "baseline_reward"), ()),
    }


def test_a_second_reward_model_has_its_name_in_the_key(experiment: Any) -> None:
    def safe(prompts: Prompts, actor: Policy, reward: RewardModel, cost: RewardModel, hp: Hyperparameters) -> None:
        rollout = actor.generate(prompts, hp)
        actor.update(joined(rollout, reward.score(rollout), cost.score(rollout)), some_loss())

    found = calls(experiment(safe))
    assert found["cost_inference"] == (("seq",), ("cost_reward",))
    assert found["actor_train_step"][0] == ("prompt", "seq", "logprob", "reward", "cost_reward")


def test_a_language_model_gets_a_new_head_where_its_values_are_trained(experiment: Any, tmp_path: Path) -> None:
    def critics(prompts: Prompts, actor: Policy, critic: ValueModel, reward: RewardModel, hp: Hyperparameters) -> None:
        rollout = actor.generate(prompts, hp)
        batch = joined(rollout, reward.score(rollout), critic.values(rollout))
        actor.update(batch, some_loss)
        critic.update(batch, some_loss)

    for head in ("lm", "scalar"):
        (tmp_path / head).mkdir()
        index = {"format": "x", "architecture": dataclasses.asdict(sort_task.SORT_MODEL.with_head(head))}
        (tmp_path / head / "index.json").write_text(json.dumps(index))
    language, judge = str(tmp_path / "lm"), str(tmp_path / "scalar")
    models = experiment(critics, model=language, reward=RewardModel(model=judge)).models
    assert {name: setup.new_head for name, setup in models.items()} == {
        "actor": False,
        "critic": True,
        "reward": False,
    }
    models = experiment(critics, model=language, critic=ValueModel(model=judge), reward=RewardModel(model=judge)).models
    assert not models["critic"].new_head
    with pytest.raises(UserError, match=r"the model 'reward' gives scores, and .*lm is a language model.*run reward"):
        _ = experiment(critics, model=language).models


def test_fine_tuning_and_pairs(experiment: Any) -> None:
    def sft(examples: Examples, policy: Policy) -> None:
        policy.update(examples, some_loss)

    (call,) = experiment(sft).rpcs
    assert (call.name, call.input_data) == ("policy_train_step", ("tokens", "prompt_length"))
    assert call.interface_impl.sequence_keys == SEQUENCES["examples"]

    def dpo(pairs: Pairs, actor: Policy, reference: Policy) -> None:
        actor.update(joined(pairs, reference.logprobs(pairs)), some_loss)

    inference, train = experiment(dpo).rpcs
    assert inference.input_data == ("prompt", "chosen", "rejected")
    assert inference.output_data == ("chosen_ref_logprob", "rejected_ref_logprob")
    assert train.input_data == ("prompt", "chosen", "rejected", "chosen_ref_logprob", "rejected_ref_logprob")
    assert train.interface_impl.sequence_keys == ("chosen", "rejected")


def test_a_method_of_ones_own(experiment: Any) -> None:
    class Mine(Policy):
        surprise = model_method(INFERENCE, outputs=["surprise"], function=f"{__name__}:joined")

    def script(prompts: Prompts, actor: Mine, hp: Hyperparameters) -> None:
        rollout = actor.generate(prompts, hp)
        actor.update(joined(rollout, actor.surprise(rollout, 3)), some_loss)

    assert calls(experiment(script))["actor_inference"] == (("prompt", "seq", "logprob"), ("surprise",))


def test_hyperparameters_set_epochs_and_reduction(experiment: Any) -> None:
    @dataclass(frozen=True)
    class Settings:
        epochs: int = 3
        reduction: str = "sequence_mean"

    @loss_function
    def loss(logprob: Any, batch: Any, settings: Settings) -> Any:
        return logprob

    def script(examples: Examples, policy: Policy, settings: Settings) -> None:
        policy.update(examples, loss(settings))

    (call,) = experiment(script).rpcs
    assert call.interface_impl.epochs == 3
    assert call.interface_impl.terms[0].loss.reduction.kind == "sequence_mean"


def test_options_have_the_names_of_the_parameters(data: Path, tmp_path: Path) -> None:
    from realhf.lifecycle.request import experiment_of

    script = tmp_path / "mine.py"
    script.write_text(
        "from realhf.api import *\n"
        "loss = loss_function('realhf.algorithms.functional:kl_k1')\n"
        "@auto(batch_size=8, steps=7)\n"
        "def mine(examples: Examples, model: Policy = Policy(lr=1e-3)):\n"
        "    model.update(examples, loss)\n"
    )
    words = ["--data", "x.jsonl", "--model.lr", "2e-3", "--model.compute.recomputation", "full"]
    with pytest.raises(UserError, match="parameter 'model' has the name of a field"):
        experiment_of(str(script), words)
    script.write_text(script.read_text().replace("model: Policy", "policy: Policy").replace("model.up", "policy.up"))
    made = experiment_of(str(script), [word.replace("--model", "--policy") for word in words]).source
    assert (made.examples.data, made.policy.lr, made.policy.compute.recomputation) == ("x.jsonl", 2e-3, "full")
    assert (made.steps, made.batch_size) == (7, 8)


def test_the_options_of_data_reach_the_data_set(data: Path, tmp_path: Path) -> None:
    from realhf.lifecycle.request import experiment_of

    script = tmp_path / "mine.py"
    script.write_text(
        "from realhf.api import *\n"
        "loss = loss_function('realhf.algorithms.functional:kl_k1')\n"
        "@auto(batch_size=8)\n"
        "def mine(examples: Examples, policy: Policy):\n"
        "    policy.update(examples, loss)\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"q": "ab", "a": "b"}\n{"q": "abcdef", "a": "b"}\n')
    words = ["--data", str(tmp_path / "rows.jsonl"), "--tokenizer", str(data / "tokenizer.json")]
    words += ["--prompt-field", "q", "--response-field", "a", "--max-prompt-tokens", "4", "--too-long", "drop"]
    found = experiment_of(str(script), words).dataset
    assert (found.check().rows, found.check().dropped, found.lengths()["tokens"]) == (1, 1, (5.0, 5, 25.0))
    assert experiment_of(str(script), [*words, "--loss-on", "all"]).calls[0].input_data[-1] == "loss_mask"


def test_the_text_of_a_script_imports_no_torch(data: Path) -> None:
    file = Path(__file__).parents[3] / "e2e/script_job.py"
    code = (
        "import sys; from realhf.lifecycle.request import experiment_of; "
        f"made = experiment_of({str(file)!r}, ['--data', 'x', '--tokenizer', {str(data / 'tokenizer.json')!r}]); "
        "assert len(made.calls) == 6; assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env={"PYTHONPATH": str(root)}, check=False)
    assert done.returncode == 0


# --- What a script cannot do: by test the piece of text that the message points to, and the message.


def wrong(experiment: Any, script: Any) -> str:
    with pytest.raises(UserError) as caught:
        _ = experiment(script).rpcs
    return str(caught.value)


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
    with pytest.raises(UserError, match="in a script alone"):
        Policy().update(Columns((), {}), some_loss)


# --- Evaluation.


def held_out(experiment: Any, script: Any, data: Path, **fields: Any) -> Any:
    (data / "held_out.jsonl").write_text('{"prompt": "ab>", "answer": "ab", "chosen": "ab", "rejected": "b"}\n' * 6)
    return experiment(script, eval_data=(str(data / "held_out.jsonl"),), **fields).evaluation


def test_rollouts_are_evaluated_by_their_rewards(experiment: Any, data: Path) -> None:
    def ppo(prompts: Prompts, actor: Policy, critic: ValueModel, reward: RewardModel, hp: Hyperparameters) -> None:
        rollout = actor.generate(prompts, hp)
        batch = joined(rollout, reward.score(rollout), critic.values(rollout))
        actor.update(batch, some_loss)
        critic.update(batch, some_loss)

    hp = Hyperparameters(samples_per_prompt=4)
    found = held_out(experiment, ppo, data, hp=hp, eval_every_steps=5)
    assert [call.name for call in found.rpcs] == ["actor_generate", "reward_inference"]
    generate, score = (call.interface_impl for call in found.rpcs)
    assert (generate.samples_per_prompt, generate.temperature) == (1, 0.0)
    assert score.statistics == ("reward_mean",)
    assert (found.batch_size, found.every_steps) == (8, 5), "that of training"
    drawn = held_out(experiment, ppo, data, hp=hp, eval_temperature=0.7, eval_batch_size=3)
    assert (drawn.rpcs[0].interface_impl.temperature, drawn.batch_size) == (0.7, 3)


def test_an_evaluation_without_rows_or_in_batches_of_none_is_refused(experiment: Any, data: Path) -> None:
    def sft(examples: Examples, policy: Policy) -> None:
        policy.update(examples, some_loss)

    with pytest.raises(UserError, match="--eval-every-steps 5 evaluates held-out rows, and there are none; give --eva"):
        experiment(sft, eval_every_steps=5)
    with pytest.raises(UserError, match="--eval-batch-size -1 is not from 0"):
        held_out(experiment, sft, data, eval_batch_size=-1)


def test_examples_and_pairs_are_evaluated_by_their_losses(experiment: Any, data: Path) -> None:
    def sft(examples: Examples, policy: Policy) -> None:
        policy.update(examples, some_loss)

    (call,) = held_out(experiment, sft, data).rpcs
    assert (call.name, call.interface_type) == ("policy_inference", INFERENCE)

    def dpo(pairs: Pairs, actor: Policy, reference: Policy) -> None:
        actor.update(joined(pairs, reference.logprobs(pairs)), some_loss)

    assert [call.name for call in held_out(experiment, dpo, data).rpcs] == ["reference_inference", "actor_inference"]


def test_the_loss_of_an_update_is_a_call_of_its_own(experiment: Any, data: Path) -> None:
    """The tensor function gives its statistics in both calls: those of the loss alone have names of their own."""

    def script(
        prompts: Prompts, texts: Examples, actor: Policy, critic: ValueModel, reward: RewardModel, hp: Hyperparameters
    ) -> None:
        rollout = actor.generate(prompts, hp)
        batch = joined(rollout, reward.score(rollout))
        actor.compute_loss(batch, some_loss(hp))
        actor.compute_loss(texts, some_loss, name="texts")
        critic.compute_loss(batch, some_loss)
        reward.compute_loss(rollout, some_loss)
        actor.update(batch, some_loss)

    made = experiment(script)
    of = {call.name: call for call in made.rpcs}
    first, texts = of["actor_inference"], of["actor_inference_texts"]
    assert (first.input_data, first.output_data) == (("prompt", "seq", "logprob", "reward"), ())
    assert texts.input_data == ("tokens", "prompt_length")
    assert not first.trains
    config = first.interface_impl
    assert (config.prefix, config.name, config.reports, config.rows) == ("actor", "computed", None, "rollout")
    assert (texts.interface_impl.name, texts.interface_impl.rows) == ("texts", "examples")
    assert texts.interface_impl.sequence_keys == ("tokens",)
    assert of["critic_inference"].config.head == "scalar"
    assert of["reward_compute_loss"].interface_impl.name == "computed"
    assert of["actor_train_step"].interface_impl.reports == ("rollout", 0)
    assert made.models["critic"].optimizer is None
    # As of an update: an evaluation draws one response a prompt, and measures no loss of it.
    assert "actor_inference" not in {call.name for call in held_out(experiment, script, data).rpcs}

    def probe(examples: Examples, policy: Policy) -> None:
        policy.compute_loss(examples, some_loss)
        policy.update(examples, some_loss)

    losses = [call.interface_impl.name for call in held_out(experiment, probe, data).rpcs]
    assert losses == ["computed", ""]


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


def test_a_reward_model_scores_every_token(experiment: Any, tmp_path: Path) -> None:
    index = {"format": "x", "architecture": dataclasses.asdict(sort_task.SORT_MODEL.with_head("scalar"))}
    (tmp_path / "index.json").write_text(json.dumps(index))

    def script(prompts: Prompts, actor: Policy, hp: Hyperparameters, reward: Reward) -> None:
        rollout = actor.generate(prompts, hp)
        actor.update(joined(rollout, reward.score(rollout)), some_loss)

    for per_token, reads in ((False, ("seq",)), (True, ("prompt", "seq"))):
        (score,) = (
            call
            for call in experiment(script, reward=Reward(model=str(tmp_path), per_token=per_token)).rpcs
            if call.model_name == "reward"
        )
        assert (score.input_data, score.interface_impl.per_token) == (reads, per_token)
    with pytest.raises(
        UserError, match=r"per_token=True is for a reward model, and the reward has .* \(r.py:f\); leave"
    ):
        Reward(functions=("r.py:f",), per_token=True)


def test_pairs_are_not_mixed_with_other_rows(experiment: Any, data: Path) -> None:
    def mixed(pairs: Pairs, texts: Examples, actor: Policy) -> None:
        actor.update(pairs, some_loss, also=[(texts, some_loss, 0.5)])

    with pytest.raises(
        UserError, match=r"test_scripts\.py:[0-9]+: actor\.update has several losses, one of them on pairs"
    ):
        _ = experiment(mixed).rpcs


def test_what_needs_other_data_is_not_evaluated(experiment: Any, data: Path) -> None:
    def ptx(prompts: Prompts, texts: Examples, actor: Policy, reward: RewardModel, hp: Hyperparameters) -> None:
        rollout = actor.generate(prompts, hp)
        batch = joined(rollout, reward.score(rollout))
        actor.update(batch, some_loss, also=[(texts, some_loss, 0.5)])

    assert [call.name for call in held_out(experiment, ptx, data).rpcs] == ["actor_generate", "reward_inference"]
    (train,) = (call for call in experiment(ptx).rpcs if call.trains)
    assert train.input_data == ("prompt", "seq", "logprob", "reward", "tokens", "prompt_length")
    assert train.interface_impl.sequence_keys == ("seq", "tokens")
