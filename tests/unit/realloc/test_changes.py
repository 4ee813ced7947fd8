"""The text of what changed: exact for all dtypes, strides and shares, by the kernel and without it; never longer than
the values."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.cpu.native import kernels
from realhf.realloc.execute import changes
from realhf.realloc.execute.changes import BLOCK, decode, encode

DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHARES = [0.0, 0.004, 0.1, 0.33, 0.5, 1.0]
SHAPES = [
    (),
    (0,),
    (1,),
    (31,),
    (3, 7),
    (5, 33, 3),
    (BLOCK - 1,),
    (BLOCK,),
    (BLOCK + 1,),
    (3, BLOCK // 2 + 5),
    (7, 30011),
]


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Values of any bits, NaN and -0 too, and others, of which about a share differ."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel()
    before = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    after, differs = before.clone(), torch.rand(size, generator=generator) < share
    after.view(torch.uint8).view(size, dtype.itemsize)[:, 0] ^= differs.to(torch.uint8) << seed % 8
    return before.view(shape), after.view(shape)


def strided(values: Tensor, how: str) -> Tensor:
    """The same values: as they lie, transposed in memory, or columns of something wider."""
    if how == "columns" and values.dim():
        wide = values.new_zeros((*values.shape[:-1], values.shape[-1] + 3))
        wide[..., 1:-2] = values
        return wide[..., 1:-2]
    return values.mT.contiguous().mT if how == "transposed" and values.dim() > 1 else values.clone()


@settings(max_examples=120, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    share=st.sampled_from(SHARES),
    how=st.sampled_from(["whole", "transposed", "columns"]),
    seed=st.integers(0, 2**20),
)
def test_what_is_written_again_is_what_was_compared(
    shape: tuple[int, ...], dtype: torch.dtype, share: float, how: str, seed: int
) -> None:
    before, after = drawn(shape, dtype, share, seed)
    known, copy = before.clone().view(-1), strided(before, how)
    text = encode(strided(after, how), known)
    assert torch.equal(bits(known), bits(after))
    others = before.clone().view(-1)
    other = changes._encode(strided(after, how), others)
    assert torch.equal(bits(others), bits(after))
    assert (text is None) == (other is None)
    if text is None or other is None:
        return
    assert torch.equal(bits(text), bits(other))  # the kernel's and torch's
    changed = int((bits(before) != bits(after)).sum())
    assert decode(text, copy) == changed
    assert torch.equal(bits(copy), bits(after))
    assert text.dtype == dtype
    assert text.nbytes < max(after.nbytes, 1)
    assert text.numel() > 0 or changed == 0


@pytest.mark.parametrize("by", ["kernel", "torch"])
def test_the_bytes_of_a_text_and_from_when_on_values_are_shorter(by: str) -> None:
    """By hand: 100,000 values in bfloat16 are 200,000 bytes, the two counts 8, a change 4."""
    if by == "kernel" and kernels is None:
        pytest.skip("the kernels are not built")
    function: Any = encode if by == "kernel" else changes._encode
    before = torch.zeros(100_000, dtype=torch.bfloat16)
    for number, size_bytes in [(0, 0), (1, 8 + 4), (1000, 8 + 4000), (49_997, 199_996)]:
        after = before.clone()
        after[torch.arange(number) * 2 % 99_999] = 1
        assert function(after, before.clone()).nbytes == size_bytes
    after[torch.tensor([99_997])] = 1
    assert function(after, before.clone()) is None
    assert function(torch.ones_like(before), before.clone()) is None
    assert function(torch.ones(2), torch.zeros(2)) is None, "counts and a place would be more than two values"


def test_other_sizes_of_elements_are_refused() -> None:
    if kernels is None:
        pytest.skip("the kernels are not built")
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bytes only"):
        kernels.encode_changes(16, 0, 0, 0, 0, 0)
