"""Vectors in host memory that are worked on by a device, a chunk at a time."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from realhf.architecture.chunks import STAGED_CHUNKS

Chunk = dict[str, Tensor]  # parts of several vectors, of one length
Work = Callable[[Chunk], None]  # changes a chunk in place


class Staging:
    """Brings chunks of vectors from host memory to a device, where each is worked on, and back.

    On a GPU the next chunk comes and the last one goes meanwhile: each direction has a stream of its own, and chunks
    take turns in `STAGED_CHUNKS` buffers. The vectors lie in pinned memory, so that no copy keeps the host waiting.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def each(self, works: Sequence[tuple[Chunk, Work]]) -> None:
        """Applies its work to every chunk, in order; the values are in host memory afterwards."""
        if self._device.type == "cuda":
            self._overlapped(works)
            return
        for kept, work in works:
            chunk = {kind: part.to(self._device, copy=True) for kind, part in kept.items()}
            work(chunk)
            _copy(chunk, kept)
            del chunk  # before the next one takes memory

    @cached_property
    def _streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """For copies to the device, and for copies back."""
        return torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)

    def _overlapped(self, works: Sequence[tuple[Chunk, Work]]) -> None:
        (coming, going), computing = self._streams, torch.cuda.current_stream(self._device)
        buffers = list(self._buffers([kept for kept, _ in works]))
        is_free: list[torch.cuda.Event | None] = [None] * len(buffers)
        coming.wait_stream(computing)  # which may still use the memory that is now the buffers'
        for number, (kept, work) in enumerate(works):
            turn = number % len(buffers)
            chunk = {kind: buffers[turn][kind][: len(part)] for kind, part in kept.items()}
            with torch.cuda.stream(coming):
                if (event := is_free[turn]) is not None:
                    coming.wait_event(event)
                _copy(kept, chunk)
            computing.wait_stream(coming)
            work(chunk)
            going.wait_stream(computing)
            with torch.cuda.stream(going):
                _copy(chunk, kept)
            is_free[turn] = going.record_event()
        going.synchronize()  # the host may read the vectors, and the buffers' memory is free

    def _buffers(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """One for each chunk that is on the device at a time, with room for the largest that it takes."""
        for turn in range(min(STAGED_CHUNKS, len(chunks))):
            size = max(len(part) for chunk in chunks[turn::STAGED_CHUNKS] for part in chunk.values())
            yield {kind: torch.empty(size, dtype=part.dtype, device=self._device) for kind, part in chunks[0].items()}


def _copy(source: Chunk, target: Chunk) -> None:
    for kind, part in source.items():
        target[kind].copy_(part, non_blocking=True)
