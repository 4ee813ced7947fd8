"""Checksums of tensors, to notice bits that changed on the way or in memory."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from realhf.cpu.native import kernels
from realhf.geometry.boxes import Box

# By rank, the bit sum of each part that came from it, in the order of the plan.
SumsByPeer = dict[int, list[Tensor]]

_CHUNK = 1 << 18  # elements; on the CPU these stay in a core's caches
_GPU_CHUNK = 1 << 21  # so that a kernel takes longer than its launch


def bit_sum(tensor: Tensor, *, first: int = 0, steps: Sequence[int] | None = None) -> Tensor:
    """A sum of the bits of `tensor` that depends on their positions, modulo 2^64: an int64 scalar on its device.

    It changes with any one or two bits, any one element of up to 32 bits, and any one half of a longer one, in tensors
    of up to 2^30 such words. Other changes leave the sum as it was once in 2^32 times or less. Equal contents give
    equal sums on every device and for every stride. It costs one pass, outside the CPU's kernels also 10 MB (on a GPU
    80), and the host does not wait for it.

    Positions are counted in row-major order. Those of a part of a larger tensor are `first` for its first element and
    `steps` between neighbours along each dimension, so that the sums of all parts add up to that of the whole.
    """
    tensor = tensor.detach()
    blocks = _blocks(tensor, first, _row_major(tensor.shape) if steps is None else steps)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in blocks:
        total += _block_sum(block)
    return total


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """The bit sum of each of them, int64 [tensors]; there must be one."""
    return torch.stack([bit_sum(tensor) for tensor in tensors])


class ParameterSums:
    """The bit sums of parts of global parameters, each by its places in the whole one: where parts have every element
    once, they add up to the parameter's sum, under any layout.

    It is made once for `parts`, which are read at every call. `shapes` has those of the whole parameters.
    """

    def __init__(self, parts: Sequence[tuple[Box, Tensor]], shapes: Mapping[str, Sequence[int]]):
        self._blocks: list[list[_Block]] = []
        for box, tensor in parts:
            assert not tensor.dim() or tensor.stride(-1) == 1, "a copy would not change with it"
            steps = _row_major(shapes[box.name])
            first = sum(offset * step for offset, step in zip(box.offset, steps, strict=True))
            self._blocks.append(list(_blocks(tensor.detach(), first, steps)))

    def __call__(self) -> tuple[int, ...]:
        """The sum of every part, from 0 to 2^64 - 1. On a GPU the host waits for it once."""
        sums = [[_block_sum(block) for block in of_part] for of_part in self._blocks]
        on_device = [total for of_part in sums for total in of_part if isinstance(total, Tensor)]
        numbers = iter(torch.stack(on_device).tolist() if on_device else ())
        return tuple(sum(next(numbers) if isinstance(n, Tensor) else n for n in of_part) % 2**64 for of_part in sums)


class _Block(NamedTuple):
    """Words [rows, length]: word i of row r has place first + r * step + i."""

    words: Tensor
    first: int
    step: int


def _block_sum(block: _Block) -> Tensor | int:
    words, first, step = block
    is_on_cpu = words.device.type == "cpu"
    if is_on_cpu and kernels is not None:
        return kernels.bit_sum(words.itemsize, *words.shape, words.data_ptr(), words.stride(0), first, step)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    size = _CHUNK if is_on_cpu else _GPU_CHUNK
    rows_at_once = max(1, size // words.shape[1])
    for row, rows in enumerate(words.split(rows_at_once)):
        starts = torch.arange(len(rows), device=words.device).add_(row * rows_at_once).mul_(step).add_(first)
        for column, part in enumerate(rows.split(size, dim=1)):
            along = torch.arange(part.shape[1], device=words.device).add_(column * size)
            total += _factors(starts[:, None] + along).mul_(part).sum()
    return total


def _blocks(tensor: Tensor, first: int, steps: Sequence[int]) -> Iterator[_Block]:
    """The words of all elements, in as few blocks as their places and strides allow."""
    # A word has 32 bits at most: of a 64th bit every odd factor leaves only the parity, and two changed signs would
    # cancel out.
    word = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    if not tensor.numel():
        return
    if tensor.dim() and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    dims: list[tuple[int, int, int]] = []  # size, stride, step
    for size, stride, step in zip(tensor.shape, tensor.stride(), steps, strict=True):
        if dims and dims[-1][1:] == (size * stride, size * step):
            dims[-1] = (dims[-1][0] * size, stride, step)
        elif size > 1:
            dims.append((size, stride, step))
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))
    (rows, row_stride, row_step), (length, _, _) = dims[-2:] if len(dims) > 1 else [(1, dims[0][0], 0), dims[0]]
    outer, words_each = dims[:-2], tensor.element_size() // word.itemsize
    for index in product(*(range(size) for size, _, _ in outer)):
        moved, place = (sum(i * dim[n] for i, dim in zip(index, outer, strict=True)) for n in (1, 2))
        part = tensor.as_strided((rows, length), (row_stride, 1), tensor.storage_offset() + moved)
        yield _Block(part.view(word), (first + place) * words_each, row_step * words_each)


def _row_major(shape: Sequence[int]) -> list[int]:
    """How far apart neighbours along each dimension are."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _factors(places: Tensor) -> Tensor:
    """The factors of words at these places, which are overwritten: distinct numbers of 32 bits, signed, int64.

    Divided by 4 they leave 1. An odd factor has an inverse modulo 2^64, so no change of a single word can cancel out. A
    change of one bit in two words adds 2^n (f + g) or 2^n (f - g) with n < 32; neither sum nor difference is 0, and
    both are less than 2^32. The factors are in mixed order: with 1, 5, 9, ... many equal changes, such as of all signs,
    would cancel out.
    """
    # Products with odd numbers modulo 2^30, and the shift between them, can be undone: different inputs stay different.
    mixed = places.mul_(0x2545F491).bitwise_and_(0x3FFFFFFF)
    mixed.bitwise_xor_(mixed >> 15)
    unsigned = mixed.mul_(0x1851F42D).bitwise_and_(0x3FFFFFFF).mul_(4).add_(1)
    return unsigned.bitwise_left_shift_(32).bitwise_right_shift_(32)
