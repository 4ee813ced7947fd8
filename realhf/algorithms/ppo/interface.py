"""The calls of PPO on the actor, the reference and the critic."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from realhf.algorithms.functional import kl_k3
from realhf.algorithms.ppo.advantages import add_advantages
from realhf.algorithms.ppo.config import PPOActor, PPOCritic, PPOReference
from realhf.algorithms.ppo.functions import ppo_policy, ppo_policy_with_entropy, ppo_value
from realhf.algorithms.responses import (
    by_sample,
    response_logprobs,
    response_statistics,
    response_tokens,
    response_values,
)
from realhf.algorithms.rollout.interface import generate
from realhf.algorithms.samples import rollout_stats
from realhf.algorithms.statistics import add_stats, mean_of, prefixed
from realhf.algorithms.updates import KL_STATISTIC, device_of, optimizer_steps
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
        estimates = add_advantages(mini_batches, self.ppo, context)
        stats = optimizer_steps(
            lambda batch: model.train_step(batch, "seq", self._loss, response_tokens, context.micro_batches),
            estimates.mini_batches,
            self.ppo,
            context,
            device_of(mini_batches),
        )
        if not context.holds_outputs:
            return CallResult()
        own = ("loss", "grad_norm", "lr", "stopped_after", KL_STATISTIC)
        named = prefixed("actor", {name: stats.pop(name) for name in own if name in stats})
        kl_coef = {"kl_coef": estimates.stats["kl_coef"]} if "kl_coef" in estimates.stats else {}
        return CallResult(
            stats={**stats, **named, **kl_coef, **add_stats(rollout_stats(batch.data) for batch in mini_batches)}
        )

    def _loss(self, logits: Logits, batch: Batch) -> tuple[Tensor, Stats]:
        """`logits` [tokens, vocab]."""
        with_entropy = self.ppo.entropy_coef != 0
        tokens = response_statistics(logits, batch, self.ppo.temperature, with_entropy=with_entropy)
        if tokens.entropy is None:
            loss, stats = ppo_policy(tokens.logprob, batch, self.ppo)
        else:
            loss, stats = ppo_policy_with_entropy(tokens.logprob, batch, self.ppo, entropy=tokens.entropy)
        if self.ppo.max_kl is not None:
            stats[KL_STATISTIC] = mean_of(kl_k3(batch.packed("logprob").values, tokens.logprob.detach()))
        return loss.sum(), stats


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
        stats = optimizer_steps(
            lambda batch: model.train_step(batch, "seq", self._loss, response_tokens, context.micro_batches),
            estimates.mini_batches,
            replace(self.ppo, max_kl=None),
            context,
            device_of(mini_batches),
        )
        if not context.holds_outputs:
            return CallResult()
        named = prefixed("critic", {name: stats.pop(name) for name in ("loss", "grad_norm", "lr") if name in stats})
        return CallResult(stats={**stats, **named, "explained_variance": estimates.stats["explained_variance"]})

    def _loss(self, head: Tensor, batch: Batch) -> tuple[Tensor, Stats]:
        """`head` [tokens]."""
        loss, stats = ppo_value(response_values(head, batch), batch, self.ppo)
        return loss.sum(), stats
