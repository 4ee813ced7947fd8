"""Activation recomputation: the backward pass runs a layer's forward pass again, instead of keeping activations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from realhf.architecture.compute import Recomputation


def run_layer(recomputation: Recomputation, layer: Callable[..., Tensor], *args: Any) -> Tensor:
    """`layer(*args)`; values and gradients do not depend on `recomputation`.

    "full" keeps only the layer's inputs (Chen et al., 2016). "selective" keeps the results of products and attention
    too, and recomputes the rest, which is cheap: norms, rotation, activation functions, residual sums, and sums over a
    tensor-parallel group (after Korthikanti et al., 2022, section 5). All ranks of a group recompute in one order, so
    their collectives match.
    """
    if recomputation == "off" or not torch.is_grad_enabled():
        return layer(*args)
    contexts = noop_context_fn if recomputation == "full" else _keeping_products
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
# oneDNN's products and our own, flash-attn's kernels and those behind `torch.nn.attention.varlen`.
_PRODUCT_NAMESPACES = {"mkldnn", "realhf", "flash_attn", "torch_attn"}


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in _PRODUCTS or operation.namespace in _PRODUCT_NAMESPACES
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


_keeping_products = partial(create_selective_checkpoint_contexts, _policy)
