"""Who is silent, who is alive, and what is said of them, with a clock that the test turns."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from realhf.master.vital_signs import VitalSigns
from realhf.rundir.paths import RunDirectory
from realhf.transport.messages import Failure


def signs_of(now: list[float], directory: Path, dropped: int = 0, open_request: str = "train of step 3") -> VitalSigns:
    dispatcher: Any = SimpleNamespace(describe=lambda worker, request_id=None: open_request)
    return VitalSigns(lambda: now[0], dispatcher, RunDirectory(directory), lambda worker: dropped)


def test_a_silence_is_longer_than_its_limit_and_counts_from_the_last_message(tmp_path: Path) -> None:
    now = [100.0]
    signs = signs_of(now, tmp_path)
    for worker in (2, 0, 1):
        signs.heard(worker)
    now[0] = 130.0
    signs.heard(1)
    assert signs.num_heard == 3
    now[0] = 160.0
    assert (signs.silent(60.0), signs.alive(60.0)) == ([], [0, 1, 2])
    now[0] = 160.5
    assert (signs.silent(60.0), signs.alive(60.0)) == ([0, 2], [1])
    now[0] = 190.5
    assert (signs.silent(60.0), signs.alive(60.0)) == ([0, 1, 2], [])


def test_the_error_names_what_the_silent_and_the_late_are_at(tmp_path: Path) -> None:
    now = [0.0]
    signs = signs_of(now, tmp_path, dropped=7)
    signs.heard(1, host="node-1", activity="collecting")
    signs.heard(1)  # leaves both as they were
    now[0] = 61.0
    log = f"log: {tmp_path}/logs/worker-1.log (host node-1)"
    dropped = "7 of whose messages made no sense and were dropped"
    silence = signs.silence([1])
    assert str(silence) == (
        f"worker 1 has been silent for 61 s; it was in train of step 3 (collecting), {dropped}; {log}"
    )
    late = signs.lateness({1: 20.0, 4: 10.0})
    assert str(late).startswith(f"no answer within 10 s from worker 1 in train of step 3 (collecting), {dropped}, ")
    assert "worker 4 in train of step 3 (no heartbeat yet)" in str(late)
    assert (list(silence.workers), list(late.workers)) == ([1], [1, 4])


def test_a_failure_without_a_request_is_in_the_activity_or_the_start(tmp_path: Path) -> None:
    failure = Failure(request_id=None, text="ValueError: bad\n")
    assert str(signs_of([0.0], tmp_path).failure(0, failure)).startswith("worker 0 failed in train of step 3; log: ")
    signs = signs_of([0.0], tmp_path, open_request="no request")
    assert str(signs.failure(0, failure)).startswith("worker 0 failed in its start; log: ")
    signs.heard(0, activity="setup: model actor")
    error = signs.failure(0, failure)
    assert str(error).startswith("worker 0 failed in setup: model actor; log: ")
    assert str(error).endswith("\nValueError: bad")
    assert list(error.workers) == [0]
