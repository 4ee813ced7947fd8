"""Causal attention on GPUs whose numbers for a token depend on its sequence alone: those of a decode step, for all
tokens of packed sequences."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.architecture.decoding import PAGE_TOKENS
from realhf.gpu.paged_attention import SPLIT_TOKENS, attend

_PARTS_BYTES = 2**28  # the results of all splits of a launch take at most this


@dataclass(frozen=True)
class PagesOnGpu:
    """The places of packed sequences in `pages` pages of their own, on the device.

    kept, places: [kept] int64, rows of the packing and where their keys and values lie: page * tokens in it + place.
    table, lengths: see `attend`, of each row of the packing.
    """

    pages: int
    kept: Tensor
    places: Tensor
    table: Tensor
    lengths: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """[rows, heads, head_dim] of query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim]."""
        (rows, heads, head_dim), kv_heads = query.shape, key.shape[1]
        assert rows == len(self.lengths)
        query, key, value = (x.contiguous() for x in (query, key, value))
        page, within = self.places // PAGE_TOKENS, self.places % PAGE_TOKENS
        pages = key.new_empty(2, self.pages, kv_heads, PAGE_TOKENS, head_dim)
        for store, new in zip(pages, (key, value), strict=True):
            store[page, :, within] = new.index_select(0, self.kept)
        # A token finds all before it in the pages: what the others write there meanwhile is what lies there.
        splits = -(-self.table.shape[1] * PAGE_TOKENS // SPLIT_TOKENS)
        at_once = max(1, _PARTS_BYTES // (heads * splits * head_dim * torch.float32.itemsize))
        out = torch.empty_like(query)
        for first in range(0, rows, at_once):
            at = slice(first, first + at_once)
            stores, table, lengths = (pages[0], pages[1]), self.table[at], self.lengths[at]
            out[at] = attend(stores, table, lengths, query[at], key[at], value[at], window)
        return out
