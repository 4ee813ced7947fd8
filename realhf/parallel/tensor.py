"""Tensor parallelism: linears and embeddings over plain local tensors (Megatron-LM, section 3).

A `group` of None means one rank: the same classes are then the ordinary layers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from realhf.cpu.products import PackedWeight, pack
from realhf.parallel.gradients import gradient_sink
from realhf.parallel.linear import linear
from realhf.parallel.ordered import add_rows
from realhf.parallel.sequence import TokenShards, leave


def sum_of_products(slices: Iterable[nn.Module], x: Tensor) -> Tensor:
    """x W^T, [..., out], by the slices of W along its columns, one after the other: a slice gathered for one product
    can be freed before the next."""
    parts = list(slices)
    columns = [part.get_parameter("weight").shape[1] for part in parts]
    total = None
    for part, columns_of_x in zip(parts, x.split(columns, dim=-1), strict=True):
        product = part(columns_of_x)  # not added in place: selective recomputation keeps it
        total = product if total is None else total + product
    assert total is not None
    return total


class WeightSlice(nn.Module):
    """Some columns of a linear's weight [out, columns], as a linear of its own, which is gathered on its own."""

    def __init__(self, weight_shape: tuple[int, ...]):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weight_shape))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)  # [tokens, out]


class _Linear(nn.Module):
    """x W^T + b over a local weight, which may be cut into slices (OSDP, IJCAI 2023, operator splitting)."""

    cut_along = 1  # the columns of the weight

    def __init__(self, weight_shape: tuple[int, ...], *, bias: bool = False):
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(weight_shape))
        self.bias = nn.Parameter(torch.empty(weight_shape[0])) if bias else None
        self.slices: nn.ModuleList | None = None
        self.packed: PackedWeight | None = None

    def cut(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Replaces the weight by slices of these shapes, one after the other along `cut_along`."""
        [weight] = self.weights()
        assert sum(s[self.cut_along] for s in shapes) == weight.shape[self.cut_along], f"{shapes} of {weight.shape}"
        self.slices, self.weight = nn.ModuleList(map(WeightSlice, shapes)), None

    def weights(self) -> list[Tensor]:
        """The weight, or its slices."""
        return [self.weight] if self.weight is not None else list(self.slices.parameters() if self.slices else ())

    def product(self, x: Tensor) -> Tensor:
        """x W^T, [tokens, out]: of slices one after the other, and their sum."""
        if self.weight is not None:
            return linear(x, self.weight, packed=self.packed)
        assert self.slices is not None
        return sum_of_products(self.slices, x)

    def pack(self) -> None:
        """Keeps a packed copy of a weight that is whole until `unpack`, for many steps with one weight."""
        self.packed = None if self.weight is None else pack(self.weight)

    def unpack(self) -> None:
        self.packed = None


class ColumnParallelLinear(_Linear):
    """x W^T + b with the rows of W [out / tp, in] (the outputs) and b divided over the group. The caller copies x to
    the group."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return linear(x, self.weight, self.bias, packed=self.packed)  # [tokens, out / tp]
        product = self.product(x)
        return product if self.bias is None else product + self.bias


class VocabParallelHead(ColumnParallelLinear):
    """The weight of a language model's head; `realhf.parallel.vocabulary.Logits` computes with it, by parts of the
    vocabulary, along which it is cut."""

    cut_along = 0


class RowParallelLinear(_Linear):
    """x W^T + b with the columns of W [out, in / tp] (the inputs) divided over the group; the partial products are
    summed.

    Every rank holds b and adds it to the sum.
    """

    def __init__(self, weight_shape: tuple[int, ...], group: dist.ProcessGroup | None, *, bias: bool = False):
        super().__init__(weight_shape, bias=bias)
        self.group = group

    def forward(self, x: Tensor, shards: TokenShards | None = None) -> Tensor:
        return self.finished(self.product(x), shards)

    def finished(self, product: Tensor, shards: TokenShards | None = None) -> Tensor:
        """x W^T + b from all ranks' products."""
        total = leave(product, self.group, shards)
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows (the vocabulary) are divided over the group."""

    def __init__(self, weight_shape: tuple[int, ...], group: dist.ProcessGroup | None):
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(weight_shape))  # [vocab / tp, hidden]
        self.slices: nn.ModuleList | None = None
        # Where the gradient of the rows that tokens look up is added in their order; None: where that of the weight is.
        self.own_sink: Tensor | None = None
        self.group, self.rows = group, weight_shape[0]
        self.first = 0 if group is None else dist.get_rank(group) * weight_shape[0]

    def cut(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Replaces the weight by slices of these shapes, some columns each, one after the other."""
        self.slices, self.weight = nn.ModuleList(map(EmbeddingSlice, shapes)), None

    def forward(self, tokens: Tensor, shards: TokenShards | None = None) -> Tensor:
        if self.group is None:
            return self._rows(tokens)  # [tokens, hidden]
        local = tokens - self.first
        is_elsewhere = (local < 0) | (local >= self.rows)
        embedded = self._rows(local.masked_fill(is_elsewhere, 0))
        return leave(embedded.masked_fill(is_elsewhere[:, None], 0.0), self.group, shards)

    def _rows(self, tokens: Tensor) -> Tensor:
        if self.slices is not None:
            return torch.cat([part(tokens) for part in self.slices], dim=-1)
        assert self.weight is not None
        return _rows_of(self.weight, tokens, self.own_sink)


class EmbeddingSlice(WeightSlice):
    """Some columns of an embedding [vocab / tp, columns]."""

    def forward(self, tokens: Tensor) -> Tensor:
        return _rows_of(self.weight, tokens)  # [tokens, columns]


def _rows_of(weight: Tensor, tokens: Tensor, own_sink: Tensor | None = None) -> Tensor:
    # On a GPU only the kernel of `own_sink` adds rows to `grad` in the same order in every run.
    adds = weight.device.type == "cpu" or own_sink is not None
    if adds and torch.is_grad_enabled() and (sink := gradient_sink(weight)) is not None:
        return _EmbeddingIntoGrad.apply(weight, tokens, sink if own_sink is None else own_sink)
    return F.embedding(tokens, weight)


class _EmbeddingIntoGrad(torch.autograd.Function):
    """Rows of a weight; the gradient is added to those rows of `grad` only; see `realhf.parallel.gradients`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, sink: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sink = sink
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        add_rows(ctx.sink, tokens, grad)
        return None, None, None
