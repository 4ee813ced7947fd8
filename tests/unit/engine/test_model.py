"""The model that interfaces are called with: generation and forward pass see the same parameters."""

import pytest
import torch
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.interface import GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.engine.returned import InterfaceError
from realhf.parallel.vocabulary import Logits
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, split_like, tiny, trained_tokens


def token_logprobs(output: Logits, batch: Batch) -> dict[str, list[Tensor]]:
    """Log-probability of every token but a sequence's first: [length - 1] a sample."""
    parts = output.full().log_softmax(-1).split([len(t) for t in batch.data["tokens"]])
    return {
        "logprobs": [p[:-1].gather(-1, t[1:, None])[:, 0] for p, t in zip(parts, batch.data["tokens"], strict=True)]
    }


def test_generated_logprobs_are_those_of_the_forward_pass() -> None:
    model = ShardedModel(ModelSpec(tiny(), ONE_RANK, torch.float64))
    model.initialise(seed=0)
    model.parameters.flat.mul_(3.0)
    prompts = random_batch(tiny(), 6)
    rollouts = model.generate(
        prompts,
        GenerationRequest(
            GenerationOptions(max_new_tokens=5, eos_token=1), prompt_key="tokens", sample_key=(7, 0), micro_batches=2
        ),
    )
    batch = prompts.with_data(tokens=rollouts.sequences)
    logprobs = model.forward(batch, "tokens", token_logprobs, micro_batches=3)["logprobs"]
    assert len(rollouts.logprobs) == 6
    for generated, whole in zip(rollouts.logprobs, logprobs, strict=True):
        torch.testing.assert_close(generated, whole[-len(generated) :], rtol=0, atol=1e-11)


@pytest.mark.parametrize("token", [-1, 24, 10**9])
def test_an_id_outside_of_the_vocabulary_names_sample_key_and_id(token: int) -> None:
    model = ShardedModel(
        ModelSpec(tiny(), ONE_RANK, torch.float64, optimizer=OptimizerConfig(), total_optimizer_steps=1)
    )
    batch = random_batch(tiny(), 3)
    batch.data["tokens"][2][1] = token
    says = (
        f"'tokens' of sample 2 has the token id {token} at place 1, and the model's vocab_size=24 has ids from 0 to 23"
    )
    with pytest.raises(ValueError, match=says):
        model.forward(batch, "tokens", split_like, micro_batches=1)
    with pytest.raises(ValueError, match=says):
        model.train_step(batch, "tokens", next_token_loss, trained_tokens, micro_batches=1)


def test_a_sequence_beyond_learned_positions_is_named() -> None:
    config = tiny(positions="learned", max_positions=4, norm="layer", mlp="plain")
    model = ShardedModel(ModelSpec(config, ONE_RANK, torch.float64))
    batch = Batch((5, 6), {"tokens": [torch.arange(4), torch.arange(5)]})
    with pytest.raises(ValueError, match="'tokens' of sample 6 has 5 tokens, and the model's max_positions=4"):
        model.forward(batch, "tokens", split_like, micro_batches=1)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_an_output_that_is_not_finite_names_key_and_sample(head: str) -> None:
    model = ShardedModel(ModelSpec(tiny(head=head), ONE_RANK, torch.float64))
    model.initialise(seed=0)
    model.decoder.model.embed_tokens.weight.data[7] = torch.nan
    batch = Batch((5, 6), {"tokens": [torch.tensor([1, 2]), torch.tensor([3, 7])]})
    with pytest.raises(InterfaceError, match=r"'output' .* model\.forward, sample 6, has nan at \[0"):
        model.forward(batch, "tokens", split_like, micro_batches=2)
    with pytest.raises(InterfaceError, match=r"'output' .* model\.forward has 0 tensors for 2 samples"):
        model.forward(batch, "tokens", lambda *_: {"output": []}, micro_batches=1)
