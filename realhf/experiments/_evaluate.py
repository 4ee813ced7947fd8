"""Evaluation: a model answers every prompt, and the answers are scored. `realhf evaluate` runs it."""

from realhf.api import GenerationOptions, Policy, Prompts, Reward, auto

GREEDY = GenerationOptions(max_new_tokens=256, temperature=0.0)


@auto(batch_size=64, steps=0)
def evaluate(prompts: Prompts, *, actor: Policy, reward: Reward, generation: GenerationOptions = GREEDY) -> None:
    reward.score(actor.generate(prompts, generation))
