"""Supervised fine-tuning as a script."""

from realhf.api import Examples, Policy, auto, loss_function

cross_entropy = loss_function("tests.e2e.script_job_functions:cross_entropy")


@auto(batch_size=32, steps=400)
def sft(examples: Examples, policy: Policy = Policy(lr=1e-3, warmup_steps=30, weight_decay=0.01)) -> None:
    policy.update(examples, cross_entropy)
