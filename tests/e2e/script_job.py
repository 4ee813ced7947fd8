"""PPO in ten lines; experiments/ppo.py is the same with its calls declared."""

from realhf.algorithms.ppo.config import PPOHyperparameters, ppo_advantages, ppo_policy, ppo_value
from realhf.api import Policy, Prompts, RewardModel, ValueModel, auto
from realhf.data import sort_task

SORTING = PPOHyperparameters(max_new_tokens=sort_task.MAX_NEW_TOKENS)


@auto(batch_size=128, steps=80, mini_batches=2)
def ppo(
    prompts: Prompts,
    *,
    actor: Policy = Policy(lr=1e-4, warmup_steps=5),
    critic: ValueModel = ValueModel(lr=3e-4, warmup_steps=5),
    reference: Policy,
    reward: RewardModel,
    ppo: PPOHyperparameters = SORTING,
) -> None:
    rollout = actor.generate(prompts, ppo)
    scores = reward.score(rollout)
    ref_logprob = reference.logprobs(rollout)
    values = critic.values(rollout)
    batch = ppo_advantages(rollout, scores, ref_logprob, values, ppo)
    actor.update(batch, ppo_policy(ppo))
    critic.update(batch, ppo_value(ppo))
