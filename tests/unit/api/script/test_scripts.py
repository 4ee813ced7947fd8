"""Scripts: the calls that they become."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from realhf.api import (
    INFERENCE,
    Examples,
    Pairs,
    Policy,
    Prompts,
    Reward,
    RewardModel,
    UserError,
    ValueModel,
    loss_function,
    model_method,
)
from realhf.api.script.config import SEQUENCES, Generate, Update
from realhf.data import sort_task
from realhf.dataflow.graph import DataflowGraph
from tests.unit.api.script.scripts import Hyperparameters, calls, held_out, joined, some_loss


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
