"""Agreement of the ranks of a data-parallel group on their next collectives, before they start them.

Which units a pass uses, and in which order, depends on data: an operator may be skipped, a loss may have no term. Ranks
that each went by their own order would mix the shards of one unit with those of another. So every rank announces its
next operations, all ranks do all announced operations, and a rank whose pass has ended takes part until all have ended.
"""

import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

Kind = Literal["gather", "reduce"]
_KINDS: tuple[Kind, ...] = ("gather", "reduce")


class Operation(NamedTuple):
    """A collective of one unit, by its number."""

    kind: Kind
    unit: int


class Point(IntEnum):
    """Where a rank waits until no other needs it: until all are at the same point. A backward pass that ends by itself
    (`BACKWARD`) waits only until all others are at some point, since they may have no backward pass."""

    BACKWARD = 1
    PASS = 2
    STEP = 3
    ZERO_GRAD = 4
    STATE_DICT = 5
    LOAD_STATE_DICT = 6
    WHOLE = 7

    def __str__(self) -> str:
        match self:
            case Point.BACKWARD:
                return "at the end of a backward pass"
            case Point.PASS:
                return "at the end of a pass"
            case Point.WHOLE:
                return "about to gather all units"
            case _:
                return f"in {self.name.lower()}()"


# Sends the numbers of this rank, and returns those of every rank, by rank.
Exchange = Callable[[list[int]], list[list[int]]]
# Takes part in an operation; the flag says whether this rank asked for it.
TakePart = Callable[[Operation, bool], None]
AT_ONCE = 3  # operations in a message: in a backward pass a reduction, a gather, and the gather that follows


class _Position(NamedTuple):
    """The message of a rank: the number of operations so far and the last of them, its present point (0: none), and the
    operations that it asks for (0: no more)."""

    number: int
    last: int
    point: int
    wanted: list[int]


class Agreement:
    """The order of the collectives of a group: the same on all ranks, whatever each of them asks for.

    A message of six integers goes before the operations that it asks for. It also says which operation was the last
    and how many there were, so that ranks that took part in different ones find out at the next message.
    """

    def __init__(self, units: Sequence[str], exchange: Exchange, take_part: TakePart):
        """`units`: their names, by number; the same on all ranks."""
        self._units, self._exchange, self._take_part = list(units), exchange, take_part
        # Before the first operation it is the units themselves that must be the same.
        self._count, self._last = 0, -zlib.crc32("\n".join(units).encode())

    def perform(self, operations: Sequence[Operation]) -> None:
        """Returns when this rank has taken part in `operations`, and in those that others asked for meanwhile.

        Raises:
            RuntimeError: the ranks took part in different operations before.
        """
        for start in range(0, len(operations), AT_ONCE):
            own = operations[start : start + AT_ONCE]
            self._together(self._positions(0, own), own)

    def meet(self, point: Point) -> None:
        """Returns when no rank needs this one before its next pass or call: see `Point`.

        Raises:
            RuntimeError: ranks are in different calls, or took part in different operations before.
        """
        while True:
            positions = self._positions(point, ())
            self._together(positions, ())
            points = [of_rank.point for of_rank in positions]
            if len({at for at in points if at > Point.BACKWARD}) > 1:
                raise RuntimeError(
                    f"{', '.join(f'rank {rank} is {Point(at)}' for rank, at in enumerate(points) if at)}: all ranks of "
                    "the group must make the same calls in the same order"
                )
            if all(points) and (point == Point.BACKWARD or Point.BACKWARD not in points):
                return

    def _together(self, positions: Sequence[_Position], own: Sequence[Operation]) -> None:
        """Takes part in all that any rank asked for, those of the first rank first."""
        for code in dict.fromkeys(code for of_rank in positions for code in of_rank.wanted if code):
            operation = self._operation(code)
            self._count, self._last = self._count + 1, code
            self._take_part(operation, operation in own)

    def _positions(self, point: int, operations: Sequence[Operation]) -> list[_Position]:
        codes = [1 + len(_KINDS) * unit + _KINDS.index(kind) for kind, unit in operations]
        numbers = [self._count, self._last, point, *codes, *[0] * (AT_ONCE - len(codes))]
        positions = [_Position(of_rank[0], of_rank[1], of_rank[2], of_rank[3:]) for of_rank in self._exchange(numbers)]
        for rank, of_rank in enumerate(positions):
            if of_rank[:2] != positions[0][:2]:
                raise RuntimeError(
                    "the ranks of a data-parallel group took part in different collectives: rank 0 in "
                    f"{self._named(positions[0])}, rank {rank} in {self._named(of_rank)}. The data that they received "
                    "is wrong. Give all ranks the same model with the same modes; if they have it, realhf has a bug"
                )
        return positions

    def _operation(self, code: int) -> Operation:
        unit, kind = divmod(code - 1, len(_KINDS))
        return Operation(_KINDS[kind], unit)

    def _named(self, position: _Position) -> str:
        if position.last <= 0:
            return f"none, with the units {-position.last:08x}"
        kind, unit = self._operation(position.last)
        name = repr(self._units[unit]) if unit < len(self._units) else "that this rank has not"
        what = "an all-gather" if kind == "gather" else "a reduction"
        return f"number {position.number}, {what} of unit {unit}, {name}"
