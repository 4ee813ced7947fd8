"""Which experts each token takes: in generation, and in training on the same sequences."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import Computation, Reproducible
from realhf.architecture.model import DecoderConfig, Experts
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import PART, Batch
from realhf.engine.generate.running_batch import RunningBatch
from realhf.engine.interface import GenerationRequest, Head, Stats
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.mlp import MixtureOfExperts
from realhf.parallel.groups import GroupTable
from realhf.parallel.vocabulary import Logits

RANKS = 2  # processes of `choices`
SAMPLES, PARTS = 16, 4
MODEL = DecoderConfig(
    hidden_size=64,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=48,
    experts=Experts(count=8, per_token=2),
)

# (sample, place of the token in its sequence, layer) -> the experts in ascending order, each time it was computed.
Choices = dict[tuple[int, int, int], set[tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute the sequences. at_once: the parts of the batch, one after the other; kv_cache_tokens: room for
    keys and values (generation; None: enough); trains: by a training step, else by generation."""

    tp: int = 1
    at_once: int = 1
    kv_cache_tokens: int | None = None
    trains: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(DeviceMesh(0, self.tp), ParallelStrategy(tp=self.tp))


GENERATIONS = (Way(), Way(at_once=4), Way(kv_cache_tokens=160), Way(tp=2), Way(tp=2, at_once=8))
TRAININGS = (Way(trains=True), Way(tp=2, trains=True))


def choices(rank: int, dtype: str, reproducible: Reproducible) -> list[Choices]:
    """What each of `GENERATIONS` and `TRAININGS` chooses, as rank 0 of `RANKS` saw it; the other has no choices."""
    ways = (*GENERATIONS, *TRAININGS)
    table = GroupTable([way.layout for way in ways], rank)
    found = [_of(way, table, rank, getattr(torch, dtype), reproducible) for way in ways if rank < way.tp]
    return found if rank == 0 else []


def differing(found: list[Choices]) -> tuple[int, int]:
    """How many of the (generation, training, token, layer) have other experts in training, and how many there are."""
    count = differ = 0
    for generated in found[: len(GENERATIONS)]:
        for trained in found[len(GENERATIONS) :]:
            count += len(generated)
            differ += sum(trained[key] != experts for key, experts in generated.items())
    return differ, count


def _of(way: Way, table: GroupTable, rank: int, dtype: torch.dtype, reproducible: Reproducible) -> Choices:
    compute, optimizer = Computation(reproducible=reproducible), OptimizerConfig(lr=1e-3)
    spec = ModelSpec(MODEL, table.groups(way.layout), dtype, compute=compute)
    model = ShardedModel(replace(spec, optimizer=optimizer, total_optimizer_steps=1) if way.trains else spec)
    model.initialise(seed=0)
    batch, seen = sequences(), _Seen()
    with seen.routers(model):
        if way.trains:
            hook = model.decoder.register_forward_pre_hook(seen.packed)
            model.train_step(batch, "seq", seen.loss, lambda part: float(len(part)), PARTS)
            hook.remove()
        else:
            options = GenerationOptions(max_new_tokens=24, eos_token=-1, kv_cache_tokens=way.kv_cache_tokens)
            forced = [seq[len(prompt) :] for seq, prompt in zip(batch.data["seq"], batch.data["prompt"], strict=True)]
            request = GenerationRequest(options, sample_key=(0, 1), micro_batches=way.at_once, forced=forced)
            forward = RunningBatch.forward
            with patch.object(RunningBatch, "forward", lambda step, hidden: seen.step(step, forward(step, hidden))):
                model.generate(batch, request)
    model.close()
    return seen.choices


def sequences() -> Batch:
    """Random prompts, each of two samples, and random responses."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(MODEL.vocab_size, (3 + 5 * (i // 2),), generator=generator) for i in range(0, SAMPLES, 2)]
    data: dict[str, list[Tensor]] = {"prompt": [prompts[i // 2] for i in range(SAMPLES)]}
    responses = [torch.randint(MODEL.vocab_size, (4 + i,), generator=generator) for i in range(SAMPLES)]
    data["seq"] = [torch.cat(both) for both in zip(data["prompt"], responses, strict=True)]
    data[PART] = [torch.tensor([i % PARTS, PARTS]) for i in range(SAMPLES)]
    return Batch(tuple(range(SAMPLES)), data)


@dataclass
class _Seen:
    """The choices of a model's routers, and of which tokens they are."""

    choices: Choices = field(default_factory=dict)
    by_layer: list[Tensor] = field(default_factory=list)  # of the last forward pass, [rows, experts of a token] each
    restore: Tensor | None = None

    @contextmanager
    def routers(self, model: ShardedModel) -> Iterator[None]:
        routers = [module for module in model.decoder.modules() if isinstance(module, MixtureOfExperts)]
        for router in routers:
            router.choose = partial(self._chosen, router.choose)  # type: ignore[method-assign]
        yield
        for router in routers:
            del router.choose

    def _chosen(self, choose: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights = choose(logits)
        self.by_layer.append(chosen.sort(-1).values)
        return chosen, weights

    def add(self, tokens: list[tuple[int, int]], rows: Tensor) -> None:
        """Gives the rows of the last forward pass to their (sample, place)."""
        assert len(self.by_layer) == MODEL.num_layers
        for layer, chosen in enumerate(self.by_layer):
            for (sample, place), experts in zip(tokens, chosen[rows].tolist(), strict=True):
                self.choices.setdefault((sample, place, layer), set()).add(tuple(experts))
        self.by_layer = []

    def packed(self, _: Any, arguments: tuple[Any, ...]) -> None:
        self.restore = arguments[3]

    def loss(self, head: Head, part: Batch) -> tuple[Tensor, Stats]:
        """The negative log-probability of all tokens but the first of each sequence."""
        assert isinstance(head, Logits)
        tokens = [
            (sample, at) for sample, seq in zip(part.ids, part.data["seq"], strict=True) for at in range(len(seq))
        ]
        self.add(tokens, torch.arange(len(tokens)) if self.restore is None else self.restore)
        ids = torch.cat(part.data["seq"])
        follows = torch.tensor([at > 0 for _, at in tokens]).nonzero()[:, 0]
        return -head[follows - 1].of_tokens(ids[follows]).logprob.sum(), {}

    def step(self, batch: RunningBatch, out: Tensor) -> Tensor:
        """After a step of generation, whose rows are those of decodes, then those of prefills for all their members."""
        decodes = len(batch.step.decodes)
        tokens = [(int(batch._sequences[i]), int(batch._lengths[i]) - 1) for i in range(decodes)]
        rows, end = list(range(decodes)), decodes
        for prefill in batch.step.prefills:
            for member in prefill.members:
                tokens += [(member.index, at) for at in range(prefill.length)]
                rows += range(end, end + prefill.length)
            end += prefill.length
        self.add(tokens, torch.tensor(rows))
        return out
