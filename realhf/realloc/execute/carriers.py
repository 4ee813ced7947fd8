"""How the messages of a reallocation travel: through torch.distributed (gloo, NCCL), or the memory of their host."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.cpu import host_group
from realhf.cpu.host_group import HostProcessGroup, Parts
from realhf.geometry.boxes import Box
from realhf.parallel.waiting import HOST_WAITS, Waits

# Bytes from which a part is a message of its own in torch.distributed, which saves packing a contiguous one. Smaller
# parts are packed together, up to this size.
MESSAGE_BYTES = 2**19
# Over NCCL all messages of a round are one call, which takes a few hundred at most, and packing costs little.
NCCL_MESSAGE_BYTES = 2**24


PeersPart = Literal["send", "receive"]


@dataclass(frozen=True)
class Message:
    """The boxes that this rank sends to `peer` or receives from it, in their order, each in a view of any strides.

    `peers_part` of it is the peer's. Until the exchange is done, sent tensors must not change and received ones must
    not be read. `parts`: where the views lie, if that is known without making them. `broadcast`: the ranks of the
    broadcast that it is part of, the root first; empty: it travels by itself. A root has one to each of the others.
    """

    peers_part: PeersPart
    peer: int
    boxes: Sequence[Box]
    views: Sequence[Tensor]
    parts: Parts | None = None
    broadcast: tuple[int, ...] = ()


@dataclass(frozen=True)
class Work:
    """Something of `messages` that is on its way; `wait` raises RuntimeError if it is not done within the time, or
    leaves that to `waits`."""

    messages: Sequence[Message]
    wait: Callable[[timedelta], object]
    waits: Waits = HOST_WAITS


class Carrier(Protocol):
    """Carries messages between the ranks of a reallocation, those between two ranks in the order in which both post
    them. Peers are named by their global rank."""

    def packed_bytes(self, messages: Sequence[Message]) -> int:
        """Memory that the messages take while they are on their way, beside their views."""

    def post(self, messages: Sequence[Message]) -> list[Work]:
        """Starts all of them and returns; waiting for all works, in any order, is to be done once each.

        Raises:
            UnpostedError: a peer has died.
        """

    def copy(self, here: Message, there: Message) -> list[Work]:
        """Within this rank, from the views of one into those of the other, of the same shapes and apart from them.
        Waited for like messages: the parts that peers wait for go first."""


class UnpostedError(RuntimeError):
    """`messages` could not be started; the text says why."""

    def __init__(self, messages: Sequence[Message], cause: RuntimeError):
        super().__init__(str(cause))
        self.messages = messages


class ReallocationError(RuntimeError):
    """A peer did not send or receive its part; the text names the model, the bucket, the peer and the parameters."""


def carrier_between(group_of_host: dist.ProcessGroup | None, waits: Waits = HOST_WAITS) -> Carrier:
    """The memory of the host that all ranks of a reallocation are on, if it has a group; else the world's backend."""
    return TorchCarrier(waits=waits) if group_of_host is None else HostCarrier(group_of_host)


_NOTHING: "tuple[Sequence[Message], list[_Piece]]" = ((), [])


class TorchCarrier:
    """Messages of torch.distributed. Small or non-contiguous parts are packed into buffers on their device."""

    def __init__(self, group: dist.ProcessGroup | None = None, waits: Waits = HOST_WAITS):
        """`group`: default the world. With NCCL all its ranks must have made one collective call in it before."""
        self._group, self._waits = group, waits
        self._cut_last: tuple[Sequence[Message], list[_Piece]] = _NOTHING  # most are asked for their bytes, then posted

    @property
    def _is_nccl(self) -> bool:
        return dist.is_initialized() and _is_nccl(self._group)

    def packed_bytes(self, messages: Sequence[Message]) -> int:
        self._cut_last = messages, self._pieces(messages)
        return sum(piece.packed_bytes for piece in self._cut_last[1])

    def post(self, messages: Sequence[Message]) -> list[Work]:
        known, pieces = self._cut_last
        if known is not messages:
            pieces = self._pieces(messages)
        self._cut_last = _NOTHING
        if pieces and self._is_nccl:
            return self._post_together(pieces)
        # Messages from others may arrive while this rank packs, and its first buffer is on its way while it packs the
        # rest.
        pieces.sort(key=lambda piece: piece.is_sent)
        return [self._post(piece) for piece in pieces]

    def copy(self, here: Message, there: Message) -> list[Work]:
        def wait(timeout: timedelta) -> None:
            for ours, wanted in zip(here.views, there.views, strict=True):
                wanted.copy_(ours)

        return [Work([], wait)]  # in the wait, since messages go on meanwhile

    def _pieces(self, messages: Sequence[Message]) -> "list[_Piece]":
        most_bytes = NCCL_MESSAGE_BYTES if self._is_nccl else MESSAGE_BYTES
        return [_Piece(message, views) for message in messages for views in _cut(message.views, most_bytes)]

    def _post(self, piece: "_Piece") -> Work:
        start = dist.isend if piece.is_sent else dist.irecv
        packed = piece.packed()
        with _posting([piece.message]):
            work = start(packed, piece.message.peer, group=self._group)
        return self._work(work, [piece])

    def _post_together(self, pieces: "Sequence[_Piece]") -> list[Work]:
        """In one call: over NCCL, ranks that send to each other would wait for each other otherwise."""
        operations = [
            dist.P2POp(
                dist.isend if piece.is_sent else dist.irecv, piece.packed(), piece.message.peer, group=self._group
            )
            for piece in pieces
        ]
        with _posting([piece.message for piece in pieces]):
            works: Sequence[Any] = dist.batch_isend_irecv(operations)
        # Several messages have one work where the backend makes one call of them.
        shares = [pieces] if len(works) < len(pieces) else [[piece] for piece in pieces]
        return [self._work(work, share) for work, share in zip(works, shares, strict=True)]

    def _work(self, work: Any, pieces: "Sequence[_Piece]") -> Work:
        def wait(timeout: timedelta) -> None:
            self._waits.order(work, timeout.total_seconds())
            for piece in pieces:
                piece.unpack()

        return Work([piece.message for piece in pieces], wait, self._waits)


class HostCarrier:
    """Messages over the memory of one host: copied into it out of the sender's tensors, and out of it into the
    receiver's, of any strides. Nothing is packed; between two ranks `host_group.PARTS_RING_BYTES` are on their way."""

    def __init__(self, group: dist.ProcessGroup):
        assert isinstance(group, HostProcessGroup), f"a group over {host_group.BACKEND} is needed, not {group}"
        self._group = group

    def packed_bytes(self, messages: Sequence[Message]) -> int:
        return 0

    def post(self, messages: Sequence[Message]) -> list[Work]:
        works = []
        for message in messages:
            peer = dist.get_group_rank(self._group, message.peer)
            move = self._group.receive_parts if message.peers_part == "send" else self._group.send_parts
            with _posting([message]):
                works.append(Work([message], move(message.parts or Parts.of(message.views), peer).wait))
        return works

    def copy(self, here: Message, there: Message) -> list[Work]:
        # A message to itself is written past the caches: that takes a third of the time where rows are short. It is
        # copied while peers make room or have sent nothing.
        return self.post([there, here])


class BroadcastCarrier:
    """Messages that are parts of broadcasts, as collectives of process groups. The others, such as sums of bits, and a
    rank's own copies travel as `beside` has it.

    The groups are by their ranks, ascending. Broadcasts start in one order on all ranks (`broadcasts_of`). Over NCCL
    one starts when that before it has ended on the device: two of different communicators could wait for each other.
    """

    def __init__(self, groups: Mapping[tuple[int, ...], dist.ProcessGroup], beside: Carrier, waits: Waits = HOST_WAITS):
        self._groups, self._beside, self._waits = groups, beside, waits
        self._last: dist.Work | None = None  # over NCCL

    def packed_bytes(self, messages: Sequence[Message]) -> int:
        return sum(piece.packed_bytes for group in broadcasts_of(messages) for piece in self._pieces(group[0]))

    def post(self, messages: Sequence[Message]) -> list[Work]:
        alone = [message for message in messages if not message.broadcast]
        works = self._beside.post(alone) if alone else []
        for of_one in broadcasts_of(messages):
            for piece in self._pieces(of_one[0]):
                works.append(self._start(piece, of_one))
        return works

    def copy(self, here: Message, there: Message) -> list[Work]:
        return self._beside.copy(here, there)

    def _pieces(self, message: Message) -> "list[_Piece]":
        most_bytes = NCCL_MESSAGE_BYTES if _is_nccl(self._group(message)) else MESSAGE_BYTES
        return [_Piece(message, views) for views in _cut(message.views, most_bytes)]

    def _group(self, message: Message) -> dist.ProcessGroup:
        return self._groups[tuple(sorted(message.broadcast))]

    def _start(self, piece: "_Piece", messages: Sequence[Message]) -> Work:
        group, root = self._group(piece.message), piece.message.broadcast[0]
        packed = piece.packed()
        if self._last is not None:
            self._waits.order(self._last, 0.0)  # on the device: this thread goes on
        with _posting(messages):
            work = dist.broadcast(packed, root, group, async_op=True)
        assert work is not None
        self._last = work if _is_nccl(group) else None

        def wait(timeout: timedelta) -> None:
            self._waits.order(work, timeout.total_seconds())
            piece.unpack()

        return Work(messages, wait, self._waits)


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    return dist.get_backend(group) == dist.Backend.NCCL


def broadcasts_of(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages of each broadcast, in the order in which every rank starts those of a round."""
    found: dict[tuple[int, ...], list[Message]] = {}
    for message in messages:
        if message.broadcast:
            found.setdefault(message.broadcast, []).append(message)
    return [found[ranks] for ranks in sorted(found)]


def post(carrier: Carrier, messages: Sequence[Message], label: str) -> list[Work]:
    """Starts the messages; `label` begins the text of an error.

    Raises:
        ReallocationError: a peer has died. Named are the messages that could not be started: one, or all where they
            are started together.
    """
    try:
        return carrier.post(messages)
    except UnpostedError as error:
        raise ReallocationError(f"{label} could not reach {_names(error.messages)}: {error}") from error


@contextmanager
def _posting(messages: Sequence[Message]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise UnpostedError(messages, error) from error


def wait_for(works: Sequence[Work], label: str, timeout_s: float) -> None:
    """Waits until all of them are done, or as their `waits` do: later work of the current stream comes after them.

    Raises:
        ReallocationError: a peer did not answer within `timeout_s`, or died.
    """
    start = time.monotonic()
    for work in works:
        try:
            work.wait(timedelta(seconds=max(0.001, start + timeout_s - time.monotonic())))
        except RuntimeError as error:
            raise ReallocationError(
                f"{label} waited {time.monotonic() - start:.1f} s (at most {timeout_s:g}) in vain for "
                f"{_names(work.messages)}: {error}"
            ) from error
    messages = [replace(message, views=(), parts=None) for work in works for message in work.messages]  # no tensors
    for waits in dict.fromkeys(work.waits for work in works):
        waits.watch(timeout_s, lambda: f"{label} waited in vain for {_names(messages)}")


def buffers_like(views: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes of `views`, without values, that lie one behind the other in memory."""
    sizes = [view.numel() for view in views]
    parts = torch.empty(sum(sizes), dtype=views[0].dtype, device=views[0].device).split(sizes)
    return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]


def _names(messages: Sequence[Message]) -> str:
    """`rank 3 to send model.norm.weight and 4 more`, for every message."""
    texts = []
    for message in messages:
        parameters = list(dict.fromkeys(box.name for box in message.boxes))
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        texts.append(f"rank {message.peer} to {message.peers_part} {parameters[0]}{more}")
    return ", ".join(dict.fromkeys(texts))


class _Piece:
    """Views of a message that go as one message of torch.distributed: from where they lie one behind the other, or
    packed."""

    def __init__(self, message: Message, views: Sequence[Tensor]):
        self.message, self.is_sent, self._views = message, message.peers_part == "receive", list(views)
        self._whole = _as_one(views)
        self._buffers: list[Tensor] | None = None
        self.packed_bytes = 0 if self._whole is not None else sum(view.nbytes for view in views)

    def packed(self) -> Tensor:
        """A tensor to send, or to receive into, as bytes: the messages need no dtype."""
        whole = self._whole
        if whole is None:
            self._buffers = buffers_like(self._views)
            if self.is_sent:
                torch._foreach_copy_(self._buffers, self._views)
            whole = _as_one(self._buffers)
        assert whole is not None
        return whole.view(torch.uint8)

    def unpack(self) -> None:
        """To be called when it is done."""
        if self._buffers is not None and not self.is_sent:
            torch._foreach_copy_(self._views, self._buffers)
        self._buffers = None


def _cut(views: Sequence[Tensor], message_bytes: int) -> Iterator[Sequence[Tensor]]:
    """The views of each piece. Depends on their sizes alone, so that both ends cut alike."""
    small: list[Tensor] = []
    small_bytes = 0
    for view in views:
        is_large = view.nbytes >= message_bytes
        if small and (is_large or small_bytes + view.nbytes > message_bytes):
            yield small
            small, small_bytes = [], 0
        if is_large:
            yield [view]
        else:
            small.append(view)
            small_bytes += view.nbytes
    if small:
        yield small


def _as_one(views: Sequence[Tensor]) -> Tensor | None:
    """All views as a vector, where they lie one behind the other in memory."""
    first = views[0]
    memory, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for view in views:
        if not view.is_contiguous() or view.data_ptr() != end or view.untyped_storage().data_ptr() != memory:
            return None
        end += view.nbytes
    return first.as_strided((sum(view.numel() for view in views),), (1,))
