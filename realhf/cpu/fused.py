"""Kernels that each replace several operators of torch on the CPU, in passes without gradients (`csrc/kernels`).

They round to bfloat16 wherever the operators do. Callers ask `takes` first, and use torch's operators in all other
cases: other devices, float64, gradients, or kernels that are not built.
"""

import torch
from torch import Tensor

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
    """Writes to `out` [3, rows] float32, for logits [rows, vocab] / temperature: logsumexp, the largest logit, and the
    logit of `tokens` [rows] int64. Raises IndexError for an id outside the vocabulary."""
    rows, vocab = logits.shape
    tokens = tokens.contiguous()
    assert logits.is_contiguous()
    assert tokens.dtype == torch.int64
    assert tokens.shape == (rows,)
    assert out.dtype == torch.float32
    assert out.shape[0] == 3
    assert out.stride(1) == 1
    addresses = [row.data_ptr() for row in out]
    kernels.statistics(DTYPES[logits.dtype], rows, vocab, logits.data_ptr(), temperature, tokens.data_ptr(), *addresses)


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
