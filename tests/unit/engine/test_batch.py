"""Micro-batches: balanced by tokens, the same whatever surrounds them, pairs kept together; samples between devices."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.engine.batch import Batch, balanced_places, moved


def test_balanced_by_hand() -> None:
    # 9 | 8 | 7, then 5 to the 7, 4 to the 8, 2 to the 9, 1 to the 9 + 2.
    assert balanced_places([4, 9, 1, 8, 5, 7, 2], 3) == [[1, 2, 6], [0, 3], [4, 5]]
    assert balanced_places([3, 3, 3, 3], 2) == [[0, 2], [1, 3]]
    assert balanced_places([1, 100], 2) == [[1], [0]]


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=24), data=st.data())
def test_every_place_once_and_no_part_above_what_memory_is_planned_for(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    groups = balanced_places(sizes, parts)
    assert sorted(place for group in groups for place in group) == list(range(len(sizes)))
    assert all(groups)
    sums = [sum(sizes[place] for place in group) for group in groups]
    assert max(sums) <= -(-len(sizes) // parts) * max(sizes)
    assert max(sums) <= sum(sizes) / parts + max(sizes)


def test_pairs_stay_together() -> None:
    lengths = [9, 1, 2, 2, 3, 4, 5, 5]  # pairs of 10, 4, 7, 10
    batch = Batch(tuple(range(8)), {"tokens": [torch.zeros(n) for n in lengths]}, together=2)
    assert batch.balanced("tokens", 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert batch.to(torch.device("cpu")).with_data(other=[]).together == 2


def test_more_parts_than_samples_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 parts of 2"):
        balanced_places([1, 2], 3)


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[operator._schema.name.removeprefix("aten::")] += 1
        return operator(*args, **(kwargs or {}))


def test_samples_that_are_there_stay_the_same_tensors() -> None:
    column = [torch.arange(3), torch.arange(5)]
    assert all(there is here for there, here in zip(moved(column, torch.device("cpu")), column, strict=True))
    assert moved([], torch.device("meta")) == []


def test_a_column_goes_to_a_gpu_and_back_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits once, for values that it is to read. No kernel runs here; shapes and copies are those of a GPU."""
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("host"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    gpu = torch.device("cuda", 0)
    with FakeTensorMode():
        column = [torch.empty(length, 2, dtype=torch.bfloat16) for length in (3, 0, 5)]
        with Operators() as there:
            on_gpu = moved(column, gpu)
        assert not waited
        with Operators() as back:
            on_host = moved(on_gpu, torch.device("cpu"))
    assert waited == ["host"]
    assert there.counted["_to_copy"] == back.counted["copy_"] == 1
    assert there.counted["cat"] == back.counted["cat"] == 1
    for sent, away, returned in zip(column, on_gpu, on_host, strict=True):
        assert away.device == gpu
        assert returned.device.type == "cpu"
        assert sent.shape == away.shape == returned.shape
        assert sent.dtype == away.dtype == returned.dtype


def test_values_of_a_column_stay_those_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed and cut again: `away` plays another device, whose copy is a clone."""
    column = [torch.arange(6.0).view(3, 2), torch.empty(0, 2), torch.full((1, 2), 7.0)]
    monkeypatch.setattr(torch.Tensor, "to", lambda packed, *_, **__: packed.clone())
    for value, away in zip(column, moved(column, torch.device("meta")), strict=True):
        assert torch.equal(value, away)
