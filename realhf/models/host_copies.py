"""Copies of a GPU's tensors in host memory, through a few pinned pages."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

STAGE_BYTES = 64 * 2**20  # of each of two; takes milliseconds to fill, beside which a launch is nothing


class Arrival(Protocol):
    """The end of a copy, as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Returns when the values are there."""


# (a pinned part, its source of as many bytes): starts the copy.
StartCopy = Callable[[Tensor, Tensor], Arrival]


def copies_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies of tensors of a GPU in pageable host memory.

    A copy from the GPU straight to pageable memory takes turns with the host. Here one part comes into pinned memory
    while the part before is copied on. Two pinned parts serve for all, since torch never gives pinned memory back.
    """
    if not tensors:
        return []
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    stages = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    through(stages, tensors, copies, _start_on_stream)
    return copies


def through(stages: Sequence[Tensor], sources: Sequence[Tensor], targets: Sequence[Tensor], start: StartCopy) -> None:
    """Copies `sources` to contiguous `targets` of the same shapes and dtypes, through `stages` of one size in bytes, in
    turn."""
    under_way: deque[tuple[Arrival, Tensor, Tensor]] = deque()

    def finish_oldest() -> None:
        arrival, stage, target = under_way.popleft()
        arrival.synchronize()
        target.copy_(stage)

    for number, (source, target) in enumerate(_parts(sources, targets, len(stages[0]))):
        if len(under_way) == len(stages):
            finish_oldest()
        stage = stages[number % len(stages)][: len(source)]
        under_way.append((start(stage, source), stage, target))
    while under_way:
        finish_oldest()


def _parts(sources: Sequence[Tensor], targets: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Both as bytes, in parts of at most `size`."""
    for source, target in zip(sources, targets, strict=True):
        yield from zip(_bytes(source.detach()).split(size), _bytes(target).split(size), strict=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _start_on_stream(stage: Tensor, source: Tensor) -> Arrival:
    stage.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event
