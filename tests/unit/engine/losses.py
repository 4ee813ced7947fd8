"""Models, batches and losses that the engine's tests share."""

from dataclasses import replace

import torch
from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import EngineModel
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats
from realhf.engine.model import ShardedModel
from realhf.engine.train.data_parallel import NativeParameters
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.vocabulary import Logits, WholeLogits

ONE_RANK = ParallelGroups(Layout(DeviceMesh(0, 1), ParallelStrategy()), 0)


def tiny(**changes: object) -> DecoderConfig:
    small = DecoderConfig(
        hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=4, vocab_size=24
    )
    return replace(small, **changes)


def boxes_of(model: EngineModel) -> dict[str, tuple[Box, Tensor]]:
    """The parameters of a rank by name, where no parameter is in several parts."""
    return {box.name: (box, tensor) for box, tensor in model.residency.held()}


def gradients_of(model: ShardedModel) -> list[tuple[Box, Tensor]]:
    """The gradients of what a rank holds."""
    parameters = model.parameters
    assert isinstance(parameters, NativeParameters)
    return [(box, parameters.gradient[at : at + box.size].view(box.shape)) for box, at in parameters._held]


def random_batch(config: DecoderConfig, samples: int, seed: int = 0, lengths: tuple[int, int] = (2, 11)) -> Batch:
    """Sequences of random tokens and lengths; the second half of each is trained on (`in_loss`)."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(*lengths, (samples,), generator=generator).tolist()
    tokens = [torch.randint(config.vocab_size, (n,), generator=generator) for n in sizes]
    return Batch(tuple(range(samples)), {"tokens": tokens, "in_loss": [torch.arange(n) >= n // 2 for n in sizes]})


def targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """The next token of every packed token, and which of these are trained on (never the one behind the last)."""
    tokens = torch.cat([t.roll(-1) for t in batch.data["tokens"]])
    in_loss = torch.cat([torch.cat([m[1:], m.new_zeros(1)]) for m in batch.data["in_loss"]])
    return tokens, in_loss


def next_token_loss(output: Logits, batch: Batch) -> tuple[Tensor, Stats]:
    """Summed cross-entropy of the trained tokens; [tokens, vocab] in."""
    tokens, in_loss = targets(batch)
    trained = output[in_loss].of_tokens(tokens[in_loss])
    return -trained.logprob.sum(), {"accuracy": (float(trained.is_top.sum()), float(len(trained.is_top)))}


def value_loss(output: Tensor, batch: Batch) -> tuple[Tensor, Stats]:
    """Squared distance of a scalar head [tokens] to the scaled token; all trained tokens."""
    tokens, in_loss = targets(batch)
    return (output - tokens / 10.0)[in_loss].square().sum(), {}


def trained_tokens(batch: Batch) -> float:
    return float(targets(batch)[1].sum())


def split_like(output: Logits | WholeLogits | Tensor, batch: Batch) -> dict[str, list[Tensor]]:
    """A postprocess: the head's output of every sample."""
    output = output if isinstance(output, Tensor) else output.full()
    return {"output": list(output.split([len(t) for t in batch.data["tokens"]]))}
