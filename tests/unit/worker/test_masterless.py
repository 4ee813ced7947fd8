"""A worker that hears nothing of its master ends, and says in its log and its activity why."""

import logging
import os
from pathlib import Path

import pytest

from realhf.launch.process import MASTERLESS_RETURNCODE
from realhf.rundir.flight_recorder import ActivityWriter, read_activity
from realhf.worker.__main__ import end_without_master


class EndedError(Exception):
    pass


@pytest.mark.parametrize(
    ("has_heard", "said"),
    [
        (True, r"nothing was heard of the master at tcp://127.0.0.1:9 for 91 s (from 127.0.0.1 (lo))"),
        (False, r"the master at tcp://127.0.0.1:9 did not answer within 91 s, asked from 127.0.0.1 (lo)"),
    ],
)
def test_it_says_who_cannot_reach_whom(
    has_heard: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", end)
    activity = ActivityWriter(tmp_path / "activity")
    activity.set("step 4 actor_generate: compute")
    with caplog.at_level(logging.ERROR), pytest.raises(EndedError, match=str(MASTERLESS_RETURNCODE)):
        end_without_master(3, "tcp://127.0.0.1:9", activity, 91.2, has_heard)
    found = read_activity(tmp_path / "activity")
    assert found is not None
    assert found.text.startswith("worker 3 on ")
    assert said in found.text
    assert said in caplog.text
    assert "it was in step 4 actor_generate: compute" in caplog.text
