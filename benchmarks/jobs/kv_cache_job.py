"""A model that learns its own responses: with small mini-batches, keys and values are most of a step's memory. For
`benchmarks/features.py`."""

from dataclasses import dataclass

from torch import Tensor

from realhf.api import GenerationOptions, Policy, Prompts, auto, loss_function
from realhf.engine.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Rollout(GenerationOptions):
    max_new_tokens: int = 96
    eos_token: int | None = -1  # every response is as long as the limit


@loss_function
def own_words(logprob: Tensor, batch: Batch, rollout: Rollout) -> Tensor:
    """-log p of the responses' tokens, [responses]."""
    return -logprob


@auto(batch_size=54, mini_batches=27)
def kv_cache(prompts: Prompts, *, actor: Policy = Policy(lr=1e-6), rollout: Rollout = Rollout()) -> None:
    actor.update(actor.generate(prompts, rollout), own_words(rollout))
