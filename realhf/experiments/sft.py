"""Supervised fine-tuning: a model learns the answers of examples.

Needs: --model; --data with prompts and responses, or chats
"""

from realhf.algorithms.sft.config import sft_loss
from realhf.api import Examples, Policy, auto


@auto(batch_size=64, steps=400)
def sft(examples: Examples, *, actor: Policy = Policy(lr=1e-5, warmup_steps=20, weight_decay=0.01)) -> None:
    actor.update(examples, sft_loss())
