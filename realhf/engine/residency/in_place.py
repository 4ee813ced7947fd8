"""A home's parameters go into a copy that contains them, and back, without memory for both at a time.

At the peak there is the memory of the larger of the two and of one piece (true zero redundancy: HybridFlow, section
5.3, without its buffer beside the training's weights).
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from realhf.cpu.pages import HUGE_PAGE_BYTES, give_back
from realhf.engine.residency.offload import LARGEST_BLOCK_BYTES, allocate, free
from realhf.parallel.views import storage_id

PIECE_BYTES = LARGEST_BLOCK_BYTES  # a bucket of a reallocation


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Parameters with memory on one side at a time: a home, and a copy of which they are a part.

    home, copy: the vectors of each.
    here: the parts of the home that have its parameters.
    there: finds the place of each part in the copy, which has its memory then.
    """

    home: Sequence[Tensor]
    copy: Sequence[Tensor]
    here: Sequence[Tensor]
    there: Callable[[], Sequence[Tensor]]


class Passage(Protocol):
    """The way of the parameters between two sides, by the memory that they are in."""

    def lend(self, sides: Sides) -> None:
        """Into the copy, whose memory it takes; then the home has none."""

    def take_back(self, sides: Sides) -> None:
        """Into the home, whose memory it takes, with arbitrary padding; then the copy has none."""


def passage_on(device: torch.device, piece_bytes: int = PIECE_BYTES) -> Passage:
    """The passage for tensors of a device, in pieces of at most `piece_bytes` where a single row is not larger."""
    return ThroughHost(piece_bytes) if device.type == "cuda" else PageByPage(piece_bytes)


@dataclass(frozen=True)
class PageByPage:
    """In the host's memory: copied piece by piece, and the pages behind each piece given back.

    watch: called after each piece.
    """

    piece_bytes: int = PIECE_BYTES
    watch: Callable[[], None] = lambda: None

    @property
    def _page_bytes(self) -> int:
        """Of what is given back at a time: the kernel would split a huge page, and fetch small ones later."""
        return HUGE_PAGE_BYTES if self.piece_bytes >= 16 * HUGE_PAGE_BYTES else mmap.PAGESIZE

    def lend(self, sides: Sides) -> None:
        _take_memory(sides.copy)
        self._pour(sides.home, zip(sides.here, sides.there(), strict=True))

    def take_back(self, sides: Sides) -> None:
        _take_memory(sides.home)
        self._pour(sides.copy, zip(sides.there(), sides.here, strict=True))

    def _pour(self, givers: Sequence[Tensor], pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
        pieces = [pair for one, other in pairs for pair in _pieces(one, other, self.piece_bytes)]
        for vector in givers:
            own = sorted(
                (pair for pair in pieces if storage_id(pair[0]) == storage_id(vector)),
                key=lambda pair: pair[0].data_ptr(),
            )
            done, end = vector.data_ptr(), vector.data_ptr() + vector.nbytes
            for (source, target), until in zip(own, [*(p.data_ptr() for p, _ in own[1:]), end], strict=True):
                target.copy_(source)
                done = give_back(done, until, self._page_bytes if until < end else mmap.PAGESIZE)
                self.watch()
            free(vector)


@dataclass(frozen=True)
class ThroughHost:
    """On a GPU, where a vector gives its memory back as a whole: all parameters wait in pinned memory meanwhile. They
    stay there until they are taken back, and need not be copied out of the device again."""

    piece_bytes: int = PIECE_BYTES
    _waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # a piece of the home, its place on the host

    def lend(self, sides: Sides) -> None:
        self._waiting[:] = self._on_host(sides.here)
        for piece, host in self._waiting:
            host.copy_(piece, non_blocking=True)
        _finish(sides.home)
        for vector in sides.home:
            free(vector)
        for vector in sides.copy:
            allocate(vector)
        places = (place for part in sides.there() for place, _ in _pieces(part, part, self.piece_bytes))
        for place, (_, host) in zip(places, self._waiting, strict=True):
            place.copy_(host, non_blocking=True)
        _finish(sides.copy)

    def take_back(self, sides: Sides) -> None:
        for vector in sides.copy:
            free(vector)
        for vector in sides.home:
            allocate(vector)
        for piece, host in self._waiting:
            piece.copy_(host, non_blocking=True)
        _finish(sides.home)
        self._waiting.clear()  # torch keeps pinned memory for the next time

    def _on_host(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Every piece with a place for it, one behind the other in blocks of the largest size: each block of pinned
        memory is rounded up to a power of two (`offload.pinned_blocks`)."""
        block = torch.empty(0, dtype=torch.uint8)
        for piece in (piece for tensor in tensors for piece, _ in _pieces(tensor, tensor, self.piece_bytes)):
            if block.nbytes < piece.nbytes:
                size_bytes = max(LARGEST_BLOCK_BYTES, piece.nbytes)
                block = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=piece.is_cuda)
            yield piece, block[: piece.nbytes].view(piece.dtype).view(piece.shape)
            block = block[piece.nbytes :]


def _take_memory(vectors: Sequence[Tensor]) -> None:
    """Memory whose pages come when they are written; malloc may have some from before."""
    for vector in vectors:
        allocate(vector)
        give_back(vector.data_ptr(), vector.data_ptr() + vector.nbytes)


def _pieces(one: Tensor, other: Tensor, most_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one shape, cut alike along the first dimension above 1, until no piece is larger or has a single
    element."""
    if one.nbytes <= most_bytes or one.numel() == 1:
        yield one, other
        return
    dim = next(dim for dim, extent in enumerate(one.shape) if extent > 1)
    rows = max(1, most_bytes * one.shape[dim] // one.nbytes)
    for a, b in zip(one.split(rows, dim), other.split(rows, dim), strict=True):
        yield from _pieces(a, b, most_bytes)


def _finish(vectors: Sequence[Tensor]) -> None:
    """Before memory changes hands, the copies that a GPU has in its queue have to be made."""
    for device in {vector.device for vector in vectors if vector.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
