"""Reallocations on one device, four ranks as threads: the memory they need stays what it was the first time.

What goes over NCCL takes as many GPUs as ranks (`realhf doctor --gpu`); here messages go from buffer to buffer, and
what allocates memory is that of the executor and its carrier.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import pytest
import torch

from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.shards import Placement
from realhf.realloc.execute.carriers import MESSAGE_BYTES, Message, TorchCarrier, Work, _cut, _Piece
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.plan.planner import plan_between
from tests.waiting import PATIENCE_S

RANKS, BUCKET_BYTES, MIB = 4, 8 * 2**20, 2**20
MODEL = DecoderConfig(
    hidden_size=512, intermediate_size=1536, num_layers=4, num_heads=8, num_kv_heads=8, vocab_size=8192
)
HOME = Layout(DeviceMesh(0, RANKS), ParallelStrategy(1, 2, 2))
COPIES = [Layout(DeviceMesh(0, RANKS), ParallelStrategy(*degrees)) for degrees in ((4, 1, 1), (1, 4, 1), (1, 1, 4))]


class Channel:
    """From one thread to another: whoever comes second copies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[_Piece, torch.Tensor, threading.Event]] = deque()

    def meet(self, piece: _Piece) -> threading.Event:
        """Set when the piece has been copied."""
        own, done = piece.packed(), threading.Event()
        with self._lock:
            if not self._waiting or self._waiting[0][0].is_sent == piece.is_sent:
                self._waiting.append((piece, own, done))
                return done
            _, other, met = self._waiting.popleft()
        target, source = (other, own) if piece.is_sent else (own, other)
        target.copy_(source)
        done.set()
        met.set()
        return done


class Loop(TorchCarrier):
    """Messages between threads, packed as for torch.distributed."""

    def __init__(self, rank: int, channels: Mapping[tuple[int, int], Channel]):
        super().__init__()
        self._rank, self._channels = rank, channels

    def post(self, messages: Sequence[Message]) -> list[Work]:
        works = []
        for piece in (_Piece(message, views) for message in messages for views in _cut(message.views, MESSAGE_BYTES)):
            ends = (self._rank, piece.message.peer)
            done = self._channels[ends if piece.is_sent else ends[::-1]].meet(piece)
            works.append(Work([piece.message], partial(self._finish, piece, done)))
        return works

    def _finish(self, piece: _Piece, done: threading.Event, timeout: timedelta) -> None:
        assert done.wait(timeout.total_seconds())
        piece.unpack()


def on_every_rank(do: Callable[[int], None]) -> None:
    """In a thread each; raises what one of them raised."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            do(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not errors, errors


def tensors_of(layout: Layout, rank: int, device: str) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a rank as parts of one vector, as a worker has them."""
    boxes = device_boxes(MODEL, layout, rank)
    flat = torch.empty(sum(box.size for box in boxes), dtype=torch.bfloat16, device=device)
    parts = flat.split([box.size for box in boxes])
    return [(box, part.view(box.shape)) for box, part in zip(boxes, parts, strict=True)]


def value_at(box: Box) -> float:
    """Of the whole box: what its parameter is called, told apart."""
    return float(sum(map(ord, box.name)) % 251)


def reallocate(homes: list[list[tuple[Box, torch.Tensor]]], layout: Layout, device: str) -> None:
    """There, every value looked at, and the copy's memory is free again."""
    plan = plan_between(MODEL, Placement(HOME), Placement(layout), None, 2, BUCKET_BYTES)
    channels = {(a, b): Channel() for a in range(RANKS) for b in range(RANKS)}
    copies = [tensors_of(layout, rank, device) for rank in range(RANKS)]

    def move(rank: int) -> None:
        execute(Reallocation(plan, rank, homes[rank], copies[rank], Loop(rank, channels), timeout_s=PATIENCE_S))

    on_every_rank(move)
    for copy in copies:
        assert all((tensor == value_at(box)).all() for box, tensor in copy)


def filled_homes(device: str) -> list[list[tuple[Box, torch.Tensor]]]:
    homes = [tensors_of(HOME, rank, device) for rank in range(RANKS)]
    for home in homes:
        for box, tensor in home:
            tensor.fill_(value_at(box))
    return homes


def test_the_messages_between_threads_carry_a_model() -> None:
    """Without a GPU: that what the next test measures is a reallocation."""
    homes = filled_homes("cpu")
    for layout in COPIES:
        reallocate(homes, layout, "cpu")


@pytest.mark.gpu
def test_the_hundredth_reallocation_takes_no_more_memory_than_the_first() -> None:
    """Between them the device computes with tensors of all sizes, which would leave gaps in a badly kept memory."""
    homes, sizes = filled_homes("cuda"), torch.Generator().manual_seed(0)
    held = torch.cuda.memory_allocated()
    reserved = []
    for number in range(102):
        layout = COPIES[number % len(COPIES)]
        copy_bytes = 2 * sum(box.size for rank in range(RANKS) for box in device_boxes(MODEL, layout, rank))
        torch.cuda.reset_peak_memory_stats()
        reallocate(homes, layout, "cuda")
        # Of every rank two buckets; of the comparison of values one tensor of truths.
        comparison = max(box.size for rank in range(RANKS) for box in device_boxes(MODEL, layout, rank))
        assert torch.cuda.max_memory_allocated() - held <= copy_bytes + max(2 * RANKS * BUCKET_BYTES, comparison) + MIB
        assert torch.cuda.memory_allocated() == held
        for size in torch.randint(2**10, 2**23, (20,), generator=sizes).tolist():
            torch.empty(size, device="cuda")
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= 1.1 * max(reserved[:6])
