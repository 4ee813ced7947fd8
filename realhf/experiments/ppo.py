"""PPO: a critic judges every token, and a reference holds the policy near its start.

Needs: --model; --data with prompts; --reward FILE.py:FUNCTION, or --reward.model DIR for a reward model
"""

from realhf.algorithms.ppo.config import PPOHyperparameters, ppo_advantages, ppo_policy, ppo_value
from realhf.api import Policy, Prompts, Reward, ValueModel, auto


@auto(batch_size=128, steps=200, mini_batches=4)
def ppo(
    prompts: Prompts,
    *,
    actor: Policy = Policy(lr=1e-6, warmup_steps=5),
    critic: ValueModel = ValueModel(lr=5e-6, warmup_steps=5),
    reference: Policy,
    reward: Reward,
    ppo: PPOHyperparameters,
) -> None:
    rollout = actor.generate(prompts, ppo)
    scores = reward.score(rollout)
    ref_logprob = reference.logprobs(rollout)
    values = critic.values(rollout)
    batch = ppo_advantages(rollout, scores, ref_logprob, values, ppo)
    actor.update(batch, ppo_policy(ppo))
    critic.update(batch, ppo_value(ppo))
