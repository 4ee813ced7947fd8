"""The model that interfaces are called with: generation and forward pass see the same parameters."""

import torch
from torch import Tensor

from realhf.api.generation import GenerationOptions
from realhf.engine.batch import Batch
from realhf.engine.model import ShardedModel
from realhf.parallel.vocabulary import Logits
from tests.unit.engine.losses import ONE_RANK, random_batch, tiny


def token_logprobs(output: Logits, batch: Batch) -> dict[str, list[Tensor]]:
    """Log-probability of every token but a sequence's first: [length - 1] a sample."""
    parts = output.full().log_softmax(-1).split([len(t) for t in batch.data["tokens"]])
    return {
        "logprobs": [p[:-1].gather(-1, t[1:, None])[:, 0] for p, t in zip(parts, batch.data["tokens"], strict=True)]
    }


def test_generated_logprobs_are_those_of_the_forward_pass() -> None:
    model = ShardedModel(tiny(), ONE_RANK, torch.float64)
    model.initialise(seed=0)
    model.arena.flat.mul_(3.0)
    prompts = random_batch(tiny(), 6)
    rollouts = model.generate(
        prompts, "tokens", GenerationOptions(max_new_tokens=5, eos_token=1), sample_key=(7, 0), micro_batches=2
    )
    batch = prompts.with_data(tokens=rollouts.sequences)
    logprobs = model.forward(batch, "tokens", token_logprobs, micro_batches=3)["logprobs"]
    assert len(rollouts.logprobs) == 6
    for generated, whole in zip(rollouts.logprobs, logprobs, strict=True):
        torch.testing.assert_close(generated, whole[-len(generated) :], rtol=0, atol=1e-11)
