"""Causal attention over packed sequences, some with the same first tokens, which are computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.cpu.ordered_attention import PackedPages
from realhf.models.attention import PackedAttention, attend_in_order


@dataclass(frozen=True)
class Suffix:
    """The tokens of a sequence behind a prefix that it shares: `prefix` is the prefix's place among the whole
    sequences of the packing, `length` the suffix's own tokens."""

    prefix: int
    length: int


class PrefixedAttention:
    """Causal self-attention inside each sequence, where the responses to a prompt share the prompt's rows.

    The packing has whole sequences first (`lengths`; a prefix is one of them), behind them the suffixes. A suffix
    attends to its prefix and to itself. Suffixes of equal length behind prefixes of equal length go through one call;
    they are neighbours, and so are their prefixes. For the scaled dot products of torch, without windows.
    """

    def __init__(self, lengths: Sequence[int], suffixes: Sequence[Suffix], *, in_order: bool = False):
        self.whole = PackedAttention(lengths)
        self.in_order = in_order
        self.suffixes = list(suffixes)
        self._starts = [0, *accumulate(lengths)]
        self._masks: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @property
    def lengths(self) -> list[int]:
        """Rows of each whole sequence, then of each suffix."""
        return [*self.whole.lengths, *(suffix.length for suffix in self.suffixes)]

    @cached_property
    def runs(self) -> list[tuple[int, int, list[int]]]:
        """Neighbours of equal lengths: (tokens of a prefix, of a suffix, the suffixes' prefixes)."""
        runs = groupby(self.suffixes, lambda suffix: (self.whole.lengths[suffix.prefix], suffix.length))
        return [(prefix, length, [suffix.prefix for suffix in run]) for (prefix, length), run in runs]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        assert window is None, "shared prefixes are for attention without windows"
        if self.in_order:
            return attend_in_order(self.pages, self._by_length, query, key, value, window)
        return self._by_length(query, key, value)

    @cached_property
    def pages(self) -> PackedPages:
        """See `PackedAttention.pages`."""
        starts, rows = self._starts, []
        for first, length in zip(starts, self.whole.lengths, strict=False):
            rows.append((np.arange(first, first + length), 0))
        end = starts[-1]
        for suffix in self.suffixes:
            prefix = rows[suffix.prefix][0]
            rows.append((np.concatenate([prefix, np.arange(end, end + suffix.length)]), len(prefix)))
            end += suffix.length
        return PackedPages(rows, end)

    def _by_length(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dtype = query.dtype
        if dtype == torch.bfloat16 and torch.is_grad_enabled() and query.requires_grad:
            # As in `PackedAttention`: the CPU kernel's backward pass is slow in bfloat16.
            query, key, value = query.float(), key.float(), value.float()
        sizes = [self._starts[-1], *(length * len(prefixes) for _, length, prefixes in self.runs)]
        # Split, not sliced: the gradient of a slice is as large as the whole tensor.
        (q, *queries), (k, *keys), (v, *values) = (x.split(sizes) for x in (query, key, value))
        parts = [self.whole(0, q, k, v)]
        for run, *own in zip(self.runs, queries, keys, values, strict=True):
            parts.append(self._suffixes(run, k, v, *own))
        return torch.cat(parts).to(dtype)

    def _suffixes(
        self, run: tuple[int, int, list[int]], whole_k: Tensor, whole_v: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """[tokens of the run's suffixes, heads, head_dim]; `whole_k` and `whole_v` are of the whole sequences."""
        prefix, length, owners = run
        count, first, last = len(owners), min(owners), max(owners)
        places = torch.tensor(owners) - first
        rows = slice(self._starts[first], self._starts[last + 1])

        def behind(whole: Tensor, own: Tensor) -> Tensor:
            """[suffixes, kv_heads, prefix + length, head_dim]."""
            prefixes = whole[rows].unflatten(0, (-1, prefix)).index_select(0, places)
            return torch.cat([prefixes, own.unflatten(0, (count, length))], dim=1).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            q.unflatten(0, (count, length)).transpose(1, 2),
            behind(whole_k, k),
            behind(whole_v, v),
            self._mask(prefix, length, q.dtype),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, prefix: int, length: int, dtype: torch.dtype) -> Tensor:
        """[length, prefix + length], added to the scores; made once for all layers."""
        if (mask := self._masks.get((prefix, length, dtype))) is None:
            is_later = torch.ones(length, prefix + length, dtype=torch.bool).triu(prefix + 1)
            mask = torch.zeros(is_later.shape, dtype=dtype).masked_fill_(is_later, -torch.inf)
            self._masks[prefix, length, dtype] = mask
        return mask
