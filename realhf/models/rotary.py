"""Rotary positions, and how their angles are scaled for longer sequences."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from realhf.architecture.model import DecoderConfig, RopeScaling
from realhf.cpu import fused


def rotary_tables(positions: Tensor, config: DecoderConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each [tokens, 1, head_dim] in `dtype` (RoFormer, equation 34).

    [tokens, 1, 0] where positions are not rotary: `rotate` then changes nothing.
    """
    wide = torch.promote_types(dtype, torch.float32)
    if config.positions != "rotary":
        empty = torch.empty(len(positions), 1, 0, dtype=dtype, device=positions.device)
        return empty, empty
    places = positions.to(wide)[:, None]  # [tokens, 1]
    exponents = torch.arange(0, config.head_dim, 2, dtype=wide, device=positions.device) / config.head_dim
    angles = places / _periods(places, exponents, config)  # [tokens, head_dim / 2]
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [tokens, heads, head_dim]; the halves of a head are the two coordinates."""
    if not cos.shape[-1]:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotation.apply(x, cos, sin)
    return _turned(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation; written out, it saves adding slices to zeros, and both are
    passes without gradients, which the kernel takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return fused.rotate(x, cos, sin) if fused.takes(x, cos, sin) else _rotated(x, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = sin.shape[-1] // 2
    signed_sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x * cos).addcmul_(torch.cat([second, first], dim=-1), signed_sin)


def _periods(places: Tensor, exponents: Tensor, config: DecoderConfig) -> Tensor:
    """Tokens per radian of every pair of coordinates: [head_dim / 2], or [tokens, head_dim / 2] if tokens differ."""
    scaling, theta = config.rope_scaling, config.rope_theta
    match scaling.kind:
        case "none":
            return theta**exponents
        case "linear":
            return theta**exponents * scaling.factor
        case "dynamic":
            # A token is rotated for the length of the sequence that ends with it.
            length = (places + 1).clamp(min=scaling.original_positions)
            growth = scaling.factor * length / scaling.original_positions - (scaling.factor - 1)
            return (theta * growth ** (config.head_dim / (config.head_dim - 2))) ** exponents
        case "llama3":
            return _llama3_periods(theta**exponents, scaling)


def _llama3_periods(periods: Tensor, scaling: RopeScaling) -> Tensor:
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_positions / (2 * math.pi * periods)  # in a sequence of the original length
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: a high frequency, kept; 0: a low one, divided
    return periods / ((1 - kept) / scaling.factor + kept)
