"""RLOO: each response is compared with the mean of the other responses to its prompt.

Needs: --model; --data with prompts; --reward FILE.py:FUNCTION, or --reward.model DIR for a reward model
"""

from realhf.algorithms.rloo.config import RLOO, rloo_advantages, rloo_loss
from realhf.api import Policy, Prompts, Reward, auto


@auto(batch_size=128, steps=200, mini_batches=2)
def rloo(
    prompts: Prompts,
    *,
    actor: Policy = Policy(lr=1e-6, warmup_steps=5),
    reference: Policy,
    reward: Reward,
    rloo: RLOO,
) -> None:
    rollout = actor.generate(prompts, rloo)
    scores = reward.score(rollout)
    ref_logprob = reference.logprobs(rollout)
    actor.update(rloo_advantages(rollout, scores, ref_logprob, rloo), rloo_loss(rloo))
