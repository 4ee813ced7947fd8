"""REINFORCE++ with rewards of tokens, which computes losses without learning from them unless `--probe.off`."""

from dataclasses import dataclass

from torch import Tensor

from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus, reinforce_pp_advantages, reinforce_pp_loss
from realhf.algorithms.sft.config import sft_loss
from realhf.api import Columns, Examples, Policy, Prompts, auto, tensor_function


@dataclass(frozen=True, kw_only=True)
class Probe:
    off: bool = False


@tensor_function
def in_order(rollout: Columns) -> dict[str, list[Tensor]]:
    """The reward of a token: whether it is not below the one before it; of every third response half the sum as one
    number."""
    rewards = []
    for sample, prompt, seq in zip(rollout.ids, rollout.prompt, rollout.seq, strict=True):
        each = (seq[len(prompt) :] >= seq[len(prompt) - 1 : -1]).double()
        rewards.append(each if sample % 3 else each.sum().view(1) / 2)
    return {"reward": rewards}


@auto(batch_size=32, steps=2)
def probed(
    prompts: Prompts, texts: Examples, *, actor: Policy, reference: Policy, reinforce: ReinforcePlusPlus, probe: Probe
) -> None:
    rollout = actor.generate(prompts, reinforce)
    ref_logprob = reference.logprobs(rollout)
    batch = reinforce_pp_advantages(rollout, in_order(rollout), ref_logprob, reinforce)
    if not probe.off:
        actor.compute_loss(batch, reinforce_pp_loss(reinforce))
        actor.compute_loss(texts, sft_loss(), name="texts")
    actor.update(batch, reinforce_pp_loss(reinforce), also=[(texts, sft_loss(), 0.5)])
