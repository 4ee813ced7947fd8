"""What the executor does without a peer: checksums, dtype checks, local copies."""

import pytest
import torch

from realhf.realloc.executor import checksum, execute
from realhf.realloc.layout import Box
from realhf.realloc.planner import plan_reallocation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_checksum_sees_any_changed_bit_and_the_order_but_not_the_strides(dtype: torch.dtype) -> None:
    tensor = torch.randn(37, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    original = checksum(tensor)
    assert 0 <= original < 2**64
    assert checksum(tensor.t().contiguous().t()) == original
    assert checksum(tensor.flip(0)) != original
    for index in range(0, tensor.nbytes, 53):
        flipped = tensor.clone()
        flipped.view(torch.uint8).view(-1)[index] ^= 0x40
        assert checksum(flipped) != original
    assert checksum(tensor) == original


def test_checksum_by_hand() -> None:
    """Words 5, 1, 7 with the factors 1, 3, 5."""
    assert checksum(torch.tensor([5, 1, 7], dtype=torch.int64).view(torch.float64)) == 5 + 3 + 35


def test_checksum_of_more_than_one_chunk_is_that_of_the_whole() -> None:
    tensor = torch.arange(3 * 2**20 + 5, dtype=torch.int32).view(torch.float32)
    words = torch.arange(3 * 2**20 + 5)
    expected = int((words * (2 * words + 1)).sum()) % 2**64
    assert checksum(tensor) == expected
    assert checksum(tensor[: 3 * 2**20].view(3, 2**20)) == checksum(tensor[: 3 * 2**20])
    assert checksum(torch.tensor(1.0)) == 0x3F800000


BOX = Box("p", (2, 0), (4, 3))


def test_a_part_is_copied_locally() -> None:
    """One device, another box: no process group is needed."""
    want = Box("p", (3, 1), (2, 2))
    source = torch.arange(12.0).view(4, 3)
    target = torch.zeros(2, 2)
    execute(plan_reallocation({5: [BOX]}, {5: [want]}), 5, {"p": (BOX, source)}, {"p": (want, target)})
    assert target.tolist() == [[4.0, 5.0], [7.0, 8.0]]


def test_mixed_or_unplanned_dtypes_are_refused() -> None:
    plan = plan_reallocation({0: [BOX]}, {0: [BOX]})
    with pytest.raises(ValueError, match="one dtype"):
        execute(plan, 0, {"p": (BOX, torch.zeros(4, 3))}, {"p": (BOX, torch.zeros(4, 3).double())})
    double = {"p": (BOX, torch.zeros(4, 3).double())}
    with pytest.raises(ValueError, match="element_bytes=8"):
        execute(plan, 0, double, double)


def test_tensors_the_plan_was_not_made_for_are_refused() -> None:
    plan = plan_reallocation({0: [BOX]}, {0: [BOX]})
    other = Box("p", (3, 0), (4, 3))
    with pytest.raises(ValueError, match=r"offset=\(3, 0\)"):
        execute(plan, 0, {"p": (BOX, torch.zeros(4, 3))}, {"p": (other, torch.zeros(4, 3))})
    with pytest.raises(ValueError, match=r"in a tensor of \(5, 3\)"):
        execute(plan, 0, {"p": (BOX, torch.zeros(5, 3))}, {"p": (BOX, torch.zeros(4, 3))})
    with pytest.raises(ValueError, match="nothing of it"):
        execute(plan, 0, {"p": (BOX, torch.zeros(4, 3))}, {})
