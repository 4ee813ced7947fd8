"""REINFORCE++: one response a prompt, the token's divergence in the reward, advantages normalised over the batch.

Needs: --model; --data with prompts; --reward FILE.py:FUNCTION, or --reward.model DIR for a reward model
"""

from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus, reinforce_pp_advantages, reinforce_pp_loss
from realhf.api import Policy, Prompts, Reward, auto


@auto(batch_size=128, steps=200, mini_batches=2)
def reinforce_plus_plus(
    prompts: Prompts,
    *,
    actor: Policy = Policy(lr=1e-6, warmup_steps=5),
    reference: Policy,
    reward: Reward,
    reinforce: ReinforcePlusPlus,
) -> None:
    rollout = actor.generate(prompts, reinforce)
    scores = reward.score(rollout)
    ref_logprob = reference.logprobs(rollout)
    batch = reinforce_pp_advantages(rollout, scores, ref_logprob, reinforce)
    actor.update(batch, reinforce_pp_loss(reinforce))
