"""Products and sums whose bits do not depend on how many ranks there are, nor on how many rows are computed together.

The kernels of `realhf.cpu.products` and, on GPUs, `realhf.gpu.sums` make each number as one sum in the order of the
inputs, whatever the other rows and outputs. Tensor parallelism divides sums over ranks: each rank has neighbouring
`leaves` of the model, every leaf is summed up alone, and one tree adds all leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from realhf.cpu import products
from realhf.cpu.products import PackedWeight
from realhf.parallel.collectives import gathered
from realhf.parallel.gradients import gradient_sink


def on_gpu(x: Tensor) -> bool:
    """Whether sums of x are made by the kernels of `realhf.gpu`."""
    return x.is_cuda


def tree_sum(parts: Tensor) -> Tensor:
    """The sum of parts [n, ...] along a tree of pairs (an odd number: from left to right), in at least float32, rounded
    once."""
    total = list(parts.to(torch.promote_types(parts.dtype, torch.float32)))
    while len(total) > 1:
        if len(total) % 2:
            total = [sum(total[1:], start=total[0])]
        else:
            total = [left + right for left, right in zip(total[::2], total[1::2], strict=True)]
    return total[0].to(parts.dtype)


class PackedWeights:
    """Packed forms of weights that many products use: those made within `kept`."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.Size, tuple[int, ...]], PackedWeight] | None = None

    def keep(self) -> None:
        """From now on, until `forget`, weights do not change."""
        self._kept = {}

    def forget(self) -> None:
        self._kept = None

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias [rows, out] of x [rows, in] and weight [out, in]; every number is one sum over the inputs."""
        if self._kept is None or on_gpu(x):
            return product(x, weight, bias)
        key = weight.data_ptr(), weight.shape, weight.stride()
        packed = self._kept.get(key) or products.pack(_in_pairs(weight))
        assert packed is not None, "processors and dtypes without the kernel are refused before"
        self._kept[key] = packed
        return packed.product(_in_pairs(x), bias)


@dataclass(frozen=True)
class Leaves:
    """The parts of a model's divided sums that this rank has: `own` of them, and the ranks of `group` as many each.

    group: the tensor-parallel group; None: this rank has all.
    packed: the weights of products, in the kernel's order.
    """

    own: int
    group: dist.ProcessGroup | None = None
    packed: PackedWeights = field(default_factory=PackedWeights)

    def sum(self, parts: Tensor) -> Tensor:
        """[...] the same bits on every rank, from this rank's parts [own, ...]."""
        return tree_sum(parts if self.group is None else gathered(parts, self.group).flatten(0, 1))

    def enter(self, x: Tensor) -> Tensor:
        """[own, ...]: `x` for each part; its gradient is the sum over the parts of all ranks."""
        entered: Tensor = _Enter.apply(x, self)
        return entered

    def leave(self, parts: Tensor) -> Tensor:
        """`sum`, with gradient; every rank computes all that follows alike."""
        total: Tensor = _Leave.apply(parts, self)
        return total


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaves: Leaves) -> Tensor:
        ctx.leaves = leaves
        return x.expand(leaves.own, *x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        return ctx.leaves.sum(grads), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, leaves: Leaves) -> Tensor:
        ctx.own = leaves.own
        return leaves.sum(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.expand(ctx.own, *grad.shape), None


def _in_pairs(x: Tensor) -> Tensor:
    """x [rows, width], with a zero behind each row of an odd width in bfloat16, which is multiplied in pairs."""
    return F.pad(x, (0, 1)) if x.dtype == torch.bfloat16 and x.shape[1] % 2 else x


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`PackedWeights.product`, of a weight that is used once."""
    if on_gpu(x):
        from realhf.gpu import sums

        return sums.product(x, weight, bias)
    return products.product_once(_in_pairs(x), _in_pairs(weight), bias)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x [out, in] of grad [rows, out] and x [rows, in]: each number one sum over the rows, in their order."""
    return product(grad.t().contiguous(), x.t())


def column_sums(x: Tensor) -> Tensor:
    """The sums [width] of the columns of x [rows, width], whatever columns are beside them: torch adds up those behind
    the last whole vector in another order."""
    return weight_gradient(x, x.new_ones(len(x), 1))[:, 0]


def row_sums(x: Tensor) -> Tensor:
    """The sums [...] of x [..., width] in float32, whatever rows are beside them; differentiable. On GPUs alone."""
    sums: Tensor = _RowSums.apply(x)
    return sums


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from realhf.gpu import sums

        ctx.like = x.shape, x.dtype
        return sums.row_sums(x.reshape(-1, x.shape[-1])).view(x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return grad.to(dtype)[..., None].expand(shape)


def add_rows(total: Tensor, index: Tensor, x: Tensor) -> None:
    """Adds rows of x [rows, width] to those rows of `total` [n, width] that `index` [rows] names, in their order."""
    if on_gpu(x):
        from realhf.gpu import sums

        sums.add_rows(total, index, x)
    else:
        total.index_add_(0, index, x.to(total.dtype))


def columns(x: Tensor, leaves: Leaves, *linears: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """x W^T + bias [rows, out] for each weight and bias, differentiable, of x [own, rows, in] that `Leaves.enter` made
    and this rank's outputs [out, in] of each weight, `own` equal parts of them."""
    weights, biases = zip(*linears, strict=True)
    made = _Columns.apply(x, leaves.packed, len(weights), *weights, *(bias for bias in biases if bias is not None))
    return list(made)


def row(x: Tensor, weight: Tensor, leaves: Leaves) -> Tensor:
    """x W^T by parts of the inputs [own, rows, out], differentiable, of x [rows, in] and weight [out, in]: for
    `Leaves.leave`."""
    made: Tensor = _Row.apply(x, weight, leaves.own, leaves.packed)
    return made


def _given(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Adds a gradient of `weight` where it is wanted; else returns it."""
    sink = gradient_sink(weight)
    if sink is None:
        return gradient
    sink.add_(gradient)
    return None


class _Columns(torch.autograd.Function):
    """(x, packed, how many weights, the weights, their biases or none) -> the outputs of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: PackedWeights, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.weights, biases = parameters[:count], parameters[count:] or (None,) * count
        ctx.has_biases, ctx.rows = bool(parameters[count:]), [len(weight) for weight in ctx.weights]
        ctx.save_for_backward(x, *ctx.weights)
        return tuple(packed.product(x[0], weight, bias) for weight, bias in zip(ctx.weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, _, needs_weight, *_ = ctx.needs_input_grad
        of_x: Tensor | None = None
        of_weights: list[Tensor | None] = [None] * len(weights)
        of_biases: list[Tensor | None] = []
        if needs_x:
            # Part by part: of all weights the same part of the outputs.
            parts = zip(*(grad.chunk(len(x), dim=-1) for grad in grads), strict=True)
            rows = zip(*(weight.chunk(len(x)) for weight in weights), strict=True)
            of_x = torch.stack([product(_joined(g, -1), _joined(w, 0).t()) for g, w in zip(parts, rows, strict=True)])
        if needs_weight:
            of_all = weight_gradient(_joined(grads, -1), x[0]).split(ctx.rows)
            of_weights = [_given(weight, part) for weight, part in zip(ctx.weights, of_all, strict=True)]
        if ctx.has_biases:
            of_biases = [column_sums(grad) for grad in grads]
        return of_x, None, None, *of_weights, *of_biases


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=dim)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, own: int, packed: PackedWeights) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        parts = zip(x.chunk(own, dim=-1), weight.chunk(own, dim=-1), strict=True)
        return torch.stack([packed.product(of_part, part) for of_part, part in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _, _ = ctx.needs_input_grad
        own = len(grads)
        of_x = of_weight = None
        # All parts have the same gradient then, and a number does not depend on its neighbours.
        if own > 1 and grads.stride(0) == 0:
            grads, own = grads[:1], 1
        if needs_x:
            parts = zip(grads, weight.chunk(own, dim=-1), strict=True)
            of_x = torch.cat([product(grad, part.t()) for grad, part in parts], dim=-1)
        if needs_weight:
            parts = zip(grads, x.chunk(own, dim=-1), strict=True)
            of_weight = torch.cat([weight_gradient(grad, part) for grad, part in parts], dim=-1)
            of_weight = _given(ctx.weight, of_weight)
        return of_x, of_weight, None, None
