"""A small job whose values may be changed by one fault: `benchmarks/wrong_values.py` says by which."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.api import Columns, GenerationOptions, Policy, Prompts, auto, loss_function, tensor_function
from realhf.engine.batch import Batch
from realhf.engine.interface import Context
from realhf.launch.process import WORKER_INDEX_VARIABLE

FAULT_VARIABLE = "REALHF_VALUE_FAULT"
SWAPPED_IN = -1  # the step, from 0


@dataclass(frozen=True, kw_only=True)
class Options(GenerationOptions):
    max_new_tokens: int = 8
    samples_per_prompt: int = 2


@tensor_function
def rewarded(rollout: Columns, context: Context) -> dict[str, list[Tensor]]:
    """The reward: the share of neighbouring tokens of the response that are in order. Two samples may swap theirs."""
    responses = [seq[len(prompt) :] for prompt, seq in zip(rollout.prompt, rollout.seq, strict=True)]
    steps = [torch.cat([r[:1] * 0 + 1, (r[1:] >= r[:-1]).long()]) for r in responses]
    rewards = [step.double().mean().view(1) for step in steps]
    if context.step == SWAPPED_IN:
        other = next((i for i, reward in enumerate(rewards) if reward != rewards[0]), 0)
        rewards[0], rewards[other] = rewards[other], rewards[0]
    return {"reward": rewards}


@tensor_function
def advantages(scores: Columns, reference: Columns, context: Context) -> dict[str, list[Tensor]]:
    """The reward less the mean of the responses to the same prompt, and a hundredth of the log-ratio."""
    groups = context.in_order(scores.ids, torch.cat(scores.reward)).view(-1, context.samples_per_prompt)
    advantage = (groups - groups.mean(1, keepdim=True)).flatten()[list(scores.ids)]
    ratios = [(a - b).double() for a, b in zip(reference.ref_logprob, scores.logprob, strict=True)]
    return {"advantage": [a + 0.01 * ratio for a, ratio in zip(advantage, ratios, strict=True)]}


@loss_function
def loss(logprob: Tensor, batch: Batch, options: Options) -> Tensor:
    return -batch.packed("advantage").values.to(logprob.dtype) * logprob


@auto(batch_size=16, steps=3, mini_batches=2)
def value_faults(prompts: Prompts, *, actor: Policy = Policy(lr=1e-2), reference: Policy, options: Options) -> None:
    rollout = actor.generate(prompts, options)
    actor.update(advantages(rewarded(rollout), reference.logprobs(rollout)), loss(options, reduction="sequence_mean"))


if WORKER_INDEX_VARIABLE in os.environ and os.environ.get(FAULT_VARIABLE):
    from value_fault_injection import install

    install(os.environ[FAULT_VARIABLE], int(os.environ[WORKER_INDEX_VARIABLE]), globals())
