"""Decode steps of a model on the CPU with one kernel a layer, where its layers are of the kind that the kernel has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from realhf.cpu import products
from realhf.cpu.decode_layer import LayerCache, LayerKernel, LayerWeights
from realhf.cpu.products import PackedWeight
from realhf.engine.generate.kv_cache import StepAttention
from realhf.engine.generate.paged_attention import CppKernels
from realhf.models.decoder import Decoder, DecoderLayer
from realhf.models.mlp import GatedMLP
from realhf.models.norms import RMSNorm
from realhf.parallel.tensor import RowParallelLinear


class DecodeLayers:
    """Computes layers in place of their modules; prefills go through the modules.

    Results are those of the modules bit by bit. Intermediate ones stay in one buffer for all layers and steps.
    """

    def __init__(self, kernels: dict[int, LayerKernel], otherwise: Callable[..., Tensor] | None):
        """`otherwise` computes in place of the modules where there is no kernel."""
        self.kernels, self._otherwise = kernels, otherwise
        self._buffer = torch.empty(0)

    def __call__(self, layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, attend: Any, *rest: Any) -> Tensor:
        """As `DecoderLayer.forward`; x is used up."""
        index = layer.self_attn.layer
        is_decode = isinstance(attend, StepAttention) and attend.prefill is None
        if not is_decode or index not in self.kernels or not isinstance(attend.cache.kernels, CppKernels):
            return (self._otherwise or layer.__class__.__call__)(layer, x, cos, sin, attend, *rest)
        kernel, pages, rows = self.kernels[index], attend.cache.layers[index], attend.decode
        if self._buffer.numel() < kernel.buffer_elements(len(x)) or self._buffer.dtype != x.dtype:
            self._buffer = x.new_empty(kernel.buffer_elements(len(x)))
        cache = LayerCache(keys=pages.keys, values=pages.values, table=rows.table, lengths=rows.lengths)
        kernel(x, cos, sin, cache, self._buffer)
        return x


def decode_layers(decoder: Decoder) -> Callable[..., Tensor] | None:
    """The fused decode step of the layers, for a decoder with packed weights, valid until they are unpacked; where no
    layer has a kernel, what computes the layers anyway."""
    kernels = {}
    for layer in decoder.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        weights = _weights(decoder, layer)
        if weights is not None:
            attention = layer.self_attn
            kv_heads = attention.k_proj.weights()[0].shape[0] // attention.head_dim
            kernels[attention.layer] = LayerKernel(
                weights, kv_heads=kv_heads, head_dim=attention.head_dim, window=attention.window
            )
    return DecodeLayers(kernels, decoder.infers_layer) if kernels else decoder.infers_layer


def _weights(decoder: Decoder, layer: DecoderLayer) -> LayerWeights | None:
    """None for layers of another kind, those divided over ranks, and weights that are not packed for our kernel."""
    config, attention, mlp = decoder.config, layer.self_attn, layer.mlp
    input_norm, post_norm = layer.input_layernorm, layer.post_attention_layernorm
    if not (isinstance(mlp, GatedMLP) and isinstance(input_norm, RMSNorm) and isinstance(post_norm, RMSNorm)):
        return None
    leaves = 1 if decoder.leaves is None else decoder.leaves.own
    output, down = (_by_parts(linear, leaves) for linear in (attention.o_proj, mlp.down_proj))
    packed = (attention.joined.packed, output, mlp.joined.packed, down)
    is_plain = attention.group is None and config.positions == "rotary" and not config.qk_norm
    has_bias = any(each.bias is not None for each in (attention.o_proj, mlp.gate_proj, mlp.down_proj))
    if not is_plain or has_bias or config.activation != "silu":
        return None
    ours = [weight for weight in packed if isinstance(weight, PackedWeight)]
    if len(ours) < len(packed):
        return None
    qkv, output, gate_up, down = ours
    return LayerWeights(
        input_norm=input_norm.weight.detach(),
        qkv=qkv,
        qkv_bias=attention.joined.bias,
        output=output,
        post_norm=post_norm.weight.detach(),
        gate_up=gate_up,
        down=down,
        epsilon=config.rms_norm_eps,
        leaves=leaves,
    )


def _by_parts(linear: RowParallelLinear, parts: int) -> PackedWeight | None:
    """The packed weight; of several parts of its columns each packed alone, one behind the other."""
    if parts == 1 or linear.weight is None:
        return linear.packed
    packed = [products.pack(part) for part in linear.weight.chunk(parts, dim=1)]
    ours = [part for part in packed if part is not None]
    if len(ours) < parts:
        return None
    out, width = linear.weight.shape
    return PackedWeight(out, width, linear.weight.dtype, torch.cat([part.data for part in ours]))
