"""Whom the master names when workers fail, fall silent or never come; the workers are a script."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.api.errors import RunError
from realhf.api.status import read_status
from realhf.master import master as master_module
from realhf.master.master import Master
from realhf.scheduler.run_directory import RunDirectory
from realhf.transport.messages import Failure, Heartbeat, Hello, Ready, ToMaster

HELLO = [(0.0, i, Hello(worker=i, pid=i, host="here")) for i in range(3)]
PEER_IS_GONE = Failure(request_id=None, text="RuntimeError: Connection closed by peer", blames_peer=True)


class ScriptedServer:
    """Receives (seconds to wait before it, worker, message) and then nothing; what is sent to workers is lost."""

    def __init__(self, script: list[tuple[float, int, ToMaster]]):
        self.script = list(script)

    async def recv(self) -> tuple[int, ToMaster]:
        if not self.script:
            await asyncio.Event().wait()
        pause_s, worker, message = self.script[0]
        await asyncio.sleep(pause_s)
        self.script.pop(0)
        return worker, message

    async def send(self, worker: int, message: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_module, "WATCH_EVERY_S", 0.05)
    monkeypatch.setattr(master_module, "HEARTBEAT_TIMEOUT_S", 0.6)
    monkeypatch.setattr(master_module, "SUSPICIOUS_SILENCE_S", 0.3)
    monkeypatch.setattr(master_module, "FAILURE_GRACE_S", 0.5)


def failure_of(directory: RunDirectory, script: list[tuple[float, int, ToMaster]], **spec: float) -> str:
    """The message with which a master of three workers ends; also what status.json says."""
    given = {"num_workers": 3, "call_timeout_s": 60.0, "setup_timeout_s": 60.0, **spec}
    run: Any = SimpleNamespace(
        spec=SimpleNamespace(**given), experiment=SimpleNamespace(steps=7), evaluation=None, evaluation_graph=None
    )
    server: Any = ScriptedServer(script)
    with pytest.raises(RunError) as error:
        asyncio.run(Master(run, directory, server).run())
    status = read_status(directory.status)
    assert status is not None
    assert (status.state, status.message, status.steps) == ("failed", str(error.value), 7)
    return str(error.value)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def alive(*workers: int) -> list[tuple[float, int, ToMaster]]:
    """Two seconds of heartbeats."""
    return [(0.05, worker, Heartbeat(activity="computing")) for _ in range(40 // len(workers)) for worker in workers]


def test_workers_that_do_not_become_ready(directory: RunDirectory) -> None:
    script = [*HELLO[:2], (0.0, 0, Ready()), (0.0, 1, Heartbeat(activity="setup: model actor"))]
    text = failure_of(directory, script, setup_timeout_s=0.2)
    assert text == (
        "not ready within 0.2 s: worker 1 (setup: model actor), worker 2 (never heard of); "
        f"read {directory.log('worker-1')}"
    )


def test_a_failure_is_told_at_once_with_its_text(directory: RunDirectory) -> None:
    text = failure_of(directory, [*HELLO, (0.0, 2, Failure(request_id=None, text="ValueError: bad weights\n"))])
    assert text == f"worker 2 failed in no request; log: {directory.log('worker-2')}\nValueError: bad weights"


def test_the_cause_is_the_worker_that_blames_no_peer(directory: RunDirectory) -> None:
    cause = Failure(request_id=None, text="OutOfMemoryError")
    text = failure_of(directory, [*HELLO, (0.0, 0, PEER_IS_GONE), (0.0, 1, PEER_IS_GONE), (0.2, 2, cause)])
    assert text.startswith("worker 2 failed in ")


def test_where_all_blame_a_peer_the_silent_one_is_the_cause(directory: RunDirectory) -> None:
    script = [*HELLO, (0.0, 2, Heartbeat(activity="step 3")), (0.0, 0, PEER_IS_GONE), (0.0, 1, PEER_IS_GONE)]
    text = failure_of(directory, script)
    assert text.startswith("worker 2 has been silent for ")
    assert f"(step 3); log: {directory.log('worker-2')}" in text


def test_where_all_blame_a_peer_and_none_is_silent_the_first_is_named(directory: RunDirectory) -> None:
    text = failure_of(directory, [*HELLO, (0.0, 1, PEER_IS_GONE), *alive(0, 2)])
    assert text.startswith("worker 1 failed in ")


def test_a_worker_without_heartbeats(directory: RunDirectory) -> None:
    text = failure_of(directory, [*HELLO, (0.0, 1, Heartbeat(activity="setup: joining")), *alive(0, 2)])
    assert text.startswith("worker 1 has been silent for ")
    assert f"(setup: joining); log: {directory.log('worker-1')}" in text


def test_a_lost_connection_is_explained_by_the_failure_behind_it(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drive(_: Master) -> None:
        raise RunError("the connection to worker 1 is gone")

    monkeypatch.setattr(Master, "_drive", drive)
    script = [*HELLO, (0.1, 1, Failure(request_id=None, text="ValueError: bad weights"))]
    assert failure_of(directory, script).endswith("ValueError: bad weights")
    assert failure_of(directory, HELLO) == "the connection to worker 1 is gone"


def test_late_workers_that_are_alive_are_named_with_the_remedy(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_module.Dispatcher, "late", lambda *_: [0, 2])
    monkeypatch.setattr(master_module.Dispatcher, "describe", lambda _, worker: f"call {worker}")
    text = failure_of(directory, HELLO, call_timeout_s=5.0)
    assert text == (
        "no answer within 5 s from worker 0 in call 0, worker 2 in call 2; raise --call-timeout-s if this may take "
        f"longer; log: {directory.log('worker-0')}, {directory.log('worker-2')}"
    )


def test_late_and_silent_is_silent(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are late only because they wait for it."""
    since_s = time.monotonic() + 0.45
    monkeypatch.setattr(master_module.Dispatcher, "late", lambda _, __, now: [0, 1, 2] if now > since_s else [])
    monkeypatch.setattr(master_module, "HEARTBEAT_TIMEOUT_S", 60.0)
    text = failure_of(directory, [*HELLO, *alive(0, 2)])
    assert text.startswith("worker 1 has been silent for ")
    assert "worker 0" not in text
