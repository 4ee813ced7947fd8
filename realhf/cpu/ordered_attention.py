"""Causal attention on the CPU whose numbers for a token depend on its sequence alone: those of a decode step, for all
tokens of packed sequences (`csrc/kernels/paged_attention.h`)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from realhf.architecture.decoding import PAGE_TOKENS
from realhf.cpu.paged_attention import attend, page_shapes, write


class PackedPages:
    """The places of packed sequences in pages of their own.

    Each sequence lists the rows of its tokens in the packing, in order; those from `first` on attend.
    """

    def __init__(self, sequences: Sequence[tuple[np.ndarray, int]], rows: int):
        """`sequences`: (rows of the tokens, how many of them do not attend); each of `rows` rows attends once."""
        page = PAGE_TOKENS  # the kernels for GPUs have the same
        pages = [-(-len(tokens) // page) for tokens, _ in sequences]
        starts = np.concatenate([[0], np.cumsum(pages)])
        self.pages = int(starts[-1])
        self.kept = torch.from_numpy(np.concatenate([tokens for tokens, _ in sequences]))
        places = [start * page + np.arange(len(tokens)) for start, (tokens, _) in zip(starts, sequences, strict=False)]
        self.places = torch.from_numpy(np.concatenate(places))
        table, lengths = np.zeros((rows, max(pages)), dtype=np.int32), np.zeros(rows, dtype=np.int64)
        for start, count, (tokens, first) in zip(starts, pages, sequences, strict=False):
            table[tokens[first:], :count] = np.arange(start, start + count)
            lengths[tokens[first:]] = np.arange(first, len(tokens))
        self.table, self.lengths = torch.from_numpy(table), torch.from_numpy(lengths)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """[rows, heads, head_dim] of query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim]."""
        query, key, value = (x.contiguous() for x in (query, key, value))
        keys, values = (key.new_empty(self.pages, *shape) for shape in page_shapes(*key.shape[1:]))
        write(keys, values, self.places, *(x.index_select(0, self.kept) for x in (key, value)))
        return attend((keys, values), (self.table, self.lengths), query, key, value, window)
