"""Checks that a reallocation delivered the sent parts: a checksum for every part follows the data."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.geometry.boxes import Box
from realhf.geometry.layout import Layout
from realhf.realloc.execute.carriers import Message, PeersPart, ReallocationError, post, wait_for
from realhf.realloc.execute.checksum import SumsByPeer, bit_sums
from realhf.realloc.execute.executor import Reallocation
from realhf.realloc.execute.locations import Memory, locate


class VerificationError(ReallocationError):
    """A rank holds other values than were sent to it, or than it lent; the text names the parameter, the part and the
    ranks."""


class VerificationSchedule:
    """Which moves of a run are verified: the first of each name and layout, then all of every N-th step.

    A function of the requests alone, so that all ranks of a move decide alike.
    """

    def __init__(self, every_steps: int):
        """`every_steps`: 1 verifies each reallocation, 0 none."""
        self._every_steps = every_steps
        self._seen: set[tuple[str, Layout]] = set()

    def is_due(self, name: str, layout: Layout, step: int) -> bool:
        """Whether this move, which from now on has been seen, is to be verified. `name` is that of a model that is
        reallocated, or of a `DataflowGraph.follows`."""
        if not self._every_steps:
            return False
        is_first = (name, layout) not in self._seen
        self._seen.add((name, layout))
        return is_first or step % self._every_steps == 0


def verify(reallocation: Reallocation, *, arrived: SumsByPeer | None = None) -> None:
    """Compares the parts that each rank received, or copied, with the sender's.

    All ranks that called `execute` call it afterwards with the same argument, while the tensors are as `execute` left
    them. Where eta < 1 the target holds averages, so `arrived` has the bit sums that `execute` noted; local copies are
    not compared then.

    A rank sums up the parts that it sent and that it received, sends one message of 8 bytes a part to each rank it
    had sent to, and compares. It is one more round of the plan, and cannot deadlock for the same reason.

    Raises:
        VerificationError: a part of this rank differs.
        ReallocationError: a peer did not send its sums within `timeout_s`, or died.
    """
    plan, rank, model_name = reallocation.plan, reallocation.rank, reallocation.model_name
    with torch.no_grad():
        label = f"reallocation of {model_name}, verification: rank {rank}"
        located = locate(plan, rank, reallocation.source, reallocation.target)
        memory = Memory([tensor for _, tensor in (*reallocation.source, *reallocation.target)])
        differing: list[tuple[int, Box]] = []
        if arrived is None and (boxes := plan.local_copies.get(rank, ())):
            differs = bit_sums(located.copied.views(memory)) != bit_sums(located.copies.views(memory))
            differing = [(rank, boxes[index]) for index in differs.nonzero().flatten().tolist()]
        parts: dict[PeersPart, dict[int, list[tuple[Box, Tensor]]]] = {"receive": {}, "send": {}}
        for placed in (placed for each_round in located.rounds for placed in each_round.messages):
            found = parts[placed.peers_part].setdefault(placed.peer, [])
            found.extend(zip(placed.boxes, placed.parts.views(memory), strict=True))
        messages: list[Message] = []
        own: dict[int, Tensor] = {}
        for peer, sent in sorted(parts["receive"].items()):
            boxes, views = zip(*sent, strict=True)
            messages.append(Message("receive", peer, boxes, [bit_sums(views)]))
        for peer, received in sorted(parts["send"].items()):
            boxes, views = zip(*received, strict=True)
            own[peer] = bit_sums(views) if arrived is None else torch.stack(arrived[peer])
            messages.append(Message("send", peer, boxes, [torch.empty_like(own[peer])]))
        works = post(reallocation.carrier, messages, label)
        wait_for(works, label, reallocation.timeout_s)
        for message in messages[len(parts["receive"]) :]:
            differs = own[message.peer] != message.views[0]
            differing += [(message.peer, message.boxes[index]) for index in differs.nonzero().flatten().tolist()]
    if differing:
        sender, _ = differing[0]
        raise VerificationError(
            f"reallocation of {model_name}: rank {rank} holds other values than rank {sender} sent of parameter "
            f"{_named([box for _, box in differing])}; a link or a memory changed them: {_REMEDY}"
        )


class LentParts:
    """Bit sums of the parts that a rank lends to a copy of a model, to be compared in the copy, and when it has them
    back."""

    def __init__(self, lent: Sequence[tuple[Box, Tensor]]):
        self._boxes = [box for box, _ in lent]
        self._sums = bit_sums([tensor for _, tensor in lent]) if lent else None

    def verify(self, parts: Sequence[tuple[Box, Tensor]], *, rank: int, model_name: str, is_back: bool = True) -> None:
        """`parts`: the same boxes in the same order, in the copy or, where it `is_back`, at home.

        Raises:
            VerificationError: a part is not as it was lent.
        """
        if differing := self._differing(parts):
            lent = f"{model_name}: rank {rank} lent other values to a copy than it had, of parameter "
            back = f"{model_name}: rank {rank} took other values back than it had lent to a copy, of parameter "
            when = " while the call in the copy's layout ran" if is_back else ""
            raise VerificationError(
                f"{back if is_back else lent}{_named(differing)}; a memory changed them{when}: {_REMEDY}"
            )

    def _differing(self, parts: Sequence[tuple[Box, Tensor]]) -> list[Box]:
        assert self._boxes == [box for box, _ in parts]
        if self._sums is None:
            return []
        differs = bit_sums([tensor for _, tensor in parts]) != self._sums
        return [self._boxes[index] for index in differs.nonzero().flatten().tolist()]


_REMEDY = "go on from the last checkpoint, without that machine if it happens again"


def _named(boxes: Sequence[Box]) -> str:
    first, more = boxes[0], f" and {len(boxes) - 1} more parts" if len(boxes) > 1 else ""
    return f"{first.name}, the part of shape {first.shape} at offset {first.offset}{more}"
