"""A worker that hears nothing of its master ends, and says in its log and its activity why."""

import logging
import os
import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.launch.process import MASTERLESS_RETURNCODE
from realhf.rundir.flight_recorder import ActivityWriter, read_activity
from realhf.transport.client import Client, Silence
from realhf.worker import __main__ as worker_main
from realhf.worker.__main__ import end_without_master


class EndedError(Exception):
    pass


@pytest.mark.parametrize(("master_timeout_s", "first_s", "later_s"), [(90.0, 45.0, 90.0), (20.0, 20.0, 20.0)])
def test_it_waits_for_the_first_answer_and_for_later_ones(
    master_timeout_s: float, first_s: float, later_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[Silence] = []
    told: list[Callable[[BaseException | None], object]] = []
    client = SimpleNamespace(watch=watched.append, when_ended=told.append)
    for name in ("load_worker_keys", "check_start", "wait_for_master"):
        monkeypatch.setattr(worker_main, name, lambda *_, **__: SimpleNamespace(master="key", address="tcp://h:1"))
    monkeypatch.setattr(worker_main, "Client", lambda *_, **__: client)
    run: Any = SimpleNamespace(spec=SimpleNamespace(setup_timeout_s=1.0, master_timeout_s=master_timeout_s))
    directory: Any = SimpleNamespace(keys=tmp_path, rendezvous=tmp_path)
    activity = ActivityWriter(tmp_path / "activity")
    found, store = worker_main._connected(directory, run, 0, activity, queue.SimpleQueue())
    assert found is client
    assert [(silence.first_s, silence.later_s) for silence in watched] == [(first_s, later_s)]
    told[0](ConnectionRefusedError("tcp://h:1 refused this worker's key"))
    with pytest.raises(RuntimeError, match="the connection to the master has ended: tcp://h:1 refused this worker's"):
        store.get("of nobody")


@pytest.mark.parametrize(
    ("heard_s", "now_s", "told"),
    [
        (None, 45.0, []),
        (None, 45.5, [(45.5, False)]),
        (100.0, 190.0, []),
        (100.0, 145.5, []),
        (100.0, 190.5, [(90.5, True)]),
    ],
)
def test_a_silence_counts_from_the_last_message_or_the_start(
    heard_s: float | None, now_s: float, told: list[tuple[float, bool]]
) -> None:
    found: list[tuple[float, bool]] = []
    silence = Silence(45.0, 90.0, lambda silent_s, has_heard: found.append((silent_s, has_heard)))
    client: Any = SimpleNamespace(_silence=silence, _heard_s=heard_s, _clock=SimpleNamespace(now=lambda: now_s))
    Client._check_silence(client)
    assert found == told


def test_a_worker_without_requests_ends_after_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in between begins the hour anew."""
    waits = [None] * 59 + ["a request"] + [None] * 60
    client: Any = SimpleNamespace(receive=lambda wait_s: waits.pop(0), send=lambda reply: None)
    worker: Any = SimpleNamespace(handle=lambda request: None)
    with pytest.raises(TimeoutError, match="no request from the master for 3600 s"):
        for _ in worker_main._requests(client, worker, 60.0):
            pass
    assert waits == []


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
