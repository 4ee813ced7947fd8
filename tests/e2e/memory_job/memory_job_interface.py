"""GRPO on the workers, for `memory_job.py`."""

from collections.abc import Sequence

import torch
from memory_job import GRPOActor
from torch import Tensor

from realhf.algorithms.functional import kl_k3, ppo_policy_loss
from realhf.algorithms.responses import response_logprobs, response_tokens, responses
from realhf.algorithms.statistics import add_stats, mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model, Stats
from realhf.parallel.vocabulary import Logits


class GRPOActorInterface:
    """See `GRPOActor`."""

    def __init__(self, config: GRPOActor):
        self._config = config

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        stats: list[Stats] = []
        for batch in mini_batches:
            rewards = torch.stack([_reward(response) for response in responses(batch)])
            advantages = group_advantages(context.in_order(batch.ids, rewards), context)[list(batch.ids)]
            per_token = [a.expand(len(logprob)) for a, logprob in zip(advantages, batch.data["logprob"], strict=True)]
            batch = batch.with_data(advantage=per_token)
            stats.append(model.train_step(batch, "seq", self._loss, response_tokens, context.micro_batches))
            stats.append({"reward_mean": mean_of(rewards)})
        return CallResult(stats=add_stats(stats)) if context.holds_outputs else CallResult()

    def _loss(self, logits: Logits, batch: Batch) -> tuple[Tensor, Stats]:
        """`logits` [tokens, vocab]."""
        logprob = response_logprobs(logits, batch)  # [responses]
        old, reference = batch.packed("logprob").values, batch.packed("ref_logprob").values
        advantage = batch.packed("advantage").values
        loss, is_clipped = ppo_policy_loss(logprob, old, advantage, self._config.policy_clip)
        loss = loss + self._config.kl_coef * kl_k3(logprob, reference)
        return loss.sum(), {"clip_fraction": mean_of(is_clipped)}


def group_advantages(rewards: Tensor, context: Context) -> Tensor:
    """(reward - mean) / standard deviation, of the responses to one prompt: [batch] float32 from [batch] float64."""
    groups = rewards.view(-1, context.samples_per_prompt)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, correction=0, keepdim=True) + 1e-6)
    return advantages.flatten().float()


def _reward(response: Tensor) -> Tensor:
    """The share of even ids in the response."""
    return (response % 2 == 0).double().mean()
