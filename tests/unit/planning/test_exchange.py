"""What the ranks of a training wait for, where gathers are hidden behind what is computed before them: by hand.

Gathers take a second a byte, reduce-scatters three and all-reduces two; elements have 2 bytes, gradients 4.
"""

import pytest

from realhf.planning.model.osdp.exchange import Exchange
from realhf.planning.model.osdp.units import Piece, StageUnits

EMBEDDING, POSITIONS = Piece(-1, "embedding", 1.0, 10), Piece(-1, "positions", 1.0, 5)
Q, GATE, UP = Piece(0, "q", 1.0, 40), Piece(0, "gate", 0.5, 0), Piece(0, "up", 1.0, 20)
HEAD = Piece(-1, "head", 1.0, 30)
PIECES = (EMBEDDING, POSITIONS, Q, GATE, UP, HEAD)
GATHERED = tuple(piece.gathered for piece in PIECES if piece.gathered)
REDUCED = 3 * 4 * (10 + 5 + 40 + 20 + 30)


def exchange(recomputes: frozenset[int] = frozenset()) -> Exchange:
    return Exchange(
        all_reduce=lambda size_bytes: 2 * size_bytes,
        all_gather=lambda size_bytes: 1 * size_bytes,
        reduce_scatter=lambda size_bytes: 3 * size_bytes,
        micro_batches=7,
        item=2,
        gradient=4,
        recomputes=recomputes,
        forward_s={"embedding": 1, "q": 8, "gate": 6, "up": 100, "head": 9},
        backward_s={"positions": 50, "q": 16, "gate": 12, "up": 24, "head": 48},
    )


def test_a_gather_is_hidden_behind_what_is_computed_since_the_last_one() -> None:
    """Forward: the first waits for all of its 20 s; positions for 10 - 1; q for all of 80, as positions take no time;
    up for 40 - (8 + 6 / 2); the head for nothing, as up takes longer. Backward, from the head: 60; up 40 - 48; q for
    80 - (24 + 12 / 2); and embeddings for nothing."""
    forward_s, backward_s = 20 + 9 + 80 + 29 + 0, 60 + 0 + 50
    stage = StageUnits(2, 0, 0, GATHERED, PIECES)
    assert exchange().mini_batch_s(stage) == 7 * (forward_s + backward_s + REDUCED)


def test_a_layer_that_is_computed_again_gathers_once_more() -> None:
    """All of q, behind nothing but the embeddings' second; up as in the first pass. The head is in no layer."""
    stage = StageUnits(2, 0, 0, GATHERED, PIECES)
    again_s = 80 - 1 + 29
    more_s = exchange(frozenset({0})).mini_batch_s(stage) - exchange().mini_batch_s(stage)
    assert more_s == 7 * again_s
    assert exchange(frozenset({1})).mini_batch_s(stage) == exchange().mini_batch_s(stage)


def test_what_is_not_sharded_is_reduced_once_a_mini_batch() -> None:
    """Replicated gradients by an all-reduce; with ZeRO-1 gradients are reduce-scattered and parameters gathered."""
    assert exchange().mini_batch_s(StageUnits(2, 100, 0, (), ())) == 2 * 100 * 4
    assert exchange().mini_batch_s(StageUnits(2, 0, 100, (), ())) == 100 * (3 * 4 + 1 * 2)
    assert exchange().zero1_s(100) == 1400
    assert exchange().mini_batch_s(StageUnits(2, 0, 0, (), ())) == 0


def test_nothing_is_reduced_where_there_is_nothing() -> None:
    """Not even the latency of an all-reduce."""

    def all_reduce(size_bytes: float) -> float:
        return 1000 + size_bytes

    late = Exchange(
        all_reduce=all_reduce, all_gather=all_reduce, reduce_scatter=all_reduce, micro_batches=3, item=2, gradient=4,
        recomputes=frozenset(), forward_s={}, backward_s={},
    )  # fmt: skip
    assert late.zero1_s(0) == 0
    assert late.mini_batch_s(StageUnits(2, 0, 0, (), ())) == 0
    assert late.mini_batch_s(StageUnits(2, 1, 1, (), ())) == 1004 + (1004 + 1002)


@pytest.mark.parametrize(
    ("elements", "kind", "part", "recomputed", "expected"),
    [
        # Forward 80 - 8 / 2, backward 80 - 16 / 2.
        (40, "q", 0.5, False, 76 + 72 + 480),
        (40, "q", 0.5, True, 2 * 76 + 72 + 480),
        # All hidden forward; backward 20 - 12.
        (10, "up", 0.5, False, 0 + 8 + 120),
        (1, "head", 1.0, False, 0 + 0 + 12),
        # The backward pass of embeddings needs no values.
        (10, "embedding", 1.0, False, 19 + 120),
        (10, "positions", 1.0, False, 20 + 120),
        # No times are known of it: nothing is hidden.
        (10, "v", 1.0, False, 20 + 20 + 120),
    ],
)
def test_a_sharded_unit_behind_one_like_it(
    elements: int, kind: str, part: float, recomputed: bool, expected: float
) -> None:
    assert exchange().sharded_s(elements, kind, part, recomputed=recomputed) == 7 * expected
