"""Per-sample data on a worker, and the packed form in which the compute takes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import torch
from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.gpu.host_numbers import on_device

# In the data of a mini-batch, by sample [2], where it matters: which of the rank's parts of the gradient it belongs to,
# and how many the rank has.
PART = " part"


@dataclass(frozen=True)
class Packed:
    """Variable-length sequences laid end to end.

    `values` is [tokens, ...]; `cu_seqlens` [batch + 1] int32 holds the borders; sequence i is
    `values[cu_seqlens[i] : cu_seqlens[i + 1]]`.
    """

    values: Tensor
    cu_seqlens: Tensor

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    def unpack(self) -> list[Tensor]:
        return list(self.values.split(self.lengths))


def pack(sequences: Sequence[Tensor]) -> Packed:
    """Packs tensors [length, ...] of equal trailing shape."""
    values = torch.cat(list(sequences))
    lengths = torch.tensor([0, *(len(s) for s in sequences)], dtype=torch.int32)
    return Packed(values, on_device(lengths.cumsum(0, dtype=torch.int32), values.device))


@dataclass(frozen=True)
class Batch:
    """Some samples of one step: `data[key][i]` belongs to sample `ids[i]` and is [length, ...].

    A scalar of a sample is a tensor [1]. `ids` are the places of the samples in the global batch. Runs of `together`
    neighbours are never divided over micro-batches: those of a pair, or of a prompt that is computed once for them.
    """

    ids: tuple[int, ...]
    data: dict[str, list[Tensor]]
    together: int = 1

    def __len__(self) -> int:
        return len(self.ids)

    def packed(self, key: str) -> Packed:
        return pack(self.data[key])

    def select(self, places: Sequence[int]) -> "Batch":
        """The samples at the given places of this batch (not: of the given ids)."""
        return Batch(
            tuple(self.ids[i] for i in places),
            {key: [column[i] for i in places] for key, column in self.data.items()},
        )

    def split(self, parts: int) -> list["Batch"]:
        """`parts` equal runs of samples; `parts` divides the number of samples."""
        size, rest = divmod(len(self), parts)
        assert not rest, f"{parts} parts do not divide {len(self)} samples"
        return [self.select(range(i * size, (i + 1) * size)) for i in range(parts)]

    def balanced(self, key: str, parts: int) -> list[list[int]]:
        """The places of the samples, divided into `parts` micro-batches of about equally many tokens of `key`.

        See `balanced_places`; none is empty, and each has its samples in the order of the batch.
        """
        lengths = [len(value) for value in self.data[key]]
        runs = [sum(lengths[i : i + self.together]) for i in range(0, len(lengths), self.together)]
        return [
            [run * self.together + i for run in places for i in range(self.together)]
            for places in balanced_places(runs, parts)
        ]

    def to(self, device: torch.device) -> "Batch":
        """The same samples on `device`."""
        return replace(self, data={key: moved(column, device) for key, column in self.data.items()})

    def with_data(self, **columns: list[Tensor]) -> "Batch":
        return replace(self, data={**self.data, **columns})


def moved(column: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors, of one dtype, on `device`: the same ones if they are there, else by one copy for all of them.

    From a GPU the values have arrived when it returns; to a GPU they come before the later work of the current stream.
    """
    if all(value.device == device for value in column):
        return list(column)
    flat = [value.detach().flatten() for value in column]
    is_pinned = "cuda" in (device.type, flat[0].device.type)
    on_host = torch.empty(sum(map(len, flat)), dtype=flat[0].dtype, pin_memory=is_pinned)
    if device.type == "cpu":
        packed = on_host.copy_(torch.cat(flat), non_blocking=True)
        if is_pinned:
            torch.cuda.current_stream(flat[0].device).synchronize()
    else:
        packed = torch.cat(flat, out=on_host).to(device, non_blocking=True)
    parts = packed.split([len(value) for value in flat])
    return [part.view(value.shape) for part, value in zip(parts, column, strict=True)]


def check_tokens(batch: Batch, key: str, model: DecoderConfig) -> None:
    """Whether `model` can read the sequences `batch.data[key]` [length] int64; the same on every rank of a layout.

    Behind it an id beyond the vocabulary would be zeros under tensor parallelism, and end a GPU's context elsewhere.

    Raises:
        ValueError: naming the sample, an id that is not in the vocabulary, or a sequence beyond learned positions.
    """
    sequences = batch.data[key]
    least, most = torch.cat(sequences).aminmax() if any(map(len, sequences)) else (0, 0)
    if not (int(least) >= 0 and int(most) < model.vocab_size):
        for sample, tokens in zip(batch.ids, sequences, strict=True):
            for place, token in enumerate(tokens.tolist()):
                if not 0 <= token < model.vocab_size:
                    raise ValueError(
                        f"{key!r} of sample {sample} has the token id {token} at place {place}, and the model's "
                        f"vocab_size={model.vocab_size} has ids from 0 to {model.vocab_size - 1}; correct what made "
                        f"{key!r}, or use a model with that id"
                    )
    check_positions(batch.ids, [len(tokens) for tokens in sequences], key, model)


def check_positions(ids: Sequence[int], lengths: Sequence[int], key: str, model: DecoderConfig) -> None:
    """Raises ValueError where a sequence of `lengths` tokens is longer than the learned positions of `model`."""
    for sample, length in zip(ids, lengths, strict=True):
        if model.positions == "learned" and length > model.max_positions:
            raise ValueError(
                f"{key!r} of sample {sample} has {length} tokens, and the model's max_positions={model.max_positions}; "
                "make it shorter, or use a model with more positions"
            )


def balanced_places(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """The places of `sizes` in `parts` groups of about equal sums: the largest first, each to the smallest group so
    far (Graham 1969, LPT; at most 4/3 of the best possible). Depends on nothing but the sizes.

    No sum exceeds that of ceil(n / parts) times the largest, which memory is planned for.
    """
    assert 1 <= parts <= len(sizes), f"{parts} parts of {len(sizes)}"
    groups: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, group) for group in range(parts)]
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        total, group = heappop(heap)
        groups[group].append(place)
        heappush(heap, (total + sizes[place], group))
    return [sorted(group) for group in groups]


def concatenate(batches: Sequence[Batch]) -> Batch:
    keys = batches[0].data.keys()
    return Batch(
        tuple(i for b in batches for i in b.ids),
        {key: [value for b in batches for value in b.data[key]] for key in keys},
        math.gcd(*(b.together for b in batches)),
    )
