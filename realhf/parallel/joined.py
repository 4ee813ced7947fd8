"""Linears of one input, computed as one product where their weights lie side by side in memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from realhf.cpu.products import PackedWeight, pack
from realhf.parallel.gradients import gradient_sink
from realhf.parallel.linear import add_weight_gradient, linear, takes_packed, weight_gradient
from realhf.parallel.tensor import ColumnParallelLinear
from realhf.parallel.views import side_by_side


class JoinedLinears:
    """Column-parallel linears of one input: one product with their packed weights, or with a view of all of them. Where
    the weights are cut, or padding lies between them, each is multiplied alone."""

    def __init__(self, *linears: ColumnParallelLinear):
        self.linears = linears
        self.packed: PackedWeight | None = None
        self.bias: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """[tokens, out / tp] each, from x [tokens, in]."""
        weights = [weight for each in self.linears for weight in each.weights()]
        if self.packed is not None and takes_packed(x, *weights):
            sizes = [weight.shape[0] for weight in weights]
            return self.packed.product(x, self.bias).split(sizes, dim=-1)
        if is_better_alone(x):
            return self._alone(x)
        biases = [each.bias for each in self.linears if each.bias is not None]
        weight, bias = self._weight(), side_by_side(biases, 0) if biases else None
        if weight is None or (biases and bias is None):
            return self._alone(x)
        return _Joined.apply(x, weight.detach(), None if bias is None else bias.detach(), *weights, *biases)

    def _alone(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(each(x) for each in self.linears)

    def _weight(self) -> Tensor | None:
        """[sum of out / tp, in], a view."""
        weights = [each.weight for each in self.linears if each.weight is not None]
        return side_by_side(weights, 0) if len(weights) == len(self.linears) else None

    def pack(self) -> None:
        """As `pack` of a linear, for all weights together."""
        if any(each.weight is None for each in self.linears):
            return
        found = self._weight()
        self.packed = pack(torch.cat([w for each in self.linears for w in each.weights()]) if found is None else found)
        biases = [each.bias.detach() for each in self.linears if each.bias is not None]
        assert len(biases) in (0, len(self.linears))
        self.bias = torch.cat(biases) if biases else None

    def unpack(self) -> None:
        self.packed = self.bias = None


def is_better_alone(x: Tensor) -> bool:
    """Whether products of x [rows, in] with weights that are not packed are made one after the other.

    On the CPU one product had 0.99 to 1.00 of the speed of several in float32 and 0.90 to 0.95 in bfloat16, in training
    and inference (2 layers of 256 to 896), and oneDNN needs gradients whose rows are contiguous. float64 is for tests,
    and is computed there as on a GPU.
    """
    return x.device.type == "cpu" and x.dtype != torch.float64


class _Joined(torch.autograd.Function):
    """(x [rows, in], weight [out, in] and bias [out] of all linears, those of each) -> the outputs of each.

    The gradients of the outputs are one matrix, without a copy where they were made side by side. The weights' gradient
    is one product, added to `grad` directly where it may be (`realhf.parallel.gradients`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *each: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        count = len(each) if bias is None else len(each) // 2
        ctx.weights, ctx.biases, ctx.rows = each[:count], each[count:], [len(w) for w in each[:count]]
        return linear(x, weight, bias).split(ctx.rows, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, _, needs_weight, *_ = ctx.needs_input_grad
        found = side_by_side(grads, 1)
        grad = torch.cat(grads, dim=-1) if found is None else found  # [rows, out]
        of_x = linear(grad, weight.t()) if needs_x else None  # [rows, in]
        of_weights: Sequence[Tensor | None] = [None] * len(ctx.weights)
        of_biases: Sequence[Tensor | None] = [None] * len(ctx.biases)
        if needs_weight:
            sink, bias_sink = _sink(ctx.weights), _sink(ctx.biases)
            if sink is not None:
                add_weight_gradient(sink, grad, x)
            else:
                of_weights = weight_gradient(grad, x).split(ctx.rows)
            if bias_sink is not None:
                bias_sink.add_(grad.sum(0))
            elif ctx.biases:
                of_biases = grad.sum(0).split(ctx.rows)
        return of_x, None, None, *of_weights, *of_biases


def _sink(parameters: Sequence[Tensor]) -> Tensor | None:
    """Where the gradients of all may be added as one."""
    sinks = [sink for sink in map(gradient_sink, parameters) if sink is not None]
    return side_by_side(sinks, 0) if sinks and len(sinks) == len(parameters) else None
