"""When a run comes to rest, with a clock that the test turns."""

from types import SimpleNamespace
from typing import Any

import pytest

from realhf.master.milestones import Milestones


def milestones_of(now: list[float], steps: int, **given: Any) -> Milestones:
    spec = SimpleNamespace(
        checkpoint_every_steps=given.get("save"), checkpoint_every_minutes=given.get("minutes"), resume_step=0
    )
    evaluations = {"evaluation": SimpleNamespace(every_steps=given["evaluate"])} if "evaluate" in given else {}
    run: Any = SimpleNamespace(experiment=SimpleNamespace(steps=steps, evaluations=evaluations), spec=spec)
    return Milestones(run, clock=lambda: now[0])


def walk(milestones: Milestones, now: list[float], steps: int, step_s: float, first: int = 0) -> list[tuple[int, str]]:
    """Every border with what is due there: "e", "s"."""
    found, step = [], first
    while step < steps:
        before, step = step, milestones.next(step)
        now[0] += step_s * (step - before)
        milestones.reached(before, step)
        due = ("e" if milestones.evaluates_after(step) else "") + ("s" if milestones.saves_after(step) else "")
        found.append((step, due))
    return found


@pytest.mark.parametrize(
    ("first", "given", "expected"),
    [
        (0, {}, [(10, "s")]),
        (0, {"evaluate": None}, [(10, "es")]),
        (0, {"save": 4}, [(4, "s"), (8, "s"), (10, "s")]),
        (5, {"save": 4}, [(8, "s"), (10, "s")]),  # a run that goes on keeps to the same places
        (0, {"save": 4, "evaluate": 6}, [(4, "s"), (6, "e"), (8, "s"), (10, "es")]),
        # one step to measure, then as many as two minutes hold, then two minutes each
        (0, {"minutes": 2.0}, [(1, ""), (4, "s"), (8, "s"), (10, "s")]),
        (
            0,
            {"minutes": 1.75},
            [(1, ""), (4, "s"), (8, "s"), (10, "s")],
        ),
        (0, {"minutes": 0.1}, [(step, "s") for step in range(1, 11)]),
        (0, {"minutes": 2.0, "save": 5}, [(1, ""), (4, "s"), (5, "s"), (9, "s"), (10, "s")]),
    ],
)
def test_borders(first: int, given: dict[str, Any], expected: list[tuple[int, str]]) -> None:
    now = [1000.0]
    assert walk(milestones_of(now, 10, **given), now, 10, step_s=30.0, first=first) == expected


def test_steps_that_become_faster_do_not_save_more_often() -> None:
    now = [0.0]
    milestones = milestones_of(now, 100, minutes=1.0)
    assert milestones.next(0) == 1
    now[0] += 10.0
    milestones.reached(0, 1)
    assert not milestones.saves_after(1)
    assert milestones.next(1) == 6
    now[0] += 25.0  # twice as fast
    milestones.reached(1, 6)
    assert not milestones.saves_after(6)
    assert milestones.next(6) == 11


def test_a_checkpoint_that_takes_longer_than_the_time_between_two_is_followed_by_a_step() -> None:
    now = [0.0]
    milestones = milestones_of(now, 100, minutes=1.0)
    assert milestones.next(0) == 1
    now[0] += 60.0
    milestones.reached(0, 1)
    assert milestones.saves_after(1)
    now[0] += 200.0
    assert milestones.next(1) == 2
