"""GRPO: the responses to a prompt are compared with each other, without a critic; also Dr. GRPO, DAPO and GSPO.

Needs: --model; --data with prompts; --reward FILE.py:FUNCTION, or --reward.model DIR for a reward model
"""

from realhf.algorithms.grpo.config import GRPO, group_advantages, grpo_loss
from realhf.api import Policy, Prompts, Reward, auto


@auto(batch_size=128, steps=200, mini_batches=2)
def grpo(
    prompts: Prompts,
    *,
    actor: Policy = Policy(lr=1e-6, warmup_steps=5),
    reference: Policy,
    reward: Reward,
    grpo: GRPO,
) -> None:
    rollout = actor.generate(prompts, grpo)
    scores = reward.score(rollout)
    ref_logprob = reference.logprobs(rollout) if grpo.beta else None
    actor.update(group_advantages(rollout, scores, ref_logprob, grpo), grpo_loss(grpo))
