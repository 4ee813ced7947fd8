"""Kernels that each replace several operators of torch on the CPU (`csrc/kernels`).

They round to bfloat16 wherever the operators do, and record no gradient. Callers ask `takes` first, and use torch's
operators in all other cases: other devices, float64, gradients, or kernels that are not built. For training there are
`NormalisedByRMS` and `GatedSilu`, with gradients by kernels; callers ask `trains`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from realhf.cpu.native import DTYPES, kernels


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: all on the CPU, of one dtype that they have, none recorded for a
    gradient."""
    first, is_recorded = tensors[0], torch.is_grad_enabled()
    return (
        first.dtype in DTYPES
        and first.device.type == "cpu"
        and all(x.dtype == first.dtype and not (is_recorded and x.requires_grad) for x in tensors)
    )


def trains(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors, which may be recorded for a gradient.

    Only where torch computes with one thread too: the kernels have no more.
    """
    first = tensors[0]
    is_taken = first.dtype in DTYPES and first.device.type == "cpu" and torch.get_num_threads() == 1
    return is_taken and all(x.dtype == first.dtype for x in tensors)


class NormalisedByRMS(torch.autograd.Function):
    """(x [..., width], weight [width], epsilon) -> `rms_norm`, whose input alone is kept for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return rms_norm(x, weight, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        width = x.shape[-1]
        rows, grads = _rows(x.reshape(-1, width)), _rows(grad.reshape(-1, width))
        grad_x, grad_weight = torch.empty(x.shape, dtype=x.dtype), torch.empty(width, dtype=torch.float64)
        kernels.rms_norm_gradient(
            DTYPES[x.dtype], len(rows), width, rows.data_ptr(), rows.stride(0), weight.data_ptr(), ctx.epsilon,
            grads.data_ptr(), grads.stride(0), grad_x.data_ptr(), grad_weight.data_ptr(),
        )  # fmt: skip
        return grad_x, grad_weight.to(weight.dtype), None


class GatedSilu(torch.autograd.Function):
    """(gate, up) [rows, width] each -> `gated_silu`, whose inputs alone are kept for the gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gated_silu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, grad = (_rows(x) for x in (*ctx.saved_tensors, grad))
        grad_gate, grad_up = torch.empty(gate.shape, dtype=gate.dtype), torch.empty(up.shape, dtype=up.dtype)
        kernels.gated_silu_gradient(
            DTYPES[gate.dtype], *gate.shape, gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0),
            grad.data_ptr(), grad.stride(0), grad_gate.data_ptr(), grad_up.data_ptr(),
        )  # fmt: skip
        return grad_gate, grad_up


def square_sum(x: Tensor) -> float:
    """The sum of the squares of x [elements], in float64."""
    assert x.is_contiguous()
    return float(kernels.square_sum(DTYPES[x.dtype], x.numel(), x.data_ptr()))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension; the shape of `x`."""
    width = x.shape[-1]
    rows = _rows(x.reshape(-1, width))
    out = torch.empty(x.shape, dtype=x.dtype)
    assert weight.dtype == x.dtype
    assert weight.shape == (width,)
    kernels.rms_norm(
        DTYPES[x.dtype], len(rows), width, rows.data_ptr(), rows.stride(0), weight.data_ptr(), epsilon, out.data_ptr()
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] turned by angles [tokens, 1, head_dim]; see `realhf.models.rotary`."""
    tokens, heads, head_dim = x.shape
    x = x if x.stride()[1:] == (head_dim, 1) else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    assert cos.shape == sin.shape == (tokens, 1, head_dim)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    kernels.rotate(
        DTYPES[x.dtype], tokens, heads, head_dim, x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    return out


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [rows, width]."""
    gate, up = _rows(gate), _rows(up)
    assert gate.shape == up.shape
    assert gate.dtype == up.dtype
    out = torch.empty(gate.shape, dtype=gate.dtype)
    kernels.gated_silu(
        DTYPES[gate.dtype], *gate.shape, gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), out.data_ptr()
    )
    return out


def vocabulary_statistics(logits: Tensor, tokens: Tensor, temperature: float, out: Tensor) -> None:
    """Writes to `out` [3 or 4, rows] float32, for logits [rows, vocab] / temperature: logsumexp, the largest logit, the
    logit of `tokens` [rows] int64, and the mean logit. Raises IndexError for an id outside the vocabulary."""
    rows, vocab = logits.shape
    tokens = tokens.contiguous()
    assert logits.is_contiguous()
    assert tokens.dtype == torch.int64
    assert tokens.shape == (rows,)
    assert out.dtype == torch.float32
    assert out.shape[0] in (3, 4)
    assert out.stride(1) == 1
    addresses = [row.data_ptr() for row in out] + [0] * (4 - len(out))
    kernels.statistics(DTYPES[logits.dtype], rows, vocab, logits.data_ptr(), temperature, tokens.data_ptr(), *addresses)


def logprob_gradient(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    logsumexp: Tensor,
    grad: Tensor,
    at_token: Tensor,
    entropies: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The gradient that logits [rows, vocab] get from log-probabilities and entropies, in their shape and dtype.

    Args:
        tokens: [rows] int64, of this vocabulary.
        logsumexp: of the logits / temperature, perhaps of a wider vocabulary; [rows] float32, as all that follow.
        grad: of the log-probabilities.
        at_token: what the token's logit gets beside; 0 where the token is another vocabulary's.
        entropies: the entropies, and their gradient; None if they have none.
    """
    rows, vocab = logits.shape
    entropy, grad_entropy = entropies or (None, None)
    assert logits.is_contiguous()
    assert tokens.dtype == torch.int64
    assert tokens.shape == (rows,)
    out, addresses, kept = torch.empty_like(logits), [], []
    for x in (logsumexp, entropy, grad, grad_entropy, at_token):
        if x is not None:
            assert x.dtype == torch.float32
            assert x.shape == (rows,)
            kept.append(x.contiguous())
        addresses.append(0 if x is None else kept[-1].data_ptr())
    tokens = tokens.contiguous()
    kernels.logprob_gradient(
        DTYPES[logits.dtype], rows, vocab, logits.data_ptr(), temperature, tokens.data_ptr(), *addresses, out.data_ptr()
    )
    return out


def draw(
    logits: Tensor, uniforms: Tensor | None, temperature: float, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `realhf.engine.generate.sampling.draw` and, with given `tokens` [rows], `replay`.

    Returns tokens int64, log-probabilities float32 and margins float64, [rows] each. Raises IndexError for an id
    outside the vocabulary.
    """
    rows, vocab = logits.shape
    logits = logits.contiguous()
    assert (uniforms is None) != (tokens is None)
    if uniforms is not None:
        uniforms = uniforms.contiguous()
        assert uniforms.shape == (rows,)
        assert uniforms.dtype == torch.float64
        tokens = torch.empty(rows, dtype=torch.int64)
    else:
        assert tokens is not None
        tokens = tokens.clone()
        assert tokens.shape == (rows,)
        assert tokens.dtype == torch.int64
    logprobs, margins = torch.empty(rows), torch.empty(rows, dtype=torch.float64)
    kernels.draw(
        DTYPES[logits.dtype], rows, vocab, logits.data_ptr(), temperature,
        0 if uniforms is None else uniforms.data_ptr(), tokens.data_ptr(), logprobs.data_ptr(), margins.data_ptr(),
    )  # fmt: skip
    return tokens, logprobs, margins


def _rows(x: Tensor) -> Tensor:
    """[rows, width], each row contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()
