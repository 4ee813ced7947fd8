"""The feed-forward half of a layer: gated, plain, or a mixture of experts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from realhf.architecture.model import Activation, DecoderConfig
from realhf.cpu import fused
from realhf.parallel.joined import JoinedLinears, is_better_alone
from realhf.parallel.sequence import TokenShards, enter, gather_outputs, leave
from realhf.parallel.tensor import ColumnParallelLinear, RowParallelLinear

# Without gradients an MLP keeps no activations. For this many tokens they stay in the caches, and malloc need not ask
# the kernel for memory.
_ROWS_AT_ONCE = 512


_aten = torch.ops.aten
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
# (gradient of the output, input, grad_input=the gradient of the input, which is written)
_GRADIENTS: Mapping[Activation, Callable[..., Tensor]] = {
    "silu": _aten.silu_backward.grad_input,
    "gelu": _aten.gelu_backward.grad_input,
    "gelu_tanh": partial(_aten.gelu_backward.grad_input, approximate="tanh"),
    "relu": partial(_aten.threshold_backward.grad_input, threshold=0),
}


class _Gated(torch.autograd.Function):
    """(gate, up [rows, width], activation) -> activation(gate) * up; both gradients are made side by side, so that
    `JoinedLinears` need not copy them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        activated = ACTIVATIONS[activation](gate)
        ctx.save_for_backward(gate, up, activated)
        ctx.activation = activation
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up, activated = ctx.saved_tensors
        of_gate, of_up = grad.new_empty(len(gate), 2 * gate.shape[1]).chunk(2, dim=-1)
        torch.mul(grad, activated, out=of_up)
        torch.mul(grad, up, out=of_gate)
        _GRADIENTS[ctx.activation](of_gate, gate, grad_input=of_gate)
        return of_gate, of_up, None


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig, tp: int, group: dist.ProcessGroup | None):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation, self.group = config.activation, group
        self.gate_proj = ColumnParallelLinear((inner // tp, hidden), bias=bias)
        self.up_proj = ColumnParallelLinear((inner // tp, hidden), bias=bias)
        self.down_proj = RowParallelLinear((hidden, inner // tp), group, bias=bias)
        self.joined = JoinedLinears(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor, shards: TokenShards | None = None) -> Tensor:
        x = enter(x, self.group, shards)
        # Weights that are gathered for their use are gathered once, not for some tokens after others.
        weights = [each.weight for each in (self.gate_proj, self.up_proj, self.down_proj) if each.weight is not None]
        if self.activation == "silu" and len(weights) == 3 and fused.takes(x, *weights):
            parts = [self.down_proj.product(fused.gated_silu(*self.joined(rows))) for rows in x.split(_ROWS_AT_ONCE)]
            return self.down_proj.finished(parts[0] if len(parts) == 1 else torch.cat(parts), shards)
        gate, up = self.joined(x)
        if self.activation == "silu" and fused.trains(gate, up):
            return self.down_proj(fused.GatedSilu.apply(gate, up), shards)
        if is_better_alone(x):
            return self.down_proj(ACTIVATIONS[self.activation](gate) * up, shards)
        return self.down_proj(_Gated.apply(gate, up, self.activation), shards)


class PlainMLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: DecoderConfig, tp: int, group: dist.ProcessGroup | None):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation, self.group = config.activation, group
        self.up_proj = ColumnParallelLinear((inner // tp, hidden), bias=bias)
        self.down_proj = RowParallelLinear((hidden, inner // tp), group, bias=bias)

    def forward(self, x: Tensor, shards: TokenShards | None = None) -> Tensor:
        inner = ACTIVATIONS[self.activation](self.up_proj(enter(x, self.group, shards)))
        return self.down_proj(inner, shards)


class MixtureOfExperts(nn.Module):
    """Sends every token through the experts that the router prefers, and weights their outputs by its probabilities.

    Every rank has a part of every expert, divided like a dense MLP; all ranks route alike (Jiang et al., 2024).
    """

    def __init__(self, config: DecoderConfig, tp: int, group: dist.ProcessGroup | None):
        super().__init__()
        self.config, self.group = config.experts, group
        self.gate = ColumnParallelLinear((config.experts.count, config.hidden_size))
        # Experts have no group: `forward` sums the results of all experts over the ranks at once.
        self.experts = nn.ModuleList(GatedMLP(config, tp, None) for _ in range(config.experts.count))

    def forward(self, x: Tensor, shards: TokenShards | None = None) -> Tensor:
        chosen, weights = self.choose(self.gate(x))  # [tokens, per_token] each
        chosen = gather_outputs(chosen, shards)
        # A rank has only its part of the experts' outputs, so only a part of these two gradients.
        x, weights = enter(x, self.group, shards), enter(weights, self.group, shards)
        order = chosen.flatten().argsort(stable=True)  # rows of (token, choice) by expert
        rows = x.repeat_interleave(self.config.per_token, dim=0)[order]
        counts = chosen.flatten().bincount(minlength=self.config.count).tolist()
        parts = zip(self.experts, rows.split(counts), strict=True)
        outputs = [expert(part) for expert, part in parts if len(part)]
        given = torch.cat(outputs) if outputs else rows  # [tokens * per_token, hidden]
        by_token = given[order.argsort()].unflatten(0, chosen.shape)  # [tokens, per_token, hidden]
        return leave((by_token * weights[..., None]).sum(dim=1), self.group, shards)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights, [tokens, per_token] each, from logits [tokens, experts]."""
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        weights, chosen = probabilities.topk(self.config.per_token, dim=-1)
        if self.config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights.to(logits.dtype)


def feed_forward(config: DecoderConfig, tp: int, group: dist.ProcessGroup | None) -> nn.Module:
    """The architecture's MLP, between the second norm and the residual sum: [tokens, hidden] -> [tokens, hidden]."""
    if config.experts.count:
        return MixtureOfExperts(config, tp, group)
    return GatedMLP(config, tp, group) if config.mlp == "gated" else PlainMLP(config, tp, group)
