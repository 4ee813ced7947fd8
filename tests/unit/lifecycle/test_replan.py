"""When a change of plan pays, by numbers by hand."""

from dataclasses import replace

from realhf.lifecycle.replan import PlanChange

# A step of 4 s becomes one of 3 s: the 100 steps that are left take 100 s less.
CHANGE = PlanChange(step_s=4.0, present_s=8.0, other_s=6.0, steps_left=100, cost_s=60.0)


def test_a_change_pays_when_it_gains_more_than_it_costs() -> None:
    assert (CHANGE.gain, CHANGE.gain_s, CHANGE.pays) == (0.25, 100.0, True)
    assert not replace(CHANGE, steps_left=60).pays, "60 s are gained and 60 s are lost"
    assert replace(CHANGE, steps_left=61).pays
    assert not replace(CHANGE, cost_s=100.0).pays
    assert not replace(CHANGE, other_s=9.0, cost_s=0.0).pays


def test_what_predictions_cannot_tell_is_no_gain() -> None:
    almost = replace(CHANGE, other_s=7.7, cost_s=0.0)
    assert almost.gain_s > 0
    assert not almost.pays
    assert replace(almost, other_s=7.5).pays


def test_it_says_all_its_numbers() -> None:
    assert str(CHANGE) == (
        "6 s instead of 8 s a step; 100 steps are left, of 4 s each: gains 100 s, a change costs 60 s"
    )
