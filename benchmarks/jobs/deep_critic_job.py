"""PPO with a critic deeper than the actor, so that its training outlasts the actor's."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from realhf.api import ModelFunctionCallDef, auto
from realhf.rundir.run import load_experiment_class

PPOExperiment: Any = load_experiment_class(Path(__file__).parents[2] / "experiments/ppo.py")


@auto(batch_size=128)
@dataclass(frozen=True, kw_only=True)
class DeepCriticJob(PPOExperiment):
    critic_layers: int = 8
    evaluate: bool = False

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        calls: list[ModelFunctionCallDef] = super().rpcs
        return [
            replace(call, model_type=replace(call.config, num_layers=self.critic_layers))
            if call.model_name == "critic"
            else call
            for call in calls
        ]
