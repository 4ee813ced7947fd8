"""A model and a context in one process, without parallelism: what the interfaces see in these tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from realhf.architecture.decoding import GraphLife
from realhf.engine.batch import Batch, concatenate
from realhf.engine.interface import GenerationOutput, GenerationRequest, Stats


class CausalMean(nn.Module):
    """[batch, length] tokens -> [batch, length, outputs]: a linear function of the mean embedding so far."""

    def __init__(self, vocab_size: int, outputs: int, hidden: int = 6):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.head = nn.Linear(2 * hidden, outputs, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(torch.cat([x, x.cumsum(1) / count], -1))


class SingleProcessModel:
    """The `Model` protocol around a module that maps padded tokens to outputs, with plain SGD or a given optimizer."""

    def __init__(self, module: nn.Module, scalar: bool, optimizer: torch.optim.Optimizer | None = None):
        self.module = module
        self.scalar = scalar
        self.config: Any = SimpleNamespace(head="scalar" if scalar else "lm")
        self.optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
        self.after_step: Callable[[], None] = lambda: None

    def head(self, batch: Batch, tokens_key: str) -> Tensor:
        """[tokens, vocab] or [tokens], packed."""
        sequences = batch.data[tokens_key]
        out = self.module(nn.utils.rnn.pad_sequence(sequences, batch_first=True))
        packed = torch.cat([row[: len(s)] for row, s in zip(out, sequences, strict=True)])
        return packed[:, 0] if self.scalar else packed

    @torch.no_grad()
    def forward(self, batch, tokens_key, postprocess, micro_batches):
        parts = [postprocess(self.head(part, tokens_key), part) for part in batch.split(micro_batches)]
        return {key: [x for part in parts for x in part[key]] for key in parts[0]}

    def train_step(self, batch, tokens_key, loss, weight, micro_batches) -> Stats:
        self.optimizer.zero_grad()
        total_weight, total_loss, stats = weight(batch), 0.0, {}
        for part in batch.split(micro_batches):
            value, part_stats = loss(self.head(part, tokens_key), part)
            (value / total_weight).backward()
            total_loss += value.item()
            for name, (s, w) in part_stats.items():
                old = stats.get(name, (0.0, 0.0))
                stats[name] = (old[0] + s, old[1] + w)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), 1.0).item()
        self.optimizer.step()
        self.after_step()
        lr = self.optimizer.param_groups[0]["lr"]
        return stats | {"loss": (total_loss, total_weight), "grad_norm": (norm, 1.0), "lr": (lr, 1.0)}

    @torch.no_grad()
    def generate(self, batch: Batch, request: GenerationRequest) -> GenerationOutput:
        sampling, forced = request.options, request.forced
        generator = torch.Generator().manual_seed(hash(request.sample_key) % 2**31)
        sequences = [p.clone() for p in batch.data[request.prompt_key]]
        logprobs: list[list[Tensor]] = [[] for _ in sequences]
        limits = [sampling.max_new_tokens if forced is None else len(f) for f in forced or sequences]
        for _ in range(max(limits)):
            is_open = [
                i
                for i, s in enumerate(sequences)
                if len(logprobs[i]) < limits[i] and not (logprobs[i] and s[-1] == sampling.eos_token)
            ]
            if not is_open:
                break
            padded = nn.utils.rnn.pad_sequence([sequences[i] for i in is_open], batch_first=True)
            last = torch.tensor([len(sequences[i]) - 1 for i in is_open])
            logits = self.module(padded)[torch.arange(len(is_open)), last]
            logprob = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            if sampling.temperature == 0:
                drawn = logits.argmax(-1)
            else:
                drawn = torch.multinomial(logprob.exp(), 1, generator=generator)[:, 0]
            for row, i in enumerate(is_open):
                token = drawn[row] if forced is None else forced[i][len(logprobs[i])]
                logprobs[i].append(logprob[row, token])
                sequences[i] = torch.cat([sequences[i], token.view(1)])
        packed = [torch.stack(x) if x else torch.zeros(0, dtype=torch.float64) for x in logprobs]
        return GenerationOutput(
            sequences=sequences,
            logprobs=packed,
            untruncated_logprobs=packed,
            margins=[torch.ones(len(x), dtype=torch.float64) for x in packed],
        )


@dataclass
class SingleContext:
    """The `Context` protocol; `peers` are the sums that the other data-parallel ranks would bring."""

    seed: int = 0
    step: int = 0
    steps_made: int = 0
    steps: int = 0
    micro_batches: int = 1
    gradient_parts: int = 0
    decode_graphs: GraphLife | None = None
    kv_cache_tokens: int | None = None
    holds_outputs: bool = True
    record: frozenset[str] = frozenset()
    batch_size: int = 64
    samples_per_prompt: int = 1
    state: dict[str, float] = field(default_factory=dict)
    peers: list[Tensor] = field(default_factory=list)

    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        return sum(self.peers, values)

    def sum_over_outputs(self, values: Tensor) -> Tensor:
        return sum(self.peers, values)

    def in_order(self, ids: Sequence[int], values: Tensor) -> Tensor:
        placed = values.new_zeros(self.batch_size, *values.shape[1:])
        placed[list(ids)] = values
        return self.sum_over_data_parallel(placed)


@pytest.fixture
def context() -> type[SingleContext]:
    return SingleContext


@pytest.fixture
def language_model() -> Callable[..., SingleProcessModel]:
    """Makes a small language model in float64 from a seed."""

    def make(seed: int = 0, vocab_size: int = 8) -> SingleProcessModel:
        torch.manual_seed(seed)
        return SingleProcessModel(CausalMean(vocab_size, vocab_size).double(), scalar=False)

    return make


@pytest.fixture
def scalar_model() -> Callable[..., SingleProcessModel]:
    """Makes a small model with a scalar head in float64 from a seed."""

    def make(seed: int = 0, vocab_size: int = 8) -> SingleProcessModel:
        torch.manual_seed(seed)
        return SingleProcessModel(CausalMean(vocab_size, 1).double(), scalar=True)

    return make


@pytest.fixture
def prompts() -> Batch:
    """Four prompts of different lengths with the ids 4 to 7."""
    columns = [torch.tensor(p) for p in ([1, 4], [1, 5, 6], [1, 3, 3, 7], [1, 7])]
    return concatenate([Batch((4 + i,), {"prompt": [p]}) for i, p in enumerate(columns)])
