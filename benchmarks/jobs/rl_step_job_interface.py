"""The rule and GRPO on the workers, for `rl_step_job.py`."""

from collections.abc import Sequence

import torch
from rl_step_job import GROUP, GRPOActor, RuleReward
from torch import Tensor

from realhf.algorithms.functional import kl_k3, ppo_policy_loss
from realhf.algorithms.responses import response_logprobs, response_tokens, responses
from realhf.algorithms.statistics import add_stats, mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model, Stats
from realhf.parallel.vocabulary import Logits


class RuleRewardInterface:
    """See `RuleReward`."""

    def __init__(self, config: RuleReward):
        pass

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        rewards = [(response % 2 == 0).float().mean()[None] for response in responses(batch)]
        return CallResult(outputs={"reward": rewards}) if context.holds_outputs else CallResult()


class GRPOActorInterface:
    """See `GRPOActor`."""

    def __init__(self, config: GRPOActor):
        self._config = config

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        ids = [sample for batch in mini_batches for sample in batch.ids]
        rewards = torch.cat([reward for batch in mini_batches for reward in batch.data["reward"]])
        advantages = iter(group_advantages(context.in_order(ids, rewards))[ids].tolist())
        stats: list[Stats] = [{"reward_mean": mean_of(rewards)}]
        for batch in mini_batches:
            # A column has the device and the length of the responses.
            column = [torch.full_like(logprob, next(advantages)) for logprob in batch.data["logprob"]]
            with_advantage = batch.with_data(advantage=column)
            stats.append(model.train_step(with_advantage, "seq", self._loss, response_tokens, context.micro_batches))
        return CallResult(stats=add_stats(stats)) if context.holds_outputs else CallResult()

    def _loss(self, logits: Logits, batch: Batch) -> tuple[Tensor, Stats]:
        """`logits` [tokens, vocab]."""
        logprob = response_logprobs(logits, batch)  # [responses]
        old, reference = batch.packed("logprob").values, batch.packed("ref_logprob").values
        advantage = batch.packed("advantage").values
        loss, is_clipped = ppo_policy_loss(logprob, old, advantage, self._config.policy_clip)
        loss = loss + self._config.kl_coef * kl_k3(logprob, reference)
        return loss.sum(), {"clip_fraction": mean_of(is_clipped)}


def group_advantages(rewards: Tensor) -> Tensor:
    """(reward - mean) / standard deviation within each group: [batch], as `rewards` in the order of samples."""
    groups = rewards.unflatten(0, (-1, GROUP))
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()
