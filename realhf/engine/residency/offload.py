"""Vectors of a model that give their device memory back while their values wait in host memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

MIB = 2**20
LARGEST_BLOCK_BYTES = 64 * MIB  # takes milliseconds to copy, beside which a launch is nothing
SMALLEST_BLOCK_BYTES = MIB


def pinned_blocks(size_bytes: int) -> list[int]:
    """The sizes, in bytes, of blocks of pinned memory that together have `size_bytes`: the largest as often as it fits,
    then powers of two down to the smallest, then the rest.

    torch rounds every block of pinned memory up to a power of two (pytorch issue 150517), and a single block could take
    twice its size. Only the last of these blocks is rounded up, by less than half of `SMALLEST_BLOCK_BYTES`.
    """
    sizes = []
    while size_bytes > SMALLEST_BLOCK_BYTES:
        sizes.append(min(LARGEST_BLOCK_BYTES, 2 ** (size_bytes.bit_length() - 1)))
        size_bytes -= sizes[-1]
    return [*sizes, size_bytes] if size_bytes else sizes


class HostCopy:
    """The place in host memory of vectors, each with a storage of its own, all on one device.

    On a GPU the values travel to and from pinned memory on their own stream, and the host does not wait: the device
    memory is free when its copy has been made, and computation after `load` is queued behind the copy back. The CPU has
    one memory only, so another buffer stands for the host's, and the same steps run at once. Views of the vectors stay
    valid, and must not be read in between. Host memory is taken when it is first needed.

    cut: from the bytes of a vector to the sizes of its blocks of host memory, whole elements each; by default
        `pinned_blocks` on a GPU, else one block.
    is_offloaded: whether the values are on the host, and there alone.
    has_changed: set it when the vectors were written; vectors unchanged since `load` are not copied again.
    """

    def __init__(self, vectors: Sequence[Tensor], cut: Callable[[int], list[int]] | None = None):
        self._vectors = [vector.detach() for vector in vectors]
        self._is_cuda = any(vector.device.type == "cuda" for vector in self._vectors)
        self._cut = cut or (pinned_blocks if self._is_cuda else lambda size_bytes: [size_bytes])
        self._pieces: list[tuple[Tensor, Tensor]] = []  # (a view of a part of a vector, its place on the host)
        self._stream: torch.cuda.Stream | None = None
        self.is_offloaded, self.has_changed = False, True

    def offload(self) -> None:
        """Gives the device memory back; nothing happens if that has been done."""
        if self.is_offloaded:
            return
        if not self._pieces:
            self._reserve()
        with self._on_stream():
            if self.has_changed:
                for piece, host in self._pieces:
                    host.copy_(piece, non_blocking=True)
            if self._stream is not None:
                for vector in self._vectors:
                    vector.record_stream(self._stream)  # its memory is not used anew before the copies are made
        for vector in self._vectors:
            free(vector)
        self.is_offloaded, self.has_changed = True, False

    def load(self) -> None:
        """Takes device memory again, with the values of `offload`; nothing happens if they are there."""
        if not self.is_offloaded:
            return
        for vector in self._vectors:
            allocate(vector)
        with self._on_stream():
            for piece, host in self._pieces:
                piece.copy_(host, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._vectors[0].device).wait_stream(self._stream)
        self.is_offloaded = False

    def _reserve(self) -> None:
        """Takes host memory, now that the vectors have theirs."""
        for vector in self._vectors:
            sizes = [size_bytes // vector.itemsize for size_bytes in self._cut(vector.nbytes)]
            for piece in vector.split(sizes):
                host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=self._is_cuda)
                self._pieces.append((piece, host))
        self._stream = torch.cuda.Stream(self._vectors[0].device) if self._is_cuda else None

    def _on_stream(self) -> AbstractContextManager[object]:
        """Inside it copies are queued behind the work that the device already has."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._vectors[0].device))
        return torch.cuda.stream(self._stream)


def free(vector: Tensor) -> None:
    """Gives the memory of a vector back, and that of all views of it; they must not be read until `allocate`."""
    vector.untyped_storage().resize_(0)


def allocate(vector: Tensor) -> None:
    """Memory for a vector after `free`, with arbitrary contents; nothing happens if it has its memory."""
    storage = vector.untyped_storage()
    if storage.nbytes() < vector.nbytes:  # it would move its contents, even for the size that it has
        storage.resize_(vector.nbytes)
