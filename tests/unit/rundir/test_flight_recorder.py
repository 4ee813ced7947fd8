"""What a process was doing can be read after it was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.rundir.flight_recorder import MAX_TEXT_BYTES, ActivityWriter, read_activity
from tests.waiting import PATIENCE_S


def test_it_survives_sigkill(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from realhf.rundir.flight_recorder import ActivityWriter
writer = ActivityWriter(Path(sys.argv[1]))
writer.set("step 3 actor_train: compute")
writer.set("step 4 actor_generate: compute")
os.kill(os.getpid(), signal.SIGKILL)
"""
    before = time.time()
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "worker-3")], timeout=PATIENCE_S)
    assert ended.returncode == -signal.SIGKILL
    activity = read_activity(tmp_path / "worker-3")
    assert activity is not None
    assert str(activity) == "step 4 actor_generate: compute"
    assert before <= activity.since <= time.time()


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_the_last_text_is_read(tmp_path_factory, texts: list[str]) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("activity") / "master"
    writer = ActivityWriter(path)
    for text in texts:
        writer.set(text)
    activity = read_activity(path)
    expected = texts[-1].encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="replace")
    assert (activity.text if activity else "") == expected
    writer.close()


def test_a_long_text_is_cut_and_the_file_does_not_grow(tmp_path: Path) -> None:
    writer = ActivityWriter(tmp_path / "a")
    size = os.path.getsize(tmp_path / "a")
    for _ in range(3):
        writer.set("é" * 1000)
    assert os.path.getsize(tmp_path / "a") == size
    activity = read_activity(tmp_path / "a")
    assert activity is not None
    assert activity.text.startswith("é" * 100)
    writer.close()


def test_a_half_written_text_is_not_seen(tmp_path: Path) -> None:
    """Killed at any byte of a `set`, the file still holds the text before it."""
    path = tmp_path / "a"
    writer = ActivityWriter(path)
    writer.set("before")
    whole_before = path.read_bytes()
    writer.set("after")
    whole_after = path.read_bytes()
    header = 8
    for cut in range(header, len(whole_before)):  # the slots are written first, the header last
        path.write_bytes(whole_before[:header] + whole_after[header:cut] + whole_before[cut:])
        assert str(read_activity(path)) == "before"
    writer.close()


def test_no_record_is_none(tmp_path: Path) -> None:
    assert read_activity(tmp_path / "absent") is None
    (tmp_path / "other").write_text("something else")
    assert read_activity(tmp_path / "other") is None
    ActivityWriter(tmp_path / "silent").close()
    assert read_activity(tmp_path / "silent") is None


@pytest.mark.measures
def test_it_is_cheap(tmp_path: Path) -> None:
    writer = ActivityWriter(tmp_path / "a")
    start = time.process_time()
    for i in range(10_000):
        writer.set(f"step {i} actor_generate: compute")
    per_set_us = (time.process_time() - start) / 10_000 * 1e6
    writer.close()
    assert per_set_us < 20
