"""The device's and the host's memory in torch's own allocators, call after call."""

from realhf.launch.process import gpu_environment
from tests.simulated.simulator import Simulator


def test_calls_leave_nothing_behind(simulator: Simulator) -> None:
    """With segments that grow reserved memory stays close to the most that was in use."""
    growing = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    outcome = simulator.run("memory", 1, environment=gpu_environment() | growing)
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
