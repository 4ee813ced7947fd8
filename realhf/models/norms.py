"""The norms of the families."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realhf.architecture.model import DecoderConfig
from realhf.cpu import fused
from realhf.parallel import ordered
from realhf.parallel.regions import copy_to_group


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, the root in float32 at least (Zhang and Sennrich, 2019).

    `group`: tensor-parallel ranks that apply the weight to their own heads; its gradient is summed over them.
    """

    def __init__(self, size: int, eps: float, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.group = eps, group

    def forward(self, x: Tensor) -> Tensor:
        if fused.takes(x, self.weight):
            return fused.rms_norm(x, self.weight, self.eps)
        if fused.trains(x, self.weight):
            return fused.NormalisedByRMS.apply(x, copy_to_group(self.weight, self.group), self.eps)
        return copy_to_group(self.weight, self.group) * _normalised(x, self.eps).to(x.dtype)


class PlusOneRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), all of it in float32 at least (Gemma)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normalised = _normalised(x, self.eps)
        return (normalised * (1.0 + self.weight.to(normalised.dtype))).to(x.dtype)


def hidden_norm(config: DecoderConfig) -> nn.Module:
    """The norm of hidden states [tokens, hidden] that the architecture asks for."""
    match config.norm:
        case "rms":
            return RMSNorm(config.hidden_size, config.rms_norm_eps)
        case "rms_plus_one":
            return PlusOneRMSNorm(config.hidden_size, config.rms_norm_eps)
        case "layer":
            return nn.LayerNorm(config.hidden_size, config.rms_norm_eps)


def rms_norm_in_order(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., width], whose sums depend neither on the rows beside a row nor on how x lies in memory."""
    if ordered.on_gpu(x):
        return weight * _normalised_in_order(x.contiguous(), eps).to(x.dtype)
    normalised: Tensor = fused.NormalisedByRMS.apply(x, weight, eps)
    return normalised


def normalised_in_order(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm` of x [rows, hidden]; no row's bits depend on the rows beside it. torch's kernels for GPUs may choose the
    order of a sum by the number of rows."""
    if not ordered.on_gpu(x):
        normalised: Tensor = norm(x)
        return normalised
    assert isinstance(norm, RMSNorm | PlusOneRMSNorm | nn.LayerNorm)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if isinstance(norm, nn.LayerNorm):
        wide = wide - (ordered.row_sums(wide) / x.shape[-1])[..., None]
    wide = _normalised_in_order(wide, norm.eps)
    match norm:
        case RMSNorm():
            return norm.weight * wide.to(x.dtype)
        case PlusOneRMSNorm():
            return (wide * (1.0 + norm.weight.to(wide.dtype))).to(x.dtype)
        case _:
            return (wide * norm.weight + norm.bias).to(x.dtype)


def _normalised_in_order(x: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(ordered.row_sums(wide.square()) / x.shape[-1] + eps)[..., None]


def _normalised(x: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
