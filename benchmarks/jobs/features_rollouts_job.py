"""GRPO steps of any size on a model without a critic, so that generation and training are most of a step: for
`benchmarks/features.py`."""

from dataclasses import dataclass

from rl_step_job import BATCH, RLStepJob

from realhf.api import auto


@auto(batch_size=BATCH)
@dataclass(frozen=True, kw_only=True)
class FeaturesRolloutsJob(RLStepJob):
    """`rollout.max_new_tokens` is the length of every response."""

    batch_size: int = BATCH
