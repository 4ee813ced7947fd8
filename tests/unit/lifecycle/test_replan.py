"""When a change of plan pays, by numbers by hand."""

from msgspec.structs import replace

from realhf.dataflow.plan import ExecutionPlan
from realhf.lifecycle.replan import Proposal

# A step of 4 s becomes one of 3 s: 100 steps that are left take 100 s less.
PLAN = ExecutionPlan(num_devices=1, calls={})
CHANGE = Proposal(factors={}, step_s=4.0, present_s=8.0, other_s=6.0, plan=PLAN)


def test_a_change_pays_when_it_gains_more_than_it_costs() -> None:
    assert (CHANGE.gain, CHANGE.gain_s(100), CHANGE.pays(100, 60.0)) == (0.25, 100.0, True)
    assert not CHANGE.pays(60, 60.0), "60 s are gained and 60 s are lost"
    assert CHANGE.pays(61, 60.0)
    assert not CHANGE.pays(100, 100.0)
    assert not replace(CHANGE, other_s=9.0).pays(100, 0.0)


def test_what_predictions_cannot_tell_is_no_gain() -> None:
    almost = replace(CHANGE, other_s=7.7)
    assert almost.gain_s(100) > 0
    assert not almost.pays(100, 0.0)
    assert replace(almost, other_s=7.5).pays(100, 0.0)
    assert not replace(almost, other_s=7.61).pays(100, 0.0), "less than 5 %"
    assert replace(almost, other_s=7.59).pays(100, 0.0)


def test_it_says_all_its_numbers() -> None:
    assert CHANGE.in_words(100, 60.0) == (
        "6 s instead of 8 s a step; 100 steps are left, of 4 s each: gains 100 s, a change costs 60 s"
    )
