"""Which reallocations are verified, and what is said of a part that differs on one device."""

import pytest
import torch

from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.execute.verification import VerificationError, VerificationSchedule, verify
from realhf.realloc.plan.planner import plan_reallocation


def test_the_first_of_each_pair_and_then_every_third_step() -> None:
    schedule = VerificationSchedule(every_steps=3)
    one, two = (Layout(DeviceMesh(0, 2), ParallelStrategy(dp=dp, tp=2 // dp)) for dp in (1, 2))
    assert [schedule.is_due("actor", one, step) for step in range(2, 8)] == [True, True, False, False, True, False]
    assert schedule.is_due("critic", one, 7)
    assert schedule.is_due("actor", two, 7)
    assert not schedule.is_due("actor", two, 8)
    assert all(VerificationSchedule(every_steps=1).is_due("actor", one, step) for step in (1, 2, 3))
    assert not VerificationSchedule(every_steps=0).is_due("actor", one, 0)


def test_a_copy_that_differs_is_named() -> None:
    held, wanted = Box("p", (2, 0), (4, 3)), Box("p", (3, 1), (2, 2))
    source, target = [(held, torch.arange(12.0).view(4, 3))], [(wanted, torch.zeros(2, 2))]
    plan = plan_reallocation({5: [held]}, {5: [wanted]})
    execute(Reallocation(plan, 5, source, target))
    verify(Reallocation(plan, 5, source, target))
    target[0][1][1, 1] += 1
    with pytest.raises(VerificationError, match=r"of critic: rank 5 .* rank 5 sent of parameter p, .*offset \(3, 1\)"):
        verify(Reallocation(plan, 5, source, target, model_name="critic"))
