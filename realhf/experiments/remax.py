"""ReMax: the reward of the most likely response to a prompt is the baseline of the one that was drawn.

Needs: --model; --data with prompts; --reward FILE.py:FUNCTION, or --reward.model DIR for a reward model
"""

from realhf.algorithms.remax.config import ReMax, remax_advantages, remax_loss
from realhf.api import Policy, Prompts, Reward, auto


@auto(batch_size=128, steps=200, mini_batches=2)
def remax(
    prompts: Prompts,
    *,
    actor: Policy = Policy(lr=1e-6, warmup_steps=5),
    reference: Policy,
    reward: Reward,
    remax: ReMax,
) -> None:
    rollout = actor.generate(prompts, remax)
    likeliest = actor.generate(prompts, remax.greedy, name="greedy")
    scores, baseline = reward.score(rollout), reward.score(likeliest, name="greedy")
    ref_logprob = reference.logprobs(rollout)
    actor.update(remax_advantages(rollout, scores, baseline, ref_logprob, remax), remax_loss(remax))
