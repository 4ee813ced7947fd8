"""Tensor parallelism: linears and embeddings over plain local tensors (Megatron-LM, section 3).

A `group` of None means one rank: the same classes are then the ordinary layers.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from realhf.parallel.gradients import gradient_sink
from realhf.parallel.linear import Packed, linear, linear_packed, pack, takes_packed
from realhf.parallel.sequence import TokenShards, leave


class ColumnParallelLinear(nn.Module):
    """x W^T + b with the rows of W (the outputs) and b divided over the group. The caller copies x to the group."""

    def __init__(self, weight_shape: tuple[int, ...], *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weight_shape))  # [out / tp, in]
        self.bias = nn.Parameter(torch.empty(weight_shape[0])) if bias else None  # [out / tp]
        self.packed: Packed | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, packed=self.packed)  # [tokens, out / tp]

    def pack(self) -> None:
        """Keeps a packed copy of the weight until `unpack`, for many steps with one weight."""
        self.packed = pack(self.weight)

    def unpack(self) -> None:
        self.packed = None


class RowParallelLinear(nn.Module):
    """x W^T + b with the columns of W (the inputs) divided over the group; the partial products are summed.

    Every rank holds b and adds it to the sum.
    """

    def __init__(self, weight_shape: tuple[int, ...], group: dist.ProcessGroup | None, *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weight_shape))  # [out, in / tp]
        self.bias = nn.Parameter(torch.empty(weight_shape[0])) if bias else None  # [out]
        self.packed: Packed | None = None
        self.group = group

    def forward(self, x: Tensor, shards: TokenShards | None = None) -> Tensor:
        return self.finished(self.product(x), shards)

    def product(self, x: Tensor) -> Tensor:
        """This rank's term of x W^T, [tokens, out]."""
        return linear(x, self.weight, packed=self.packed)

    def finished(self, product: Tensor, shards: TokenShards | None = None) -> Tensor:
        """x W^T + b from all ranks' products."""
        total = leave(product, self.group, shards)
        return total if self.bias is None else total + self.bias

    def pack(self) -> None:
        """As `ColumnParallelLinear.pack`."""
        self.packed = pack(self.weight)

    def unpack(self) -> None:
        self.packed = None


class JoinedLinears:
    """Column-parallel linears of one input, computed as one product while their weights are packed."""

    def __init__(self, *linears: ColumnParallelLinear):
        self.linears = linears
        self.packed: Packed | None = None
        self.bias: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """[tokens, out / tp] each."""
        if self.packed is None or not takes_packed(self.packed, x, *(each.weight for each in self.linears)):
            return tuple(each(x) for each in self.linears)
        sizes = [each.weight.shape[0] for each in self.linears]
        return linear_packed(x, self.packed, self.bias).split(sizes, dim=-1)

    def pack(self) -> None:
        """As `ColumnParallelLinear.pack`, for all weights together."""
        self.packed = pack(torch.cat([each.weight.detach() for each in self.linears]))
        biases = [each.bias.detach() for each in self.linears if each.bias is not None]
        assert len(biases) in (0, len(self.linears))
        self.bias = torch.cat(biases) if biases else None

    def unpack(self) -> None:
        self.packed = self.bias = None


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows (the vocabulary) are divided over the group."""

    def __init__(self, weight_shape: tuple[int, ...], group: dist.ProcessGroup | None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weight_shape))  # [vocab / tp, hidden]
        self.group = group
        self.first = 0 if group is None else dist.get_rank(group) * weight_shape[0]

    def forward(self, tokens: Tensor, shards: TokenShards | None = None) -> Tensor:
        if self.group is None:
            return self._rows(tokens)  # [tokens, hidden]
        local = tokens - self.first
        is_elsewhere = (local < 0) | (local >= self.weight.shape[0])
        embedded = self._rows(local.masked_fill(is_elsewhere, 0))
        return leave(embedded.masked_fill(is_elsewhere[:, None], 0.0), self.group, shards)

    def _rows(self, tokens: Tensor) -> Tensor:
        # On a GPU rows would be added to `grad` in an order that varies between runs.
        if self.weight.device.type == "cpu" and torch.is_grad_enabled() and gradient_sink(self.weight) is not None:
            return _EmbeddingIntoGrad.apply(self.weight, tokens)
        return F.embedding(tokens, self.weight)


class _EmbeddingIntoGrad(torch.autograd.Function):
    """Rows of a weight; the gradient is added to those rows of `grad` only; see `realhf.parallel.gradients`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sink = gradient_sink(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.sink.index_add_(0, tokens, grad.to(ctx.sink.dtype))
        return None, None
