"""A decoder layer's decode step as one kernel on the CPU (`csrc/kernels/decode_layer.h`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.cpu.native import DTYPES, kernels
from realhf.cpu.products import PackedWeight


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """The weights of a layer with RMS norms, rotary positions and a gated SiLU MLP, all of one dtype.

    Norms are [hidden]; `qkv_bias` has the biases of query, key and value end to end, None if there are none. `leaves`:
    equal parts of the inputs of `output` and `down`, each packed alone, whose products are added up in a tree.
    """

    input_norm: Tensor
    qkv: PackedWeight
    qkv_bias: Tensor | None
    output: PackedWeight
    post_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    epsilon: float
    leaves: int = 1


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """A layer's keys and values, and the pages that each row of a decode step has of them.

    keys, values: the layer's pages, see `realhf.cpu.paged_attention`.
    table, lengths: see `realhf.engine.generate.paged_attention.DecodeRows`.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor


class LayerKernel:
    """One layer. `window`: how many tokens a token attends to at most; None: all."""

    def __init__(self, weights: LayerWeights, *, kv_heads: int, head_dim: int, window: int | None):
        self.weights = weights  # they stay where they are as long as this lives
        self.kv_heads, self.head_dim, self.window = kv_heads, head_dim, window
        self.hidden, self.dtype = weights.qkv.width, weights.qkv.dtype
        heads = weights.output.width // head_dim
        assert weights.qkv.out == (heads + 2 * kv_heads) * head_dim
        assert weights.gate_up.out == 2 * weights.down.width
        self._shape = kernels.LayerShape(
            hidden=self.hidden,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            head_dim=head_dim,
            inner=weights.down.width,
            leaves=weights.leaves,
        )
        self._addresses = kernels.LayerWeights(
            input_norm=weights.input_norm.data_ptr(),
            qkv=weights.qkv.data.data_ptr(),
            qkv_bias=0 if weights.qkv_bias is None else weights.qkv_bias.data_ptr(),
            output=weights.output.data.data_ptr(),
            post_norm=weights.post_norm.data_ptr(),
            gate_up=weights.gate_up.data.data_ptr(),
            down=weights.down.data.data_ptr(),
            epsilon=weights.epsilon,
        )

    def buffer_elements(self, rows: int) -> int:
        """Elements of the buffer, in the layer's dtype, for the intermediate results of `rows` rows."""
        return rows * self._shape.buffer

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, buffer: Tensor) -> None:
        """Replaces x by the output of the layer, and writes the keys and values of the new tokens into their pages.

        Args:
            x: hidden states [rows, hidden], one token a row.
            cos, sin: rotary tables of the tokens' positions, [rows, 1, head_dim].
            buffer: at least `buffer_elements(rows)` elements.
        """
        rows = len(x)
        keys, values, table, lengths = cache.keys, cache.values, cache.table, cache.lengths
        assert x.shape == (rows, self.hidden)
        assert cos.shape == sin.shape == (rows, 1, self.head_dim)
        assert keys.shape[1:] == (self.kv_heads, self.head_dim, kernels.PAGE)
        assert values.shape == (len(keys), self.kv_heads, kernels.PAGE, self.head_dim)
        assert len(table) == len(lengths) == rows
        assert table.dtype == torch.int32
        assert lengths.dtype == torch.int64
        assert buffer.numel() >= self.buffer_elements(rows)
        assert all(t.dtype == self.dtype for t in (x, cos, sin, keys, values, buffer))
        assert all(t.is_contiguous() for t in (x, cos, sin, keys, values, table, lengths, buffer))
        kernels.decode_layer(
            DTYPES[self.dtype], self._shape, self._addresses, x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            keys.data_ptr(), values.data_ptr(), len(keys), rows, table.data_ptr(), table.shape[1],
            lengths.data_ptr(), self.window or 0, buffer.data_ptr(),
        )  # fmt: skip
