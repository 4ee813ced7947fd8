"""What the executor does without a peer: dtype checks, local copies."""

import pytest
import torch

from realhf.geometry.boxes import Box
from realhf.realloc.execute.carriers import Message, TorchCarrier
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.plan.planner import plan_reallocation

BOX = Box("p", (2, 0), (4, 3))


def test_a_part_is_copied_locally() -> None:
    """One device, another box: no process group is needed."""
    want = Box("p", (3, 1), (2, 2))
    source = torch.arange(12.0).view(4, 3)
    target = torch.zeros(2, 2)
    execute(Reallocation(plan_reallocation({5: [BOX]}, {5: [want]}), 5, [(BOX, source)], [(want, target)]))
    assert target.tolist() == [[4.0, 5.0], [7.0, 8.0]]


def test_what_is_kept_of_a_plan_does_not_depend_on_where_tensors_lie() -> None:
    """The same plan again: in other memory, where source and target were one tensor, and with other strides."""
    plan = plan_reallocation({5: [BOX]}, {5: [BOX]})
    shared = torch.arange(12.0).view(4, 3)
    execute(Reallocation(plan, 5, [(BOX, shared)], [(BOX, shared)]))
    for value, target in ((1.0, torch.zeros(4, 3)), (2.0, torch.zeros(4, 3)), (3.0, torch.zeros(3, 4).t())):
        source = torch.arange(12.0).view(4, 3) * value
        execute(Reallocation(plan, 5, [(BOX, source)], [(BOX, target)]))
        assert torch.equal(target, source)
    assert torch.equal(shared, torch.arange(12.0).view(4, 3))


def test_nothing_is_packed_that_lies_one_behind_the_other() -> None:
    flat, carrier = torch.zeros(24), TorchCarrier()

    def packed_bytes(*views: torch.Tensor) -> int:
        return carrier.packed_bytes([Message("send", 1, [BOX] * len(views), views)])

    assert packed_bytes(flat[:6].view(2, 3), flat[6:18].view(4, 3)) == 0
    assert packed_bytes(flat[:6].view(2, 3), flat[7:19].view(4, 3)) == 72  # between them is another element
    assert packed_bytes(flat.view(4, 6)[:, :3]) == 48  # rows apart from each other
    assert packed_bytes(flat[:12], flat[12:].clone()) == 96  # in other memory


def test_mixed_or_unplanned_dtypes_are_refused() -> None:
    plan = plan_reallocation({0: [BOX]}, {0: [BOX]})
    with pytest.raises(ValueError, match="one dtype"):
        execute(Reallocation(plan, 0, [(BOX, torch.zeros(4, 3))], [(BOX, torch.zeros(4, 3).double())]))
    double = [(BOX, torch.zeros(4, 3).double())]
    with pytest.raises(ValueError, match="element_bytes=8"):
        execute(Reallocation(plan, 0, double, double))


def test_tensors_the_plan_was_not_made_for_are_refused() -> None:
    plan = plan_reallocation({0: [BOX]}, {0: [BOX]})
    other = Box("p", (3, 0), (4, 3))
    with pytest.raises(ValueError, match=r"offset=\(3, 0\)"):
        execute(Reallocation(plan, 0, [(BOX, torch.zeros(4, 3))], [(other, torch.zeros(4, 3))]))
    with pytest.raises(ValueError, match=r"in a tensor of \(5, 3\)"):
        execute(Reallocation(plan, 0, [(BOX, torch.zeros(5, 3))], [(BOX, torch.zeros(4, 3))]))
    with pytest.raises(ValueError, match="nothing of it"):
        execute(Reallocation(plan, 0, [(BOX, torch.zeros(4, 3))], []))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-22), (torch.bfloat16, 2**-8)])
def test_a_target_moves_towards_the_source(dtype: torch.dtype, rounding: float) -> None:
    """Three moves, each eta * source + (1 - eta) * target in float64, then rounded."""
    generator = torch.Generator().manual_seed(3)
    source, target = (torch.rand(4, 3, generator=generator).add(0.5).to(dtype) for _ in range(2))
    plan = plan_reallocation({0: [BOX]}, {0: [BOX]}, element_bytes=dtype.itemsize)
    for eta in (0.25, 0.75, 0.0):
        expected = eta * source.double() + (1 - eta) * target.double()
        execute(Reallocation(plan, 0, [(BOX, source)], [(BOX, target)]), eta=eta)
        assert ((target.double() - expected).abs() <= expected * rounding).all()
    execute(Reallocation(plan, 0, [(BOX, source)], [(BOX, target)]), eta=1.0)
    assert torch.equal(target, source)


def test_averages_outside_of_0_to_1_or_along_chains_are_refused() -> None:
    chain = plan_reallocation({0: [BOX]}, {1: [BOX], 2: [BOX]})
    with pytest.raises(ValueError, match=r"eta=0\.5 with a plan that forwards.*messages or by broadcasts"):
        execute(Reallocation(chain, 2, [], [(BOX, torch.zeros(4, 3))]), eta=0.5)
    with pytest.raises(ValueError, match=r"eta=1\.5 .* give a number from 0 to 1"):
        execute(Reallocation(chain, 2, [], [(BOX, torch.zeros(4, 3))]), eta=1.5)
