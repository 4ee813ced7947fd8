"""Supervised fine-tuning as a script."""

from realhf.algorithms.sft.config import sft_loss
from realhf.api import Examples, Policy, auto


@auto(batch_size=32, steps=400)
def sft(examples: Examples, policy: Policy = Policy(lr=1e-3, warmup_steps=30, weight_decay=0.01)) -> None:
    policy.update(examples, sft_loss())
