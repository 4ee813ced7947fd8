"""What the benchmark of the transition counts, and what it is held to."""

from dataclasses import replace

import pytest
import transition
from transition import ENGINES, FULL, IN_PLACE, ITEM, OURS, QUICK, TWO_COPIES, Measured, Setting

from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES


@pytest.mark.parametrize("setting", [FULL, QUICK], ids=["full", "quick"])
@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_received_are_those_of_the_formula(engine: str, setting: Setting) -> None:
    received = transition.planned(engine, setting).plan.received_bytes
    assert max(received.values()) == pytest.approx(transition.formulas(setting)[engine], rel=1e-12)


def test_bytes_copied_within_a_device_by_hand() -> None:
    """Ours: training's part there and back. Two copies: none. The others: what they had of all that they gather, and
    generation's part of that."""
    plans = {engine: transition.planned(engine, FULL) for engine in ENGINES}
    copied = {engine: transition._copied_bytes(engine, plan, 0) for engine, plan in plans.items()}
    training, generation = (
        ITEM * sum(box.size for box in plans[OURS].__dict__[side][0]) for side in ("kept", "computes")
    )
    assert copied[OURS] == copied[IN_PLACE] == 2 * training
    assert copied[TWO_COPIES] == 0
    assert copied["hybridflow-v"] == training + generation


def test_ours_is_held_to_its_limit_and_its_part() -> None:
    larger = ITEM * sum(box.size for box in transition.planned(OURS, FULL).computes[0])
    found = Measured(
        (0.1, 0.1, 0.2), (0.04, 0.03, 0.04), 10, 10, larger + DEFAULT_BUCKET_BYTES, copy_s=(0.04, 0.04, 0.04)
    )
    assert found.both_s == pytest.approx(0.14)
    two_copies = replace(found, there_s=(0.08,) * 3, back_s=(0.0,) * 3)

    def holding(ours: Measured, in_place: Measured) -> dict[str, bool]:
        of_all = dict.fromkeys(ENGINES, found) | {OURS: ours, IN_PLACE: in_place, TWO_COPIES: two_copies}
        return {row["case"]: row["holds"] for row in transition.cases(FULL, of_all)[-3:]}

    names = ("ours beside the faster of the first two", "ours beside its limit")
    in_place = "ours in place: the peak beside its bound"
    assert holding(found, found) == dict.fromkeys((*names, in_place), True)  # the limit is 0.12 s
    slow, large = (
        replace(found, there_s=(0.2,) * 3),
        replace(found, peak_bytes=round(1.06 * (larger + DEFAULT_BUCKET_BYTES))),
    )
    assert holding(slow, large) == dict.fromkeys((*names, in_place), False)
