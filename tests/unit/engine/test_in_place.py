"""A home's parameters go into a copy and back as memory changes hands: page by page, or through pinned memory."""

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from realhf.cpu.huge_pages import empty_in_huge_pages
from realhf.cpu.pages import HUGE_PAGE_BYTES, give_back
from realhf.engine.residency.in_place import PageByPage, Passage, Sides, ThroughHost, passage_on
from realhf.engine.residency.offload import free

ROWS, COLUMNS, MATRICES = 512, 1024, 6  # a matrix of the copy: 2 MiB
PIECE = 2**18


def resident_bytes(*vectors: Tensor) -> int:
    """Bytes of the pages that the kernel has for these vectors, the pages at both ends as a whole."""
    found = 0
    for vector in vectors:
        if vector.untyped_storage().nbytes():
            first = vector.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            count = -(-(vector.data_ptr() + vector.nbytes - first) // mmap.PAGESIZE)
            pages = (ctypes.c_ubyte * count)()
            size_bytes = ctypes.c_size_t(count * mmap.PAGESIZE)
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), size_bytes, pages) == 0
            found += sum(page & 1 for page in pages) * mmap.PAGESIZE
    return found


def stored_bytes(*vectors: Tensor) -> int:
    return sum(vector.untyped_storage().nbytes() for vector in vectors)


class Pair:
    """A home that holds one half of each matrix of a copy, the left columns or the upper rows, in two vectors."""

    def __init__(self, dim: int):
        shape = (ROWS // 2, COLUMNS) if dim == 0 else (ROWS, COLUMNS // 2)
        self.home = [torch.zeros(MATRICES // 2 * math.prod(shape)) for _ in range(2)]
        self.copy = [torch.zeros(MATRICES * ROWS * COLUMNS)]
        self.here = [part.view(shape) for vector in self.home for part in vector.split(math.prod(shape))]
        for number, part in enumerate(self.here):
            part.copy_(torch.arange(part.numel()).view(shape) + number)
        self.values = [part.clone() for part in self.here]
        self._places = [
            whole.view(ROWS, COLUMNS).narrow(dim, 0, shape[dim]) for whole in self.copy[0].split(ROWS * COLUMNS)
        ]
        free(self.copy[0])
        self.sides = Sides(home=self.home, copy=self.copy, here=self.here, there=lambda: self._places)

    def is_in(self, parts: Sequence[Tensor]) -> bool:
        return all(map(torch.equal, parts, self.values))

    @property
    def places(self) -> list[Tensor]:
        return self._places


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", [PageByPage, ThroughHost])
def test_parameters_go_into_a_copy_and_come_back_bit_by_bit(kind: Callable[[int], Passage], dim: int) -> None:
    pair, passage = Pair(dim), kind(PIECE)
    for _ in range(2):
        passage.lend(pair.sides)
        assert pair.is_in(pair.places)
        assert (stored_bytes(*pair.home), stored_bytes(*pair.copy)) == (0, pair.copy[0].nbytes)
        passage.take_back(pair.sides)
        assert pair.is_in(pair.here)
        assert (stored_bytes(*pair.copy), stored_bytes(*pair.home)) == (0, sum(v.nbytes for v in pair.home))
        for part in pair.here:  # as in a training step
            part += 1
        pair.values = [values + 1 for values in pair.values]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("memory", ["as it is", "where a cache was"])
def test_pages_come_as_others_go(dim: int, memory: str) -> None:
    """The kernel's pages of both sides, after each piece; malloc's memory may have been asked for in huge pages, of
    which one is there before it is filled."""
    if memory == "where a cache was":
        for _ in range(3):  # freed at once, and malloc's again
            empty_in_huge_pages((2 * MATRICES * ROWS * COLUMNS,), torch.float32)
    pair, seen = Pair(dim), list[tuple[int, int]]()
    passage = PageByPage(PIECE, lambda: seen.append((resident_bytes(*pair.home), resident_bytes(*pair.copy))))
    larger, smaller = pair.copy[0].nbytes, sum(vector.nbytes for vector in pair.home)
    for move, (giver, taker) in ((passage.lend, (0, 1)), (passage.take_back, (1, 0))):
        seen.clear()
        move(pair.sides)
        assert len(seen) == smaller // PIECE
        assert all(a[giver] > b[giver] and a[taker] <= b[taker] for a, b in pairwise(seen))
        assert larger / 2 < max(map(sum, seen)) <= larger + PIECE + 8 * mmap.PAGESIZE + HUGE_PAGE_BYTES
    assert pair.is_in(pair.here)


def test_on_a_gpu_there_is_one_side_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storages, whenever one of them changes its size."""
    pair, held = Pair(1), list[int]()
    resize = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, size: int) -> object:
        result = resize(storage, size)
        held.append(stored_bytes(*pair.home, *pair.copy))
        return result

    monkeypatch.setattr(torch.UntypedStorage, "resize_", noted)
    passage = ThroughHost(PIECE)
    passage.lend(pair.sides)
    passage.take_back(pair.sides)
    assert len(held) == 6
    assert max(held) == pair.copy[0].nbytes
    assert pair.is_in(pair.here)


def test_the_memory_says_which_way_they_go() -> None:
    assert isinstance(passage_on(torch.device("cpu")), PageByPage)
    assert isinstance(passage_on(torch.device("cuda")), ThroughHost)


def test_whole_pages_alone_are_given_back() -> None:
    numbers = torch.ones(4 * mmap.PAGESIZE, dtype=torch.uint8)
    begin = numbers.data_ptr()
    first = -(-(begin + 1) // mmap.PAGESIZE) * mmap.PAGESIZE - begin
    assert give_back(begin + 1, begin + first + mmap.PAGESIZE + 5) == begin + first + mmap.PAGESIZE
    expected = torch.ones_like(numbers)
    expected[first : first + mmap.PAGESIZE] = 0
    assert torch.equal(numbers, expected)
    assert give_back(begin + first, begin + first + 9) == begin + first  # less than a page
    numbers.fill_(1)
    assert give_back(begin, begin + 3 * mmap.PAGESIZE, 4 * mmap.PAGESIZE) == begin  # less than such a page
    assert torch.equal(numbers, torch.ones_like(numbers))
