"""Tensor parallelism: linears and embeddings over plain local tensors (Megatron-LM, section 3).

A `group` of None means one rank: the same classes are then the ordinary layers.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from realhf.parallel.linear import linear
from realhf.parallel.sequence import TokenShards, leave


class ColumnParallelLinear(nn.Module):
    """x W^T + b with the rows of W (the outputs) and b divided over the group. The caller copies x to the group."""

    def __init__(self, weight_shape: tuple[int, ...], *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weight_shape))  # [out / tp, in]
        self.bias = nn.Parameter(torch.empty(weight_shape[0])) if bias else None  # [out / tp]
        self.packed: Tensor | None = None  # see `realhf.parallel.linear.pack`; kept while many steps use one weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, packed=self.packed)  # [tokens, out / tp]


class RowParallelLinear(nn.Module):
    """x W^T + b with the columns of W (the inputs) divided over the group; the partial products are summed.

    Every rank holds b and adds it to the sum.
    """

    def __init__(self, weight_shape: tuple[int, ...], group: dist.ProcessGroup | None, *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weight_shape))  # [out, in / tp]
        self.bias = nn.Parameter(torch.empty(weight_shape[0])) if bias else None  # [out]
        self.packed: Tensor | None = None
        self.group = group

    def forward(self, x: Tensor, shards: TokenShards | None = None) -> Tensor:
        total = leave(linear(x, self.weight, packed=self.packed), self.group, shards)  # [tokens, out]
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows (the vocabulary) are divided over the group."""

    def __init__(self, weight_shape: tuple[int, ...], group: dist.ProcessGroup | None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weight_shape))  # [vocab / tp, hidden]
        self.group = group
        self.first = 0 if group is None else dist.get_rank(group) * weight_shape[0]

    def forward(self, tokens: Tensor, shards: TokenShards | None = None) -> Tensor:
        if self.group is None:
            return F.embedding(tokens, self.weight)  # [tokens, hidden]
        local = tokens - self.first
        is_elsewhere = (local < 0) | (local >= self.weight.shape[0])
        embedded = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return leave(embedded.masked_fill(is_elsewhere[:, None], 0.0), self.group, shards)
