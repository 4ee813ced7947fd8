"""Optimizer states that wait in host memory, in torch's own streams and allocator."""

import pytest

from tests.simulated.simulator import Simulator


def test_states_in_host_memory_pass_through_the_device_two_chunks_at_a_time(simulator: Simulator) -> None:
    """A chunk of states in bfloat16 has 12 bytes an element, and its scaled gradient 4. The host waits once a step."""
    outcome = simulator.run("staging", 1)
    assert outcome.values("waits of the host") == [1] * 3
    assert outcome.values("bytes by those of a chunk's states") == pytest.approx([2 + 4 / 12] * 3, rel=0.001)
    assert outcome.values("bytes left behind") == [0] * 3
    lines = [line for line in outcome.logs[0].splitlines() if line.startswith("sequence: ")]
    chunk = ["come on 1"] * 3 + ["update on 0"] + ["go on 2"] * 3
    assert lines == [f"sequence: {', '.join(chunk * 5)}"] * 3
