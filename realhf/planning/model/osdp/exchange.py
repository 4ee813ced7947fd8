"""Seconds in which the data-parallel ranks of a training exchange parameters and gradients, where operators have modes
of their own (OSDP, IJCAI 2023, section 3)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from realhf.geometry.operators import EMBEDDING
from realhf.planning.model.osdp.units import Piece, StageUnits

LOOKED_UP = (EMBEDDING, "positions")
Collective = Callable[[float], float]  # seconds by the bytes of a vector


def waited_s(gather_s: float, ahead_s: float) -> float:
    """Seconds that a gather lasts beyond `ahead_s`, the computation since the unit before it came into use."""
    return max(gather_s - ahead_s, 0.0)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Of one group of ranks, in a mini-batch of `micro_batches`.

    all_reduce, all_gather, reduce_scatter: what each takes.
    item, gradient: bytes of an element of the parameters and of their gradients.
    recomputes: the layers whose forward pass is computed again, and what it needs gathered once more.
    forward_s, backward_s: seconds of a micro-batch's operator by its kind, behind which the gather of what follows it
        is hidden; empty where nothing is hidden.
    """

    all_reduce: Collective
    all_gather: Collective
    reduce_scatter: Collective
    micro_batches: int
    item: int
    gradient: int
    recomputes: frozenset[int]
    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]

    def mini_batch_s(self, stage: StageUnits) -> float:
        """All that the devices of a stage exchange.

        Replicated: an all-reduce of gradients. ZeRO-1: gradients are reduce-scattered and parameters all-gathered, once
        a mini-batch. Sharded: for every micro-batch parameters are gathered forward
        and backward, within fully recomputed layers once more, and gradients reduce-scattered. The backward pass
        of an embedding needs no parameters.
        """
        replicated_s = self.all_reduce(stage.replicated * self.gradient) if stage.replicated else 0.0
        return replicated_s + self.zero1_s(stage.zero1) + self.micro_batches * self._micro_batch_s(stage)

    def zero1_s(self, elements: int) -> float:
        """Seconds to exchange a number of elements as ZeRO-1 does."""
        if not elements:
            return 0.0
        return self.reduce_scatter(elements * self.gradient) + self.all_gather(elements * self.item)

    def sharded_s(self, elements: int, kind: str, part: float, *, recomputed: bool) -> float:
        """What a sharded unit of so many elements adds to a mini-batch, where what is in use before it is like it;
        `recomputed`: in a layer of `recomputes`."""
        gather_s = self.all_gather(elements * self.item)
        forward_s = waited_s(gather_s, part * self.forward_s.get(kind, 0.0))
        backward_s = 0.0 if kind in LOOKED_UP else waited_s(gather_s, part * self.backward_s.get(kind, 0.0))
        again_s = forward_s if recomputed else 0.0
        return self.micro_batches * (forward_s + backward_s + again_s + self.reduce_scatter(elements * self.gradient))

    def _micro_batch_s(self, stage: StageUnits) -> float:
        """Seconds to exchange the sharded units in one micro-batch."""
        sizes = set(stage.gathered)
        gathers = {elements: self.all_gather(elements * self.item) for elements in sizes}
        reduces = {elements: self.reduce_scatter(elements * self.gradient) for elements in sizes}
        backward, again = (
            (lambda piece: piece.kind not in LOOKED_UP),
            (lambda piece: piece.layer in self.recomputes),
        )
        forward_s = _waiting_s(stage.pieces, gathers, self.forward_s)
        backward_s = _waiting_s(reversed(stage.pieces), gathers, self.backward_s, backward)
        again_s = _waiting_s(stage.pieces, gathers, self.forward_s, again) if self.recomputes else 0.0
        return forward_s + backward_s + again_s + sum(map(reduces.__getitem__, stage.gathered))


def _waiting_s(
    pieces: Iterable[Piece],
    gathers: Mapping[int, float],
    computed_s: Mapping[str, float],
    needs: Callable[[Piece], bool] = lambda _: True,
) -> float:
    """What a pass waits for the gathers that it needs. Each begins when the unit before it is in use, and is
    hidden behind what is computed from then on; the first one is not."""
    waiting_s = ahead_s = 0.0
    for piece in pieces:
        if piece.gathered and needs(piece):
            waiting_s += waited_s(gathers[piece.gathered], ahead_s)
            ahead_s = 0.0
        ahead_s += piece.part * computed_s.get(piece.kind, 0.0)
    return waiting_s
