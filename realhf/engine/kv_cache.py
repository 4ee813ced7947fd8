"""Keys and values of the sequences that are being generated, in pages, and the attention of a step over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.models.attention import PackedAttention

try:
    from realhf.engine import _kernels
except ImportError:  # not built: the same in torch's own operators, which copy the pages together
    _kernels = None

PAGE = 16  # tokens in a page; `csrc/kernels/paged_attention.h` has the same


@dataclass(frozen=True)
class DecodeRows:
    """The sequences that get one more token.

    `table` [rows, pages] int32 lists the pages of each in order (what lies behind its last page is not looked at) and
    `lengths` [rows] int64 the tokens in the cache, without the new one.
    """

    table: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class PrefillRows:
    """Packed tokens of whole sequences: `lengths` of the sequences, and where each token is kept.

    `places` [tokens] int64 holds page * PAGE + place in the page.
    """

    lengths: Sequence[int]
    places: Tensor


class KVCache:
    """The pages of one stage's layers.

    A layer's keys are [pages, kv_heads, head_dim, PAGE] and its values [pages, kv_heads, PAGE, head_dim]: what a decode
    step reads of a head in a page lies together, in the order in which it is multiplied.
    """

    def __init__(self, layers: range, pages: int, kv_heads: int, head_dim: int, like: Tensor):
        """`like` gives dtype and device."""
        self.pages, self.kv_heads, self.head_dim = pages, kv_heads, head_dim
        shape = (len(layers), pages, kv_heads)
        self._keys = like.new_empty((*shape, head_dim, PAGE))
        self._values = like.new_empty((*shape, PAGE, head_dim))
        self.kernels = _CppKernels(like.dtype) if _CppKernels.take(like) else _TorchKernels()
        if isinstance(self.kernels, _TorchKernels):  # they multiply what lies behind a sequence by zero weights
            self._keys.zero_()
            self._values.zero_()
        self.keys = dict(zip(layers, self._keys.unbind(), strict=True))
        self.values = dict(zip(layers, self._values.unbind(), strict=True))

    @property
    def size_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages, (from, to), in all layers."""
        if copies:
            sources, targets = torch.tensor(copies, device=self._keys.device).unbind(1)
            for store in (self._keys, self._values):
                store[:, targets] = store[:, sources]


class StepAttention:
    """The attention of one step: its rows are the new tokens of `decode`, then the packed sequences of `prefill`."""

    def __init__(self, cache: KVCache, decode: DecodeRows | None, prefill: PrefillRows | None):
        self.cache, self.decode, self.prefill = cache, decode, prefill
        self.packed = None if prefill is None else PackedAttention(list(prefill.lengths))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        """See `realhf.models.attention.Attention`; leaves `key` and `value` in the cache."""
        kernels, (keys, values) = self.cache.kernels, (self.cache.keys[layer], self.cache.values[layer])
        count = 0 if self.decode is None else len(self.decode.lengths)
        parts = []
        if self.decode is not None:
            parts.append(kernels.attend(keys, values, self.decode, query[:count], key[:count], value[:count], window))
        if self.prefill is not None and self.packed is not None:
            kernels.write(keys, values, self.prefill.places, key[count:], value[count:])
            parts.append(self.packed(layer, query[count:], key[count:], value[count:], window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _CppKernels:
    """Attention where the pages lie, each sequence at its own length; one thread."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = getattr(_kernels.DType, str(dtype).removeprefix("torch."))

    @staticmethod
    def take(like: Tensor) -> bool:
        has_dtype = like.dtype in (torch.float32, torch.float64, torch.bfloat16)
        return _kernels is not None and like.device.type == "cpu" and has_dtype

    def write(self, keys: Tensor, values: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
        key, value = key.contiguous(), value.contiguous()
        _check(keys, values, key, value)
        assert places.shape == key.shape[:1]
        assert places.dtype == torch.int64
        tokens, kv_heads, head_dim = key.shape
        _kernels.write(
            self.dtype, kv_heads, head_dim, keys.data_ptr(), values.data_ptr(),
            tokens, places.data_ptr(), key.data_ptr(), value.data_ptr(),
        )  # fmt: skip

    def attend(
        self,
        keys: Tensor,
        values: Tensor,
        rows: DecodeRows,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        _check(keys, values, key, value)
        count, kv_heads, head_dim = key.shape
        assert rows.table.is_contiguous()
        assert rows.table.dtype == torch.int32
        assert rows.lengths.dtype == torch.int64
        assert len(rows.table) == len(rows.lengths) == len(query) == count
        out = torch.empty_like(query)
        _kernels.attend(
            self.dtype, kv_heads, query.shape[1] // kv_heads, head_dim, keys.data_ptr(), values.data_ptr(),
            count, rows.table.data_ptr(), rows.table.shape[1], rows.lengths.data_ptr(),
            query.data_ptr(), key.data_ptr(), value.data_ptr(), head_dim**-0.5, window or 0, out.data_ptr(),
        )  # fmt: skip
        return out


class _TorchKernels:
    """The same on any device: the pages of a sequence are copied together, and shorter ones masked."""

    def write(self, keys: Tensor, values: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
        page, within = places // PAGE, places % PAGE
        keys[page, :, :, within] = key
        values[page, :, within] = value

    def attend(
        self,
        keys: Tensor,
        values: Tensor,
        rows: DecodeRows,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
    ) -> Tensor:
        last = rows.table.gather(1, (rows.lengths // PAGE)[:, None])[:, 0]
        self.write(keys, values, last * PAGE + rows.lengths % PAGE, key, value)
        known = int(rows.lengths.max()) // PAGE + 1
        # Behind its last page a row of the table may hold anything.
        is_used = torch.arange(known, device=keys.device) <= (rows.lengths // PAGE)[:, None]
        table = rows.table[:, :known].long().where(is_used, 0)
        own_keys = keys[table].permute(0, 2, 3, 1, 4).flatten(3)  # [rows, kv_heads, head_dim, tokens]
        own_values = values[table].transpose(1, 2).flatten(2, 3)  # [rows, kv_heads, tokens, head_dim]
        places = torch.arange(known * PAGE, device=keys.device)
        is_seen = places <= rows.lengths[:, None]
        if window is not None:
            is_seen &= places > rows.lengths[:, None] - window
        # Query heads that share a kv head stand where the query length would: no key is repeated.
        grouped = query.unflatten(1, (key.shape[1], -1))  # [rows, kv_heads, group, head_dim]
        out = F.scaled_dot_product_attention(
            grouped, own_keys.transpose(-1, -2), own_values, attn_mask=is_seen[:, None, None]
        )
        return out.flatten(1, 2)  # [rows, heads, head_dim]


def _check(keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
    """What the kernels take on trust."""
    _, kv_heads, head_dim, page = keys.shape
    assert page == PAGE == _kernels.PAGE
    assert values.shape == (len(keys), kv_heads, PAGE, head_dim)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert key.shape == value.shape == (len(key), kv_heads, head_dim), (key.shape, keys.shape)
    assert keys.dtype == values.dtype == key.dtype == value.dtype
