"""What the executor does without a peer: dtype checks, local copies."""

import pytest
import torch

from realhf.realloc.executor import execute
from realhf.realloc.layout import Box
from realhf.realloc.planner import plan_reallocation

BOX = Box("p", (2, 0), (4, 3))


def test_a_part_is_copied_locally() -> None:
    """One device, another box: no process group is needed."""
    want = Box("p", (3, 1), (2, 2))
    source = torch.arange(12.0).view(4, 3)
    target = torch.zeros(2, 2)
    execute(plan_reallocation({5: [BOX]}, {5: [want]}), 5, [(BOX, source)], [(want, target)])
    assert target.tolist() == [[4.0, 5.0], [7.0, 8.0]]


def test_mixed_or_unplanned_dtypes_are_refused() -> None:
    plan = plan_reallocation({0: [BOX]}, {0: [BOX]})
    with pytest.raises(ValueError, match="one dtype"):
        execute(plan, 0, [(BOX, torch.zeros(4, 3))], [(BOX, torch.zeros(4, 3).double())])
    double = [(BOX, torch.zeros(4, 3).double())]
    with pytest.raises(ValueError, match="element_bytes=8"):
        execute(plan, 0, double, double)


def test_tensors_the_plan_was_not_made_for_are_refused() -> None:
    plan = plan_reallocation({0: [BOX]}, {0: [BOX]})
    other = Box("p", (3, 0), (4, 3))
    with pytest.raises(ValueError, match=r"offset=\(3, 0\)"):
        execute(plan, 0, [(BOX, torch.zeros(4, 3))], [(other, torch.zeros(4, 3))])
    with pytest.raises(ValueError, match=r"in a tensor of \(5, 3\)"):
        execute(plan, 0, [(BOX, torch.zeros(5, 3))], [(BOX, torch.zeros(4, 3))])
    with pytest.raises(ValueError, match="nothing of it"):
        execute(plan, 0, [(BOX, torch.zeros(4, 3))], [])
