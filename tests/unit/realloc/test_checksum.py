"""Checksums beside sums of Python's integers, and the changes that they must notice."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.geometry.boxes import Box
from realhf.realloc.execute.checksum import ParameterSums, bit_sum, bit_sums

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8]


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(50).to(dtype)


def flipped(tensor: torch.Tensor, *bits: int) -> torch.Tensor:
    """A copy in which these bits are others, counted over the bytes of the tensor."""
    changed = tensor.clone()
    for bit in bits:
        changed.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8
    return changed


def checksum(tensor: torch.Tensor) -> int:
    return int(bit_sum(tensor)) % 2**64


def expected(words: list[int]) -> int:
    """As `bit_sum` computes it, number by number."""
    total = 0
    for index, word in enumerate(words):
        mixed = index * 0x2545F491 % 2**30
        factor = 4 * ((mixed ^ mixed >> 15) * 0x1851F42D % 2**30) + 1
        total += word * (factor - 2**32 if factor >= 2**31 else factor)
    return total % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_contents_have_equal_sums_whatever_the_strides(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 37, 11)
    original = checksum(tensor)
    assert 0 <= original < 2**64
    assert checksum(tensor.t().contiguous().t()) == original
    assert checksum(tensor.flatten()) == original
    assert checksum(tensor[:, 3]) == checksum(tensor[:, 3].clone())
    assert checksum(tensor.flip(0)) != original


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None)
@given(data=st.data(), length=st.integers(1, 300))
def test_any_one_or_two_flipped_bits_are_noticed(dtype: torch.dtype, data: st.DataObject, length: int) -> None:
    tensor = random_tensor(dtype, length, seed=length)
    bits = data.draw(st.sets(st.integers(0, 8 * tensor.nbytes - 1), min_size=1, max_size=2))
    assert checksum(flipped(tensor, *bits)) != checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bit_of_any_two_elements_is_noticed(dtype: torch.dtype) -> None:
    """The pairs that could cancel out, the sign bits above all."""
    tensor, of_element = random_tensor(dtype, 24), 8 * dtype.itemsize
    for bit in {of_element - 1, of_element // 2 - 1, 0}:
        for one in range(24):
            for other in range(one):
                changed = flipped(tensor, one * of_element + bit, other * of_element + bit)
                assert checksum(changed) != checksum(tensor), (bit, one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 4, 37, 2**17, 2**18])
def test_a_tensor_and_its_negative_differ(dtype: torch.dtype, length: int) -> None:
    for tensor in (torch.ones(length).to(dtype), random_tensor(dtype, length), random_tensor(dtype, length).abs()):
        assert checksum(-tensor) != checksum(tensor)
    signs = torch.tensor([1, -1, -1, 1]).to(dtype)
    assert checksum(signs) != checksum(-signs)


def test_checksum_by_hand() -> None:
    assert checksum(torch.tensor([5, 1], dtype=torch.int16).view(torch.bfloat16)) == expected([5, 1])
    # A longer element is two words, the lower half first.
    longer = torch.tensor([5 + 2**32 * 9, 1], dtype=torch.int64).view(torch.float64)
    assert checksum(longer) == expected([5, 9, 1, 0])
    assert checksum(torch.tensor(-0.0)) == -(2**31) % 2**64
    assert checksum(torch.empty(0, 3)) == 0


def test_checksum_of_more_than_one_chunk_is_that_of_the_whole() -> None:
    tensor = torch.arange(3 * 2**18 + 5, dtype=torch.int32).view(torch.float32)
    assert checksum(tensor) == expected(list(range(3 * 2**18 + 5)))
    part = tensor[: 3 * 2**18]
    assert checksum(part.view(3, 2**18)) == checksum(part.view(2**9, -1)) == checksum(part)
    assert checksum(part.view(torch.float64)) == checksum(part)


def test_a_gpu_sums_up_chunks_that_take_longer_than_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the sum is the same for chunks of any size. `meta` takes the way of a GPU."""

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator is torch.ops.aten.sum.default:
                summed.append(args[0].numel())
            return operator(*args, **(kwargs or {}))

    summed: list[int] = []
    with Sums():
        bit_sum(torch.empty(3, 2**21, dtype=torch.bfloat16, device="meta"))
    assert summed == [2**21] * 3
    tensor = random_tensor(torch.float32, 40, 30)
    whole = checksum(tensor)
    monkeypatch.setattr("realhf.realloc.execute.checksum.kernels", None)
    for size in (7, 64, 2**20):
        monkeypatch.setattr("realhf.realloc.execute.checksum._CHUNK", size)
        assert checksum(tensor) == whole


def test_sums_of_several_tensors() -> None:
    tensors = [random_tensor(torch.float32, 5), random_tensor(torch.float32, 3, 4)]
    assert (bit_sums(tensors).numpy().astype(np.uint64) == [checksum(tensor) for tensor in tensors]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_parts_add_up_to_the_whole_with_kernels_and_without(
    dtype: torch.dtype, data: st.DataObject, shape: list[int]
) -> None:
    """However a parameter is cut."""
    whole, parts = random_tensor(dtype, *shape), [Box("w", (0,) * len(shape), tuple(shape))]
    for dim, extent in enumerate(shape):
        cuts = sorted({0, extent, *data.draw(st.sets(st.integers(0, extent), max_size=2))})
        parts = [box.between(start, end, dim) for box in parts for start, end in itertools.pairwise(cuts)]
    copies = [(box, whole[box.slices_in(Box("w", (0,) * len(shape), tuple(shape)))].clone()) for box in parts]
    sums = ParameterSums(copies, {"w": shape})
    assert sum(sums()) % 2**64 == checksum(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("realhf.realloc.execute.checksum.kernels", None)
        with_torch = ParameterSums(copies, {"w": shape})()
    assert with_torch == sums()
    assert all(0 <= total < 2**64 for total in sums())
    copies[0][1].fill_(3)
    assert sums() == ParameterSums(copies, {"w": shape})(), "what the parts are now"


def test_sums_of_no_parts() -> None:
    assert ParameterSums([], {})() == ()
