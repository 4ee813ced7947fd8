"""What the calls of `group_job.py` do."""

from collections.abc import Sequence

import torch
from group_job import Judge, Learner
from torch import Tensor

from realhf.algorithms.functional import ppo_policy_loss
from realhf.algorithms.responses import response_logprobs, response_tokens, responses
from realhf.algorithms.statistics import add_stats, mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model, Stats
from realhf.parallel.vocabulary import Logits


class JudgeInterface:
    """See `Judge`."""

    def __init__(self, config: Judge):
        pass

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        rewards = torch.stack([(r % 2 == 0).double().mean() for r in responses(batch)])
        groups = context.in_order(batch.ids, rewards).view(-1, context.samples_per_prompt)  # [prompts, samples]
        deviation = groups.std(1, correction=0, keepdim=True)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (deviation + 1e-6)).flatten()[list(batch.ids)]
        if not context.holds_outputs:
            return CallResult()
        return CallResult(
            outputs={"reward": list(rewards.split(1)), "advantage": list(advantages.split(1))},
            stats={"deviation": (float(deviation.mean()), 1.0), "prompts": (float(len(groups)), 1.0)},
        )


class LearnerInterface:
    """See `Learner`."""

    def __init__(self, config: Learner):
        self._epochs, self._early = config.epochs, config.early

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        steps = self._epochs * [_with_advantages(batch) for batch in mini_batches]
        made = steps[: len(steps) - self._early]
        stats = [model.train_step(batch, "seq", _loss, response_tokens, context.micro_batches) for batch in made]
        return CallResult(stats=add_stats(stats)) if context.holds_outputs else CallResult()


def _with_advantages(batch: Batch) -> Batch:
    """With the advantage of a response on each of its tokens."""
    lengths = [len(logprob) for logprob in batch.data["logprob"]]
    advantages = [a.expand(n).contiguous() for a, n in zip(batch.data["advantage"], lengths, strict=True)]
    return batch.with_data(advantage=advantages)


def _loss(logits: Logits, batch: Batch) -> tuple[Tensor, Stats]:
    logprob = response_logprobs(logits, batch)  # [responses]
    old, advantage = batch.packed("logprob").values, batch.packed("advantage").values
    loss, is_clipped = ppo_policy_loss(logprob, old, advantage.to(logprob.dtype), 0.2)
    return loss.sum(), {"clip_fraction": mean_of(is_clipped)}
