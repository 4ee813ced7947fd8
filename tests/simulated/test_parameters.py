"""Parameters on their way between ranks over ProcessGroupNCCL, and to files and back."""

from pathlib import Path

from tests.simulated.simulator import Simulator


def test_moves_go_on_a_thread_of_their_own(simulator: Simulator) -> None:
    outcome = simulator.run("moves", 2)
    for log in outcome.logs:
        assert [line for line in log.splitlines() if line.startswith("home, copy: ")] == ["home, copy: HERE, FREED"] * 4
    assert outcome.values("bytes more than after step 2") == [0, 0]
    # Each rank has the world's, that of moves, and one for all axes of both layouts, whose groups have both ranks.
    assert outcome.memberships == 3 * 2


def test_a_checkpoint_has_what_was_on_the_devices(simulator: Simulator, tmp_path: Path) -> None:
    outcome = simulator.run("checkpoints", 2, tmp_path / "checkpoint")
    assert outcome.values("tensors that differ") == [0, 0]
    # A parameter, and three states of it (master copy, moments), which no kernel has changed from zero.
    assert [4 * count for count in outcome.values("tensors that are not zero")] == outcome.values("tensors")
