"""Micro-batches as the decoder computes them: sequences packed end to end, with common prefixes only once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realhf.architecture.chunks import SHORTEST_SHARED
from realhf.gpu.host_numbers import on_device
from realhf.models.attention import PackedAttention
from realhf.models.prefixed_attention import PrefixedAttention, Suffix

# On the CPU, oneDNN makes a kernel for every number of rows that it has not seen: some milliseconds for the products of
# a layer, for each new sum of lengths. So numbers of rows are rounded up to multiples, up to these limits.
_EXACT_ROWS = 64
_FINE_ROWS, _FINE_MULTIPLE, _COARSE_MULTIPLE = 512, 32, 64

_Range = tuple[int, int]  # the first number, and how many there are


@dataclass(frozen=True)
class PackedMicroBatch:
    """Sequences packed in order of length, so that attention takes equal lengths as one slice.

    In front of them there may be padding: sequences of one token. `tokens` and `positions` are [rows]; `restore`
    [tokens] holds, for every token in the order of the batch, its row in the packing (None where all rows are
    tokens and the two orders agree). Tokens that sequences share have one row together.
    """

    tokens: Tensor
    positions: Tensor
    restore: Tensor | None
    attend: PackedAttention | PrefixedAttention


@dataclass(frozen=True)
class SharedPrefix:
    """The sequences `members` of a batch begin with the same `length` tokens, and each has more."""

    members: range
    length: int


def pack_micro_batch(
    sequences: Sequence[Tensor], device: torch.device, *, shares_prefixes: bool = False, in_order: bool = False
) -> PackedMicroBatch:
    """Packs tensors [length] of tokens; none may be empty.

    With `shares_prefixes`, on the CPU: a common prefix of neighbours (the prompt of a group of responses) is computed
    once. The gradient of such a token is the sum over its sequences, as it is without sharing. `in_order`: see
    `PackedAttention`.
    """
    prefixes = shared_prefixes(sequences) if shares_prefixes and device.type == "cpu" else []
    # Whole sequences and prefixes in order of length, then the rests behind prefixes, in order of the prefix's length
    # and of their own.
    shared = {place: prefix for prefix in prefixes for place in prefix.members}
    pieces = [(len(sequence), False, i) for i, sequence in enumerate(sequences) if i not in shared]
    pieces += [(prefix.length, True, prefix.members[0]) for prefix in prefixes]
    pieces.sort()  # prefixes of a length are neighbours
    alone = {i: place for place, (_, is_prefix, i) in enumerate(pieces) if not is_prefix}
    owners = {i: place for place, (_, is_prefix, i) in enumerate(pieces) if is_prefix}
    behind = sorted((prefix.length, len(sequences[i]) - prefix.length, i) for i, prefix in shared.items())
    lengths = [length for length, _, _ in pieces]
    lengths_behind = [length for _, length, _ in behind]
    padding = _padding(sum(lengths) + sum(lengths_behind)) if device.type == "cpu" else 0
    starts = torch.tensor([padding, *lengths, *lengths_behind]).cumsum(0).tolist()
    rows_behind = {i: (starts[len(pieces) + k], length) for k, (_, length, i) in enumerate(behind)}

    def rows(i: int) -> list[_Range]:
        """The rows of the tokens of sequence `i`."""
        if i in alone:
            return [(starts[alone[i]], lengths[alone[i]])]
        return [(starts[owners[shared[i].members[0]]], shared[i].length), rows_behind[i]]

    restore = None
    if padding or prefixes or list(alone) != sorted(alone):
        restore = on_device(_joined([row for i in range(len(sequences)) for row in rows(i)]), device)
    positions = [(0, 1)] * padding + [(0, length) for length in lengths]
    positions += [(before, length) for before, length, _ in behind]
    tokens = [sequences[i][:length] for length, _, i in pieces] + [sequences[i][before:] for before, _, i in behind]
    suffixes = [Suffix(padding + owners[shared[i].members[0]], length) for _, length, i in behind]
    whole = [1] * padding + lengths
    return PackedMicroBatch(
        torch.cat([tokens[0].new_zeros(padding), *tokens]).to(device),
        on_device(_joined(positions), device),
        restore,
        PrefixedAttention(whole, suffixes, in_order=in_order)
        if prefixes
        else PackedAttention(whole, in_order=in_order),
    )


def _joined(ranges: Sequence[_Range]) -> Tensor:
    """The numbers of several ranges, one behind the other; not made one by one, as a batch may have a thousand."""
    first, lengths = np.array(ranges).T
    ends = lengths.cumsum()
    return torch.from_numpy(np.arange(ends[-1]) + (first - ends + lengths).repeat(lengths))


def _padding(tokens: int) -> int:
    """Rows of padding to add to `tokens` tokens."""
    if tokens <= _EXACT_ROWS:
        return 0
    return -tokens % (_FINE_MULTIPLE if tokens <= _FINE_ROWS else _COARSE_MULTIPLE)


def shared_prefixes(sequences: Sequence[Tensor]) -> list[SharedPrefix]:
    """Runs of neighbours that begin alike, none overlapping, in order.

    A sequence joins the run before it where that saves at least as many rows as the run saves without it.
    """
    arrays = [sequence.numpy() for sequence in sequences]
    found: list[SharedPrefix] = []
    first, length = 0, 0  # the run so far: from `first` on, `length` tokens alike
    for place in range(1, len(arrays) + 1):
        run = place - first
        common = 0
        if place < len(arrays):
            one, other = arrays[first], arrays[place]
            most = min(len(one), len(other)) - 1  # each has a token of its own
            most = most if run == 1 else min(most, length)
            differ = (one[:most] != other[:most]).nonzero()[0]
            common = int(differ[0]) if len(differ) else most
        if common >= SHORTEST_SHARED and run * common >= (run - 1) * length:
            length = common
            continue
        if run > 1:
            found.append(SharedPrefix(range(first, place), length))
        first, length = place, 0
    return found
