"""The order of rows: epochs are permutations, and the rows of a sample do not depend on who asks."""

from hypothesis import given
from hypothesis import strategies as st

from realhf.data.row_order import row_of


@given(st.integers(0, 2**63), st.integers(1, 40), st.integers(1, 50))
def test_every_epoch_has_each_row_once(seed, num_rows, batch_size):
    steps = -(-3 * num_rows // batch_size)  # at least three epochs
    stream = [row for step in range(steps) for row in row_of(seed, num_rows, batch_size, step, range(batch_size))]
    for epoch in range(3):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@given(st.integers(0, 1000), st.integers(0, 20), st.permutations(range(6)))
def test_a_row_does_not_depend_on_the_other_samples_asked_for(seed, step, ids):
    alone = [row_of(seed, 17, 6, step, [i])[0] for i in ids]
    assert row_of(seed, 17, 6, step, ids) == alone


def test_epochs_and_seeds_differ():
    def epoch(seed, step):
        return row_of(seed, 50, 50, step, range(50))

    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)


def test_the_order_of_seed_0_stays_as_it_is():
    """A resumed run must see the rows that the interrupted one would have seen, also under another NumPy."""
    assert row_of(0, 8, 4, 0, range(4)) + row_of(0, 8, 4, 1, range(4)) == [0, 2, 1, 5, 4, 3, 6, 7]


def test_the_order_of_other_seeds_and_epochs_stays_as_it_is():
    assert row_of(0, 5, 5, 1, range(5)) == [3, 2, 4, 1, 0]
    assert row_of(7, 5, 5, 0, range(5)) == [4, 1, 3, 2, 0]
    assert row_of(2**63, 5, 5, 3, range(5)) == [4, 1, 0, 3, 2]
    assert row_of(0, 5, 2, 2, range(2)) == [3, 3], "a step of two epochs"
