"""Ranks that ask for other collectives than their peers, as threads: all take part in the same ones, in one order."""

import threading
import zlib
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.engine.train.agreement import AT_ONCE, Agreement, Operation, Point
from tests.waiting import PATIENCE_S

UNITS = ("embedding", "layers.0", "layers.1", "head")
G0, G1, R0, R1 = (Operation(kind, unit) for kind in ("gather", "reduce") for unit in (1, 2))
Asked = Sequence[Operation] | Point  # of one `perform`, or a `meet`


class Ranks:
    """Threads that tell one another what they say."""

    def __init__(self, count: int):
        self._changed = threading.Condition()
        self._said: list[dict[int, list[int]]] = []  # by message, by rank
        self._next = [0] * count
        self._is_over = False

    @property
    def messages(self) -> int:
        return len(self._said)

    def exchange(self, rank: int) -> Callable[[list[int]], list[list[int]]]:
        def together(numbers: list[int]) -> list[list[int]]:
            with self._changed:
                if self._next[rank] == len(self._said):
                    self._said.append({})
                said = self._said[self._next[rank]]
                self._next[rank] += 1
                said[rank] = numbers
                self._changed.notify_all()
                self._changed.wait_for(lambda: len(said) == len(self._next) or self._is_over, PATIENCE_S)
                if len(said) < len(self._next):
                    raise ConnectionError("a peer is gone")
                return [said[peer] for peer in range(len(self._next))]

        return together

    def run(self, work: Callable[[int], None]) -> list[BaseException | None]:
        """Calls `work(rank)` on every rank; what each raised."""
        raised: list[BaseException | None] = [None] * len(self._next)

        def guarded(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                raised[rank] = error
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

        threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(len(self._next))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
        return raised


def carried_out(
    programs: Sequence[Sequence[Asked]], units: Sequence[Sequence[str]] = ()
) -> tuple[list[list[tuple[Operation, bool]]], list[BaseException | None], int]:
    """What every rank took part in, with whether it had asked; what it raised; how many messages there were."""
    ranks, done = Ranks(len(programs)), [[] for _ in programs]

    def work(rank: int) -> None:
        agreement = Agreement(
            units[rank] if units else UNITS, ranks.exchange(rank), lambda *what: done[rank].append(what)
        )
        for asked in programs[rank]:
            if isinstance(asked, Point):
                agreement.meet(asked)
                continue
            before = len(done[rank])
            agreement.perform(asked)
            assert set(asked) <= {operation for operation, is_own in done[rank][before:] if is_own}

    raised = ranks.run(work)
    return done, raised, ranks.messages


operations = st.builds(Operation, st.sampled_from(["gather", "reduce"]), st.integers(0, len(UNITS) - 1))
asked = st.lists(operations, max_size=2 * AT_ONCE, unique=True)
# Between calls of all ranks each has passes of its own, and not equally many.
parts = st.lists(st.one_of(asked, st.just(Point.BACKWARD)), max_size=4)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), ranks=st.integers(2, 3), calls=st.lists(st.sampled_from(list(Point)[1:]), max_size=2))
def test_all_ranks_take_part_in_the_same_operations_in_one_order(
    data: st.DataObject, ranks: int, calls: list[Point]
) -> None:
    programs: list[list[Asked]] = [[] for _ in range(ranks)]
    for call in (*calls, Point.STEP):
        for program in programs:
            program += [*data.draw(parts), call]
    done, raised, _ = carried_out(programs)
    assert raised == [None] * ranks
    first, *others = [[operation for operation, _ in of_rank] for of_rank in done]
    assert all(other == first for other in others)
    assert set(first) == {
        operation for program in programs for each in program if not isinstance(each, Point) for operation in each
    }
    # Nothing is done that nobody asked for just then.
    assert all(any(of_rank[i][1] for of_rank in done) for i in range(len(first)))


def test_ranks_that_ask_alike_do_nothing_twice() -> None:
    done, raised, messages = carried_out([[[G0, G1], [R1, G0], Point.BACKWARD]] * 3)
    assert raised == [None] * 3
    assert done == [[(operation, True) for operation in (G0, G1, R1, G0)]] * 3
    assert messages == 3


def test_the_first_rank_is_served_first() -> None:
    done, _, messages = carried_out([[[R0, G1], Point.BACKWARD], [[G1], [R0, G0], Point.BACKWARD]])
    # Rank 1 asks for a reduction after it was served one of rank 0's, and gets its own.
    assert done[0] == [(R0, True), (G1, True), (R0, False), (G0, False)]
    assert done[1] == [(R0, False), (G1, True), (R0, True), (G0, True)]
    assert messages == 3


@pytest.mark.parametrize("passes", [1, 3])
def test_a_rank_that_reached_nothing_serves_its_peers(passes: int) -> None:
    program = [each for n in range(passes) for each in ([Operation("gather", n)], Point.BACKWARD)]
    done, raised, _ = carried_out([[Point.STEP], [*program, Point.STEP]])
    assert raised == [None, None]
    assert done[0] == [(Operation("gather", n), False) for n in range(passes)]


def test_nobody_leaves_the_end_of_a_pass_before_all_have_ended() -> None:
    """What follows may be a collective of others, in which a rank serves nobody."""
    for_others, lock, log = Ranks(2), threading.Lock(), []

    def work(rank: int) -> None:
        agreement = Agreement(UNITS, for_others.exchange(rank), lambda *_: None)
        for _ in range(3 if rank else 0):
            agreement.perform([G0])
        with lock:
            log.append("ended")
        agreement.meet(Point.BACKWARD)
        with lock:
            log.append("left")

    assert for_others.run(work) == [None, None]
    assert log == ["ended", "ended", "left", "left"]


def test_different_calls_at_once_are_an_error_that_names_them() -> None:
    _, raised, _ = carried_out([[Point.STEP], [Point.BACKWARD, Point.STATE_DICT], [Point.BACKWARD, Point.BACKWARD]])
    assert [str(error) for error in raised] == [
        "rank 0 is in step(), rank 1 is in state_dict(), rank 2 is at the end of a backward pass: all ranks of "
        "the group must make the same calls in the same order"
    ] * 3


def of_different_collectives(change: Callable[[Agreement], None]) -> list[str]:
    """What two ranks raise after one of them has changed what it knows of the last operations."""
    ranks = Ranks(2)

    def work(rank: int) -> None:
        agreement = Agreement(UNITS, ranks.exchange(rank), lambda *_: None)
        agreement.perform([G0])
        if rank:
            change(agreement)
        agreement.perform([G1])

    return [str(error) for error in ranks.run(work)]


def test_ranks_that_met_in_other_units_learn_it_at_the_next_message() -> None:
    def other_unit(agreement: Agreement) -> None:
        agreement._last = 2 + 2 * R1.unit  # a reduction of layers.1 in place of the gather of layers.0

    for message in of_different_collectives(other_unit):
        assert "rank 0 in number 1, an all-gather of unit 1, 'layers.0'" in message
        assert "rank 1 in number 1, a reduction of unit 2, 'layers.1'" in message


def test_a_unit_that_a_rank_has_not_is_told_by_its_number() -> None:
    def another(agreement: Agreement) -> None:
        agreement._last = 1 + 2 * len(UNITS)

    for message in of_different_collectives(another):
        assert "rank 0 in number 1, an all-gather of unit 1, 'layers.0', rank 1 in number 1, " in message
        assert "an all-gather of unit 4, that this rank has not. The data that they received is wrong" in message


def test_a_message_is_of_six_numbers_and_asks_for_three_operations_at_most() -> None:
    """How many there were, the last one (before the first: the units), the point, what is asked for."""
    said: list[list[int]] = []
    taken: list[Operation] = []

    def alone(numbers: list[int]) -> list[list[int]]:
        said.append(numbers)
        return [numbers]

    agreement = Agreement(UNITS, alone, lambda operation, is_own: taken.append(operation))
    asked = [Operation(kind, unit) for unit in range(2) for kind in ("gather", "reduce")]
    agreement.perform(asked)
    agreement.meet(Point.STEP)
    agreement.perform([])
    units = -zlib.crc32(b"embedding\nlayers.0\nlayers.1\nhead")
    assert said == [[0, units, 0, 1, 2, 3], [3, 3, 0, 4, 0, 0], [4, 4, 3, 0, 0, 0]]
    assert taken == asked


def test_points_in_words() -> None:
    words = {str(point) for point in Point}
    assert words == {
        "at the end of a backward pass", "at the end of a pass", "in step()", "in zero_grad()", "in state_dict()",
        "in load_state_dict()", "about to gather all units",
    }  # fmt: skip
    assert str(Point.BACKWARD) == "at the end of a backward pass"
    assert str(Point.PASS) == "at the end of a pass"


def test_a_rank_that_missed_an_operation_learns_it_at_the_next_message() -> None:
    def one_more(agreement: Agreement) -> None:
        agreement._count += 1

    for message in of_different_collectives(one_more):
        assert "rank 0 in number 1, an all-gather of unit 1" in message
        assert "rank 1 in number 2, an all-gather of unit 1" in message


def test_ranks_with_other_units_learn_it_at_the_first_message() -> None:
    done, raised, _ = carried_out([[[G0]], [[G0]]], [UNITS, (*UNITS[:-1], "lm_head")])
    assert done == [[], []]
    assert all("rank 0 in none, with the units " in str(error) for error in raised)
    _, raised, _ = carried_out([[Point.STEP], [Point.STEP]], [(), UNITS])
    assert all("rank 0 in none, with the units 00000000, rank 1 in none, with " in str(error) for error in raised)
