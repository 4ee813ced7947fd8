"""Where tensor-parallel computation begins and ends: identities and sums that are each other's gradient (Megatron-LM,
section 3)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.parallel.collectives import gathered


class _CopyToGroup(torch.autograd.Function):
    """Identity forward, sum over the group backward: stands before a column-parallel linear.

    The sum is made in a copy, since autograd may have given the same gradient to another function.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOverGroup(torch.autograd.Function):
    """Sum over the group forward, identity backward: stands behind a row-parallel linear.

    The sum is made in a copy, since selective recomputation keeps x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherLastDim(torch.autograd.Function):
    """Concatenation of the ranks' last dimensions forward, the own part of the gradient backward.

    The backward is right because every rank computes the same loss from the gathered tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.width, ctx.index = x.shape[-1], dist.get_rank(group)
        return gathered(x, group).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.index * ctx.width, ctx.width), None


def copy_to_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return x if group is None else _CopyToGroup.apply(x, group)


def sum_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Without gradients the sum takes the place of x."""
    if group is None:
        return x
    if torch.is_grad_enabled():
        return _SumOverGroup.apply(x, group)
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def gather_last_dim(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return x if group is None else _GatherLastDim.apply(x, group)
