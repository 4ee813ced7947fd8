"""Sequence parallelism: between tensor-parallel products every rank has a part of the tokens (Korthikanti et al., 2022,
section 4.2.2).

Tokens are all-gathered before column-parallel products and reduce-scattered after row-parallel products. Together these
move the bytes of the all-reduce that they replace. Norms and residual sums, and the activations that they keep, are
divided over the ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.parallel.collectives import gathered, reduce_scatter_tensor
from realhf.parallel.regions import copy_to_group, sum_over_group


@dataclass(frozen=True)
class TokenShards:
    """The tokens of a micro-batch, divided over a tensor-parallel group into consecutive parts.

    If the group's size does not divide the tokens, the last parts are shorter or empty, and collectives pad them.
    """

    group: dist.ProcessGroup
    tokens: int

    @property
    def longest(self) -> int:
        return -(-self.tokens // dist.get_world_size(self.group))

    @property
    def own(self) -> slice:
        """The tokens of this rank."""
        start = min(dist.get_rank(self.group) * self.longest, self.tokens)
        return slice(start, min(start + self.longest, self.tokens))

    @property
    def count(self) -> int:
        """How many tokens this rank has."""
        return self.own.stop - self.own.start


def enter(x: Tensor, group: dist.ProcessGroup | None, shards: TokenShards | None) -> Tensor:
    """The input of a column-parallel product: x of all tokens [tokens, ...], equal on all ranks.

    The gradient of x is summed over the products of all ranks.
    """
    return copy_to_group(x, group) if shards is None else _Gather.apply(x, shards)


def leave(x: Tensor, group: dist.ProcessGroup | None, shards: TokenShards | None) -> Tensor:
    """The sum over the group of partial products x [tokens, ...]; with `shards`, for this rank's tokens."""
    return sum_over_group(x, group) if shards is None else _SumOfOwn.apply(x, shards)


def gather_outputs(x: Tensor, shards: TokenShards | None) -> Tensor:
    """Gathers x [own tokens, ...] to all tokens, for a loss that every rank computes alike from all of them."""
    return x if shards is None else _GatherForLoss.apply(x, shards)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: TokenShards) -> Tensor:
        ctx.shards = shards
        return _all_gather(x, shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.shards), None


class _SumOfOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: TokenShards) -> Tensor:
        ctx.shards = shards
        return _reduce_scatter(x, shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.shards), None


class _GatherForLoss(_Gather):
    """The gradient needs no sum: every rank has computed all of it."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.shards.own], None


def _all_gather(x: Tensor, shards: TokenShards) -> Tensor:
    """[tokens, ...] from this rank's [count, ...]."""
    if len(x) < shards.longest:
        x = torch.cat([x, x.new_zeros(shards.longest - len(x), *x.shape[1:])])
    return gathered(x, shards.group).flatten(0, 1)[: shards.tokens]  # padding is behind the last token only


def _reduce_scatter(x: Tensor, shards: TokenShards) -> Tensor:
    """The sum over the group of this rank's tokens [count, ...], from every rank's [tokens, ...]."""
    padding = dist.get_world_size(shards.group) * shards.longest - len(x)
    if padding:
        x = torch.cat([x, x.new_zeros(padding, *x.shape[1:])])
    own = x.new_empty(shards.longest, *x.shape[1:])
    reduce_scatter_tensor(own, x.contiguous(), group=shards.group)
    return own[: shards.count]
