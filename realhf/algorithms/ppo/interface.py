"""The calls of PPO on the actor, the reference and the critic."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.algorithms.functional import (
    clipped_value_loss,
    kl_k1,
    ppo_policy_loss,
)
from realhf.algorithms.ppo.advantages import add_advantages
from realhf.algorithms.ppo.config import PPOActor, PPOCritic, PPOReference
from realhf.algorithms.responses import by_sample, response_logprobs, response_tokens, response_values
from realhf.algorithms.rollout.interface import generate
from realhf.algorithms.statistics import add_stats, mean_of, prefixed
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model, Stats
from realhf.parallel.vocabulary import Logits


class PPOActorInterface:
    """See `PPOActor`."""

    def __init__(self, config: PPOActor):
        self.ppo = config.ppo

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        out = generate(model, batch, context, self.ppo)
        if not context.holds_outputs:
            return CallResult()
        # Training computes log-probabilities of the untruncated distribution: the ratio is that of like with like.
        logprobs = out.untruncated_logprobs
        outputs = {"seq": out.sequences, "logprob": logprobs, "margin": out.margins, "logits": out.logits}
        return CallResult(outputs={key: values for key, values in outputs.items() if values})

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        with_advantages = add_advantages(mini_batches, self.ppo, context).mini_batches
        stats = add_stats(
            model.train_step(batch, "seq", self._loss, response_tokens, context.micro_batches)
            for batch in with_advantages
        )
        if not context.holds_outputs:
            return CallResult()
        named = prefixed("actor", {name: stats.pop(name) for name in ("loss", "grad_norm", "lr") if name in stats})
        return CallResult(stats={**stats, **named, **add_stats(map(_rollout_stats, mini_batches))})

    def _loss(self, logits: Logits, batch: Batch) -> tuple[Tensor, Stats]:
        """`logits` [tokens, vocab]."""
        logprob = response_logprobs(logits, batch, self.ppo.temperature)  # [responses]
        loss, is_clipped = ppo_policy_loss(
            logprob,
            batch.packed("logprob").values,
            batch.packed("advantage").values,
            self.ppo.policy_clip,
        )
        return loss.sum(), {"clip_fraction": mean_of(is_clipped)}


class PPOReferenceInterface:
    """See `PPOReference`."""

    def __init__(self, config: PPOReference):
        self.ppo = config.ppo

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        def ref_logprobs(logits: Logits, part: Batch) -> dict[str, list[Tensor]]:
            logprob = response_logprobs(logits, part, self.ppo.temperature)
            return {"ref_logprob": by_sample(logprob, part)}

        outputs = model.forward(batch, "seq", ref_logprobs, context.micro_batches)
        return CallResult(outputs=outputs) if context.holds_outputs else CallResult()


class PPOCriticInterface:
    """See `PPOCritic`."""

    def __init__(self, config: PPOCritic):
        self.ppo = config.ppo

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        def values(head: Tensor, part: Batch) -> dict[str, list[Tensor]]:
            return {"value": by_sample(response_values(head, part), part)}

        outputs = model.forward(batch, "seq", values, context.micro_batches)
        return CallResult(outputs=outputs) if context.holds_outputs else CallResult()

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        estimates = add_advantages(mini_batches, self.ppo, context)
        stats = add_stats(
            model.train_step(batch, "seq", self._loss, response_tokens, context.micro_batches)
            for batch in estimates.mini_batches
        )
        if not context.holds_outputs:
            return CallResult()
        named = prefixed("critic", {name: stats.pop(name) for name in ("loss", "grad_norm", "lr") if name in stats})
        return CallResult(stats={**stats, **named, "explained_variance": (estimates.explained_variance, 1.0)})

    def _loss(self, head: Tensor, batch: Batch) -> tuple[Tensor, Stats]:
        """`head` [tokens]."""
        value = response_values(head, batch)  # [responses]
        returns = batch.packed("return").values
        loss, is_clipped = clipped_value_loss(value, batch.packed("value").values, returns, self.ppo.value_clip)
        return loss.sum(), {
            "value_clip_fraction": mean_of(is_clipped),
            "value_mean": mean_of(value),
            "return_mean": mean_of(returns),
        }


def _rollout_stats(batch: Batch) -> Stats:
    """Of the rollouts as they were drawn, before this call's updates."""
    logprob, ref_logprob = batch.packed("logprob").values, batch.packed("ref_logprob").values
    kl_sum, tokens = mean_of(kl_k1(logprob, ref_logprob))
    return {
        "reward_mean": mean_of(torch.cat(batch.data["reward"])),
        "kl": (kl_sum, tokens),
        "kl_per_sequence": (kl_sum, float(len(batch))),
        "response_length": (tokens, float(len(batch))),
        "entropy": mean_of(-logprob),
    }
