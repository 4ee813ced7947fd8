"""The product x W^T by the fastest kernel at hand: all matrix products with weights go through here.

On AMD CPUs MKL's float32 kernels use half of the vector width, oneDNN's all of it: 100 against 230 GFLOP/s a core of
an EPYC 9005, in the products of both gradients too. Where one weight serves many steps it is *packed* into the order in
which a kernel reads it: a kernel of our own on processors with AVX-512 (`realhf.cpu.products`), oneDNN's on others.
On an EPYC 9004 the first has about its full rate from 8 rows on, of which oneDNN's has 0.9 at 64 rows and half at 8.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from realhf.cpu import products
from realhf.cpu.products import PackedWeight

Packed = PackedWeight | Tensor  # a Tensor is in the order of oneDNN's kernels

# Below this many rows MKL's matrix-vector kernels win over oneDNN's with weights that are not packed.
_FEWEST_ROWS = 4
_FEWEST_PACKED_ROWS = 2  # of oneDNN's
# From here on oneDNN's blocks of rows and columns win over our own kernel, though they have to pack the weight first.
_MOST_OWN_ROWS = 256
# A weight's gradient sums over the rows; blocks of so many stay in a core's cache while they are read across.
_GRADIENT_ROWS = 512


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Packed | None = None) -> Tensor:
    """x W^T + bias, differentiable; which kernel computes it depends on device, dtype and rows alone.

    Args:
        x: [rows, in].
        weight: [out, in].
        bias: [out].
        packed: `pack(weight)` where that was kept; it must be as `weight` is now. Used where no gradient is asked for.

    Returns:
        [rows, out].
    """
    if packed is not None and takes_packed(packed, x, weight):
        return linear_packed(x, packed, bias)
    takes_gradient = _takes_gradient(x, weight)
    if not _is_for_onednn(x):
        return F.linear(x, weight, bias)
    return _OneDnnLinear.apply(x, weight, bias) if takes_gradient else _onednn(x, weight, bias)


def takes_packed(packed: Packed, x: Tensor, *weights: Tensor) -> bool:
    """Whether products of x [rows, in] with `weights` are to be computed from their packed form."""
    rows = x.shape[0]
    is_taken = rows <= _MOST_OWN_ROWS if isinstance(packed, PackedWeight) else rows >= _FEWEST_PACKED_ROWS
    return is_taken and not _takes_gradient(x, *weights)


def linear_packed(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """As `linear`, from the packed weight alone, where `takes_packed`."""
    return packed.product(x, bias) if isinstance(packed, PackedWeight) else _onednn(x, packed, bias)


def pack(weight: Tensor) -> Packed | None:
    """A copy of `weight` [out, in] in the best kernel's order, of about the same size; None where that does not help.

    bfloat16 goes through oneDNN by itself, but not packed.
    """
    packed = products.pack(weight)
    return pack_for_onednn(weight) if packed is None else packed


def pack_for_onednn(weight: Tensor) -> Tensor | None:
    """The same for oneDNN's kernels, whatever else this processor has."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or not _has_onednn():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x [out, in], the gradient of the weight of `linear`, from grad [rows, out] and x [rows, in]."""
    if not _is_for_onednn(x):
        return grad.t() @ x
    total = None
    for grad_rows, x_rows in zip(grad.split(_GRADIENT_ROWS), x.split(_GRADIENT_ROWS), strict=True):
        part = _onednn(grad_rows.t(), x_rows.t(), None)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _takes_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _is_for_onednn(x: Tensor) -> bool:
    is_candidate = x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == 2
    return is_candidate and x.shape[0] >= _FEWEST_ROWS and _has_onednn()


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available()


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # What torch's compiler makes of a linear layer on the CPU.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    """The operator has no derivative of its own; both gradients are products of the same kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _onednn(grad, weight.t(), None) if needs_x else None,  # [rows, in]
            weight_gradient(grad, x) if needs_weight else None,  # [out, in]
            grad.sum(0) if needs_bias else None,
        )
