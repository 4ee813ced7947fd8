"""ReaL's API figure as an experiment: with what it leaves out, `interface_impl`, `steps` and `dataset`."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from realhf.algorithms.ppo.config import PPOHyperparameters, ppo_advantages, ppo_policy, ppo_value
from realhf.api import (
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    Generate,
    Logprobs,
    ModelFunctionCallDef,
    Score,
    Update,
    Values,
    auto,
    inputs,
)
from realhf.api.resolved import ResolvedExperiment
from realhf.dataflow.graph import DataflowGraph

KEYS = {"prompt": "prompts", "logprob": "logp", "ref_logprob": "ref_logp", "reward": "r", "value": "v"}


@auto(nodelist="com[01-08]", batch_size=512)
@dataclass(frozen=True, kw_only=True)
class PPOExperiment:
    seed: int = 1
    ppo: PPOHyperparameters = field(default_factory=lambda: PPOHyperparameters(max_new_tokens=1024, eos_token=2))
    steps: int = 100

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        rollout, step = inputs("seq", prompt="prompts"), inputs("seq", **KEYS)
        batch = ppo_advantages(step, step, step, step, self.ppo)
        return [
            ModelFunctionCallDef(
                model_name="actor",
                model_type="llama7b",
                interface_type=GENERATE,
                interface_impl=Generate.by(self.ppo, batch=inputs(prompt="prompts"), outputs=("seq", "logp")),
                input_data=["prompts"],
                output_data=["seq", "logp"],
            ),
            ModelFunctionCallDef(
                model_name="reward",
                model_type="llama7b-critic",
                interface_type=INFERENCE,
                interface_impl=Score(outputs=("r",)),
                input_data=["seq"],
                output_data=["r"],
            ),
            ModelFunctionCallDef(
                model_name="ref",
                model_type="llama7b",
                interface_type=INFERENCE,
                interface_impl=Logprobs(batch=rollout, outputs=("ref_logp",)),
                input_data=["prompts", "seq"],
                output_data=["ref_logp"],
            ),
            ModelFunctionCallDef(
                model_name="critic",
                model_type="llama7b-critic",
                interface_type=INFERENCE,
                interface_impl=Values(batch=rollout, outputs=("v",)),
                input_data=["prompts", "seq"],
                output_data=["v"],
            ),
            ModelFunctionCallDef(
                model_name="actor",
                model_type="llama7b",
                interface_type=TRAIN_STEP,
                interface_impl=Update(ppo_policy(self.ppo), batch=batch, prefix="actor"),
                input_data=["prompts", "seq", "logp", "ref_logp", "r", "v"],
                mini_batches=8,
            ),
            ModelFunctionCallDef(
                model_name="critic",
                model_type="llama7b-critic",
                interface_type=TRAIN_STEP,
                interface_impl=Update(ppo_value(self.ppo), batch=batch, prefix="critic", reports=()),
                input_data=["prompts", "seq", "logp", "ref_logp", "r", "v"],
                mini_batches=8,
            ),
        ]

    @property
    def dataset(self) -> Any:
        return SimpleNamespace(keys=("prompts",))


def test_the_figure_of_the_paper_is_an_experiment() -> None:
    experiment = PPOExperiment()
    models = ResolvedExperiment(experiment).setups
    trained = {name: setup.optimizer is not None for name, setup in models.items()}
    assert trained == {"actor": True, "reward": False, "ref": False, "critic": True}
    graph = DataflowGraph(experiment.rpcs, experiment.dataset.keys)
    assert list(graph.calls) == [
        *("actor_generate", "reward_inference", "ref_inference", "critic_inference"),
        *("actor_train_step", "critic_train_step"),
    ]
    for call in graph.calls.values():
        assert set(call.output_data) == set(call.interface_impl.output_data)  # type: ignore[attr-defined]
        assert set(call.interface_impl.batch.keys) <= set(call.input_data)  # type: ignore[attr-defined]
