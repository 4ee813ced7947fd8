"""The device's and the host's memory in torch's own allocators, call after call."""

import pytest

from tests.simulated.simulator import Simulator


def test_calls_leave_nothing_behind(simulator: Simulator) -> None:
    """With segments that grow reserved memory stays close to the most that was in use."""
    outcome = simulator.run("memory", 1)
    assert outcome.values("bytes more after 50 calls") == [0]
    assert outcome.values("reserved bytes more after 50 calls") == [0]
    assert outcome.values("expandable segments")[0] > 0
    (peak_mib,), (reserved_mib,) = outcome.values("peak of allocated MiB"), outcome.values("reserved MiB")
    assert reserved_mib <= 1.05 * peak_mib


def test_offloaded_vectors_leave_the_device_and_come_back(simulator: Simulator) -> None:
    outcome = simulator.run("offload", 1)
    assert outcome.values("device bytes given back beyond the vectors") == [0] * 5
    assert outcome.values("device bytes more than before") == [0] * 5
    # Pinned memory is taken once; torch rounds blocks up, which HostCopy keeps small.
    shares = outcome.values("pinned bytes by those of the vectors")
    assert len(set(shares)) == 1
    assert 1 <= shares[0] < 1.03
    assert outcome.values("vectors with their values") == [2]


def test_graphs_grow_and_leave_as_much_however_many_there_are(simulator: Simulator) -> None:
    """New ones do not take the pool of those that are gone, and all recordings share a stream and its workspaces."""
    outcome = simulator.run("graphs", 1)
    assert outcome.values("recorded") == [10]
    first, *_, last = outcome.values("allocated MiB")
    assert last - first < 1  # the inputs of the steps


def test_memory_stays_in_one_piece_between_calls(simulator: Simulator) -> None:
    """A model that trains and one that generates take turns on 80 GiB, and samples outlive the calls that made them.

    Where segments cannot grow, the same calls find no room while more than they need is free.
    """
    outcome = simulator.run("turns", 1)
    (peak_gib,), reserved_gib = outcome.values("most GiB in use"), outcome.values("reserved GiB")
    assert 50 < peak_gib < 55
    assert len(reserved_gib) == 6
    assert max(reserved_gib) <= 1.05 * peak_gib
    with pytest.raises(AssertionError, match="OutOfMemoryError: CUDA out of memory"):
        simulator.run("turns", 1, environment={"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
