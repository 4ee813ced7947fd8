"""PPO-ptx: PPO whose policy also learns examples, so that it forgets less of what it could do before.

Needs: --model; --data with prompts; --examples.data with prompts and responses; --reward as for ppo
"""

from realhf.algorithms.ppo.config import PPOPtx, ppo_advantages, ppo_policy, ppo_value
from realhf.algorithms.sft.config import sft_loss
from realhf.api import Examples, Policy, Prompts, Reward, ValueModel, auto


@auto(batch_size=128, steps=200, mini_batches=4)
def ppo_ptx(
    prompts: Prompts,
    examples: Examples,
    *,
    actor: Policy = Policy(lr=1e-6, warmup_steps=5),
    critic: ValueModel = ValueModel(lr=5e-6, warmup_steps=5),
    reference: Policy,
    reward: Reward,
    ppo: PPOPtx,
) -> None:
    rollout = actor.generate(prompts, ppo)
    scores = reward.score(rollout)
    ref_logprob = reference.logprobs(rollout)
    values = critic.values(rollout)
    batch = ppo_advantages(rollout, scores, ref_logprob, values, ppo)
    actor.update(batch, ppo_policy(ppo), also=[(examples, sft_loss(), ppo.ptx_coef)])
    critic.update(batch, ppo_value(ppo))
