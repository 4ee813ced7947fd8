"""Vectors of a model that give their device memory back while their values wait in host memory."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class HostCopy:
    """The place in host memory of vectors, each with a storage of its own, all on one device.

    On a GPU the values go to and from pinned memory on a stream of their own, and nobody waits: the device memory is
    free for others when its copy has been made, and what is computed after `load` is queued behind the copy back. On
    the CPU, which has one memory only, another buffer stands for the host's: the same steps, made at once.
    Views of the vectors stay valid, and must not be read in between. Nothing takes host memory before it is needed.

    is_offloaded: whether the values are on the host, and there alone.
    has_changed: to be set when the vectors were written; what has not changed since `load` is not copied again.
    """

    def __init__(self, vectors: Sequence[Tensor]):
        self._vectors = [vector.detach() for vector in vectors]
        self._host: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self.is_offloaded, self.has_changed = False, True

    def offload(self) -> None:
        """Gives the device memory back; nothing happens if that has been done."""
        if self.is_offloaded:
            return
        if not self._host:
            self._reserve()
        with self._on_stream():
            for vector, host in zip(self._vectors, self._host, strict=True):
                if self.has_changed:
                    host.copy_(vector, non_blocking=True)
                if self._stream is not None:
                    vector.record_stream(self._stream)  # its memory is not used anew before the copy is made
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
            for vector, host in zip(self._vectors, self._host, strict=True):
                vector.copy_(host, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._vectors[0].device).wait_stream(self._stream)
        self.is_offloaded = False

    def _reserve(self) -> None:
        is_cuda = any(vector.device.type == "cuda" for vector in self._vectors)
        self._host = [torch.empty(v.shape, dtype=v.dtype, pin_memory=is_cuda) for v in self._vectors]
        self._stream = torch.cuda.Stream(self._vectors[0].device) if is_cuda else None

    def _on_stream(self) -> AbstractContextManager[object]:
        """Within it copies are queued behind what the device was asked for so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._vectors[0].device))
        return torch.cuda.stream(self._stream)


def free(vector: Tensor) -> None:
    """Gives the memory of a vector back, and that of all views of it; they must not be read until `allocate`."""
    vector.untyped_storage().resize_(0)


def allocate(vector: Tensor) -> None:
    """Memory for a vector after `free`, with arbitrary contents."""
    vector.untyped_storage().resize_(vector.nbytes)
