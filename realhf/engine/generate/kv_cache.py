"""Keys and values of the sequences that are being generated, in pages, and the attention of a step over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.cpu.huge_pages import empty_in_huge_pages
from realhf.engine.generate.paged_attention import DecodeRows, LayerPages, PagedKernels, paged_kernels
from realhf.models.attention import PackedAttention


@dataclass(frozen=True)
class PrefillRows:
    """Packed tokens of whole sequences: `lengths` of the sequences, and where each token is kept.

    `places` [tokens] int64 holds page * tokens in a page + place in the page.
    """

    lengths: Sequence[int]
    places: Tensor


class KVCache:
    """The pages of one stage's layers, as the kernels that attend over them want them."""

    def __init__(
        self,
        layers: range,
        pages: int,
        kv_heads: int,
        head_dim: int,
        like: Tensor,
        kernels: PagedKernels | None = None,
    ):
        """`like` gives dtype and device; `kernels`: those of `paged_kernels`, unless given."""
        self.pages, self.kernels = pages, kernels or paged_kernels(like, head_dim)
        keys_shape, values_shape = self.kernels.page_shapes(kv_heads, head_dim)
        self._keys = _empty_like(like, (len(layers), pages, *keys_shape))
        self._values = _empty_like(like, (len(layers), pages, *values_shape))
        self.clear()
        self.layers = dict(zip(layers, map(LayerPages, self._keys, self._values), strict=True))

    def clear(self) -> None:
        """Makes old values in the pages harmless to the next sequences."""
        if self.kernels.reads_behind:
            self._keys.zero_()
            self._values.zero_()

    @property
    def size_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages, (from, to), in all layers."""
        if copies:
            sources, targets = torch.tensor(copies, device=self._keys.device).unbind(1)
            for store in (self._keys, self._values):
                store[:, targets] = store[:, sources]


def _empty_like(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return empty_in_huge_pages(shape, like.dtype) if like.device.type == "cpu" else like.new_empty(shape)


class StepAttention:
    """The attention of one step: its rows are the new tokens of `decode`, then the packed sequences of `prefill`."""

    def __init__(
        self, cache: KVCache, decode: DecodeRows | None, prefill: PrefillRows | None, *, in_order: bool = False
    ):
        """`in_order`: see `PackedAttention`."""
        self.cache, self.decode, self.prefill = cache, decode, prefill
        self.packed = None if prefill is None else PackedAttention(list(prefill.lengths), in_order=in_order)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        """See `realhf.models.attention.Attention`; leaves `key` and `value` in the cache."""
        kernels, pages = self.cache.kernels, self.cache.layers[layer]
        count = 0 if self.decode is None else len(self.decode.lengths)
        parts = []
        if self.decode is not None:
            parts.append(kernels.attend(pages, self.decode, query[:count], key[:count], value[:count], window))
        if self.prefill is not None and self.packed is not None:
            kernels.write(pages, self.prefill.places, key[count:], value[count:])
            parts.append(self.packed(layer, query[count:], key[count:], value[count:], window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
