"""DPO: preference pairs train the policy directly, without a reward model; also IPO, hinge and smoothed labels.

Needs: --model; --data with prompts, chosen and rejected answers
"""

from realhf.algorithms.dpo.config import DPO, dpo_loss, with_reference
from realhf.api import Pairs, Policy, auto


@auto(batch_size=64, steps=200)
def dpo(pairs: Pairs, *, actor: Policy = Policy(lr=5e-7, warmup_steps=10), reference: Policy, dpo: DPO) -> None:
    actor.update(with_reference(pairs, reference.logprobs(pairs)), dpo_loss(dpo))
