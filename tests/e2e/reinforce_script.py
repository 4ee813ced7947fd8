"""REINFORCE in one file: a reward, advantages and a loss of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.api import Columns, GenerationOptions, Policy, Prompts, auto, loss_function, tensor_function
from realhf.engine.batch import Batch
from realhf.engine.interface import Context


@dataclass(frozen=True, kw_only=True)
class Reinforce(GenerationOptions):
    max_new_tokens: int = 9
    samples_per_prompt: int = 4
    entropy_coef: float = 0.01
    epochs: int = 2


@tensor_function
def in_order(rollout: Columns) -> dict[str, list[Tensor]]:
    """The reward: the share of neighbouring tokens of the response that are in order."""
    responses = [seq[len(prompt) :] for prompt, seq in zip(rollout.prompt, rollout.seq, strict=True)]
    steps = [torch.cat([r[:1] * 0 + 1, (r[1:] >= r[:-1]).long()]) for r in responses]
    return {"reward": [step.double().mean().view(1) for step in steps]}


@tensor_function
def against_the_group(scores: Columns, context: Context) -> dict[str, list[Tensor]]:
    """The reward less the mean of the responses to the same prompt."""
    groups = context.in_order(scores.ids, torch.cat(scores.reward)).view(-1, context.samples_per_prompt)
    advantage = (groups - groups.mean(1, keepdim=True)).flatten()[list(scores.ids)]
    lengths = [len(logprob) for logprob in scores.logprob]
    return {"advantage": [a.expand(n) for a, n in zip(advantage, lengths, strict=True)]}


@loss_function
def loss(logprob: Tensor, batch: Batch, options: Reinforce, *, entropy: Tensor) -> Tensor:
    return -batch.packed("advantage").values * logprob - options.entropy_coef * entropy


@auto(batch_size=32, steps=20)
def reinforce(prompts: Prompts, actor: Policy, options: Reinforce) -> None:
    scores = in_order(actor.generate(prompts, options))
    actor.update(against_the_group(scores), loss(options, reduction="sequence_mean"))
