"""Safe-RLHF: the reward rises while the mean cost of responses is held under a limit, by a Lagrange multiplier.

Needs: --model; --data with prompts; --reward and --cost, each FILE.py:FUNCTION or a model, --reward.model DIR
"""

from realhf.algorithms.safe_rlhf.config import (
    SafeRLHF,
    judged,
    safe_advantages,
    safe_cost_value,
    safe_policy,
    safe_value,
)
from realhf.api import Policy, Prompts, Reward, ValueModel, auto


@auto(batch_size=128, steps=200, mini_batches=4)
def safe_rlhf(
    prompts: Prompts,
    *,
    actor: Policy = Policy(lr=1e-6, warmup_steps=5),
    critic: ValueModel = ValueModel(lr=5e-6, warmup_steps=5),
    cost_critic: ValueModel = ValueModel(lr=5e-6, warmup_steps=5),
    reference: Policy,
    reward: Reward,
    cost: Reward,
    safe: SafeRLHF,
) -> None:
    rollout = actor.generate(prompts, safe)
    of_reward = judged(reward.score(rollout), critic.values(rollout))
    of_cost = judged(cost.score(rollout), cost_critic.values(rollout))
    batch = safe_advantages(rollout, reference.logprobs(rollout), of_reward, of_cost, safe)
    actor.update(batch, safe_policy(safe))
    critic.update(batch, safe_value(safe))
    cost_critic.update(batch, safe_cost_value(safe))
