"""Only what changed is sent: places and new values of the elements that differ from those that the copy has.

A part that was sent before travels as the shorter of two: its values, or a text. The text has for each block of 65,536
elements the number of changes (uint32), then the offsets of all changes in their blocks (uint16), then their values.
The sizes of the texts, 8 bytes a part, travel before them. Any carrier takes parts and texts; a device that sends a
part on sends the text that it received.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor

from realhf.cpu.host_group import rows_of
from realhf.cpu.native import kernels
from realhf.geometry.boxes import Box
from realhf.realloc.execute.carriers import Carrier, Message, ReallocationError, Work, buffers_like, post, wait_for
from realhf.realloc.execute.held import by_name, part
from realhf.realloc.plan.planner import ReallocationPlan

BLOCK = 2**16  # elements, so that an offset has 16 bits
SIZE_BYTES = 8  # of a part's text, or of all its values
_SLACK_BYTES = 128  # that the kernel may write behind a text

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(values: Tensor, known: Tensor) -> Tensor | None:
    """The text of what differs, bit by bit, between `values`, of any strides, and the vector `known`, which becomes
    equal to them.

    A vector of their dtype, padded with zeros: empty where nothing differs, None where it would not be shorter than all
    values.
    """
    if kernels is None or values.device.type != "cpu":
        return _encode(values, known)
    item, count = values.element_size(), values.numel()
    rows = np.array(list(rows_of(values.data_ptr(), values.shape, values.stride(), item)), np.int64)
    out = torch.empty(count * item + 4 * _blocks(count) + _SLACK_BYTES, dtype=torch.uint8)
    size = kernels.encode_changes(item, rows.ctypes.data, len(rows), known.data_ptr(), count, out.data_ptr())
    return None if size < 0 else _padded(out[:size], values.dtype)


def decode(text: Tensor, values: Tensor) -> int:
    """Writes the new values of a text of `encode` into `values`, of any strides; returns how many there are."""
    if not text.numel():
        return 0
    blocks, item = _blocks(values.numel()), values.element_size()
    data = text.view(torch.uint8)
    counts = _read(data[: 4 * blocks], torch.int32).long()
    changes = int(counts.sum())
    ends = [4 * blocks + 2 * changes, 4 * blocks + (2 + item) * changes]
    offsets = _read(data[4 * blocks : ends[0]], torch.int16).long().bitwise_and_(BLOCK - 1)
    places = offsets + torch.arange(blocks, device=text.device).mul_(BLOCK).repeat_interleave(counts)
    if not values.dim():
        values = values.view(1)
    index: list[Tensor] = []  # not torch.unravel_index, whose first use takes a second
    for extent in reversed(values.shape):
        index.insert(0, places % extent)
        places = places.div(extent, rounding_mode="floor")
    values[tuple(index)] = _read(data[ends[0] : ends[1]], values.dtype)
    return changes


def _encode(values: Tensor, known: Tensor) -> Tensor | None:
    """`encode` where there is no kernel."""
    item = values.element_size()
    new, before = (flat.view(_BITS[item]) for flat in (values.reshape(-1), known))
    places = (new != before).nonzero().flatten()
    blocks = _blocks(new.numel())
    if len(places) and 4 * blocks + (2 + item) * len(places) > new.nbytes - item:
        known.copy_(values.reshape(-1))
        return None
    before[places] = new[places]
    if not len(places):
        return known[:0].clone()
    counts = torch.bincount(places // BLOCK, minlength=blocks).int()
    offsets = places.remainder(BLOCK).to(torch.int16)  # the lower 16 bits
    return _padded(torch.cat([each.view(torch.uint8) for each in (counts, offsets, new[places])]), values.dtype)


def _padded(text: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of bytes as a vector of a dtype."""
    whole = torch.zeros(-(-len(text) // dtype.itemsize), dtype=dtype, device=text.device)
    whole.view(torch.uint8)[: len(text)] = text
    return whole


def _read(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.clone().view(dtype)  # aligned


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


class SentParts:
    """The values that a rank has sent last into one copy, by part: those of a plan that it sends out of its own."""

    def __init__(self, plan: ReallocationPlan, rank: int, source: Sequence[tuple[Box, Tensor]]):
        """Keeps the values of `source`, which have been sent by this plan."""
        self.plan = plan
        own = (t.load.boxes for t in plan.transfers if t.source == rank and not t.is_forwarded)
        self._boxes, held = list(dict.fromkeys(box for boxes in own for box in boxes)), by_name(source)
        views = [part(held, box) for box in self._boxes]
        self._last = dict(zip(self._boxes, buffers_like(views) if views else [], strict=True))
        for box, view in zip(self._boxes, views, strict=True):
            self._last[box].copy_(view)
        self.sends = Counter(box for t in plan.transfers if t.source == rank for box in t.load.boxes)

    def text(self, box: Box, view: Tensor) -> Tensor | None:
        """The changes of a part, as `encode` writes them; from now on the view's values are those that were sent."""
        return encode(view, self._last[box].view(-1))


class ChangesCarrier:
    """Sends the parts of one move into a copy that has the values of the move before, as what changed of them.

    `moved` counts what came here: `bytes` of `whole_bytes` in `parts`, and `changed` of `elements`; all elements of a
    part that came as values count as changed. Before the messages of a round it waits for the sizes of those to come,
    and for nothing else. A rank posts its own sizes before it waits, so the order of the rounds deadlocks no more than
    without sizes.
    """

    def __init__(self, beside: Carrier, sent: SentParts, label: str, timeout_s: float):
        """`beside` carries the messages; `label` begins the text of an error."""
        self._beside, self._sent, self._label, self._timeout_s = beside, sent, label, timeout_s
        self._sends = sent.sends.copy()  # that are left
        self._texts: dict[Box, Tensor | None] = {}  # of parts that are to be sent once more, None for their values
        self.moved = Counter[str]()

    def packed_bytes(self, messages: Sequence[Message]) -> int:
        return sum(view.nbytes for message in messages for view in message.views)  # at most

    def copy(self, here: Message, there: Message) -> list[Work]:
        return self._beside.copy(here, there)

    def post(self, messages: Sequence[Message]) -> list[Work]:
        texts: dict[Box, Tensor | None] = {}  # of this round
        for message in messages:
            if message.peers_part == "receive":
                for box, view in zip(message.boxes, message.views, strict=True):
                    texts[box] = self._outgoing(box, view)
        headers = [replace(message, views=[_sizes(message, texts)], parts=None) for message in messages]
        wait_for(post(self._beside, headers, self._label), self._label, self._timeout_s)
        arriving: list[tuple[Tensor, Tensor]] = []
        for message, header in zip(messages, headers, strict=True):
            if message.peers_part == "send":
                for box, view, size in zip(message.boxes, message.views, header.views[0].tolist(), strict=True):
                    texts[box] = self._expected(box, view, size)
                    arriving += [] if (text := texts[box]) is None else [(view, text)]

        def write(timeout: timedelta) -> None:
            for view, text in arriving:
                self.moved["changed"] += decode(text, view)

        payloads = [payload for message in messages if (payload := _payload(message, texts)).boxes]
        return [*post(self._beside, payloads, self._label), Work([], write)]

    def _outgoing(self, box: Box, view: Tensor) -> Tensor | None:
        """The text to be sent of a part, None for its values."""
        if box not in self._texts:
            self._texts[box] = self._sent.text(box, view)
        self._sends[box] -= 1
        return self._texts[box] if self._sends[box] else self._texts.pop(box)

    def _expected(self, box: Box, view: Tensor, size_bytes: int) -> Tensor | None:
        """Room for the text of a part that is to come, None if it comes as values."""
        is_whole = size_bytes == view.nbytes
        self.moved += Counter(bytes=SIZE_BYTES + size_bytes, whole_bytes=view.nbytes, elements=view.numel(), parts=1)
        self.moved["changed"] += view.numel() if is_whole else 0
        if size_bytes % view.element_size() or not 0 <= size_bytes <= view.nbytes:
            raise ReallocationError(f"{self._label}: {size_bytes} bytes of {box} are to come, which has {view.nbytes}")
        text = None if is_whole else view.new_empty(size_bytes // view.element_size())
        if self._sends[box]:
            self._texts[box] = text
        return text


def whole_move(plan: ReallocationPlan, rank: int) -> Counter[str]:
    """As `ChangesCarrier.moved`, where all values were sent."""
    size_bytes = plan.received_bytes.get(rank, 0)
    elements = size_bytes // plan.element_bytes
    return Counter(bytes=size_bytes, whole_bytes=size_bytes, changed=elements, elements=elements)


def _sizes(message: Message, texts: Mapping[Box, Tensor | None]) -> Tensor:
    """int64 [parts] on the device of the parts: bytes to be sent, or room for those to come."""
    if message.peers_part == "send":
        return torch.empty(len(message.boxes), dtype=torch.int64, device=message.views[0].device)
    sent = ((view, texts[box]) for box, view in zip(message.boxes, message.views, strict=True))
    sizes = [(view if text is None else text).nbytes for view, text in sent]
    return torch.tensor(sizes, dtype=torch.int64, device=message.views[0].device)


def _payload(message: Message, texts: Mapping[Box, Tensor | None]) -> Message:
    """The texts of a message, and the values of parts that have none; without parts that have not changed."""
    if all(texts[box] is None for box in message.boxes):
        return message
    parts = [(box, texts[box]) for box in message.boxes]
    whole = dict(zip(message.boxes, message.views, strict=True))
    sent = [(box, whole[box] if text is None else text) for box, text in parts if text is None or text.numel()]
    return replace(message, boxes=[box for box, _ in sent], views=[view for _, view in sent], parts=None)
