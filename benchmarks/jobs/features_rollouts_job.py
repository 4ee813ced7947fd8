"""GRPO steps of any size on a model without a critic, so that generation and training are most of a step: for
`benchmarks/features.py`."""

from dataclasses import dataclass, replace

from rl_step_job import BATCH, GROUP, MINI_BATCHES, RLStepJob

from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.api import ModelFunctionCallDef, auto


@auto(batch_size=BATCH)
@dataclass(frozen=True, kw_only=True)
class FeaturesRolloutsJob(RLStepJob):
    """`rollout.max_new_tokens` is the length of every response, and `group` the number of responses to a prompt."""

    batch_size: int = BATCH
    group: int = GROUP
    mini_batches: int = MINI_BATCHES

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        *others, training = super().rpcs
        return [*others, replace(training, mini_batches=self.mini_batches)]

    @property
    def _options(self) -> PPOHyperparameters:
        return replace(self.rollout, samples_per_prompt=self.group)
