"""How long a request may take."""

from realhf.rundir.run import Deadlines


def test_a_deadline_is_so_many_times_the_prediction_and_at_least_the_floor() -> None:
    deadlines = Deadlines(floor_s=600.0, factor=20.0, longest_predicted_s=90.0)
    assert deadlines.of(None) == deadlines.of(0.5) == deadlines.of(30.0) == 600.0
    assert deadlines.of(31.0) == 620.0
    assert deadlines.longest_s == 1800.0
    assert Deadlines().longest_s == 600.0
