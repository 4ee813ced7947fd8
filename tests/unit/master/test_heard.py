"""What the master makes of messages, of silence and of failures: whom it asks what, when it ends, whom it blames."""

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.base.errors import RunError
from realhf.master import master as master_module
from realhf.master.master import Master
from realhf.master.replies import Request
from realhf.rundir.flight_recorder import read_activity
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Deadlines
from realhf.rundir.status import read_status
from realhf.transport import clock as awake
from realhf.transport.messages import (
    Alive,
    DumpStacks,
    Failure,
    Heartbeat,
    Hello,
    Ready,
    Reply,
    SetKey,
    Span,
    StoreReply,
    WaitForKeys,
)
from realhf.transport.server import GoneError
from tests.unit.master.test_master import HELLO, PEER_IS_GONE, Clock, Script, ScriptedServer, alive

CAUSE = Failure(request_id=None, text="ValueError: bad weights")


class Server(ScriptedServer):
    """Keeps what is sent, and when; to workers of `gone` nothing can be."""

    known_workers = frozenset({0, 2})

    def __init__(self, script: Script, clock: Clock, gone: frozenset[int] = frozenset()):
        super().__init__(script, clock)
        self.sent: list[tuple[float, int, object]] = []
        self.gone = gone

    async def send(self, worker: int, message: Any) -> None:
        if worker in self.gone:
            raise GoneError(f"the connection to worker {worker} is gone")
        self.sent.append((self.clock.now_s, worker, message))


class Ended:
    """A master of three workers that hears `script`, to its end: what it said, and after how many seconds."""

    def __init__(self, directory: RunDirectory, script: Script, gone: frozenset[int] = frozenset()):
        spec = {
            "num_workers": 3,
            "resume_step": 0,
            "setup_timeout_s": 3600.0,
            "drift_threshold": 1.5,
            "stop_early": None,
        }
        run: Any = SimpleNamespace(
            spec=SimpleNamespace(**spec, tensorboard=False, wandb_project=None, trackio_project=None),
            experiment=SimpleNamespace(steps=7), planned_steps=7, deadlines=Deadlines(), initial_steps={},
        )  # fmt: skip
        clock = Clock()
        loop = asyncio.SelectorEventLoop(clock)
        loop.time = lambda: clock.now_s  # type: ignore[method-assign]
        self.server: Any = Server(script, clock, gone)

        async def made() -> None:
            self.master = Master(run, directory, self.server)
            await self.master.run()

        with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
            patch.setattr(awake, "time", SimpleNamespace(monotonic=loop.time))
            with pytest.raises(RunError) as error:
                runner.run(made())
        self.text, self.blamed, self.after_s = str(error.value), list(error.value.workers), clock.now_s
        status = read_status(directory.status)
        assert status is not None
        assert status.blamed == tuple(sorted(self.blamed))

    def sent(self, kind: type) -> list[tuple[float, int]]:
        return [(time_s, worker) for time_s, worker, message in self.server.sent if isinstance(message, kind)]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def test_workers_are_told_that_the_master_lives_when_they_come_and_every_five_seconds(directory: RunDirectory) -> None:
    """Worker 1 is not connected any more; that worker 0 cannot be reached just now ends nothing."""
    script: Script = [(2.0, 1, HELLO[1][2]), *alive(0, 1, 2, seconds=14), (0.5, 2, CAUSE)]
    ended = Ended(directory, script, gone=frozenset({0}))
    assert ended.text.startswith("worker 2 failed in computing; ")
    assert (ended.after_s, ended.blamed) == (16.5, [2])
    assert ended.sent(Alive) == [(2.0, 1), (5.0, 2), (10.0, 2), (15.0, 2)]


def test_the_store_answers_who_asks_and_who_waits_and_whoever_is_gone_stops_nothing(directory: RunDirectory) -> None:
    waits: Script = [(1.0, worker, WaitForKeys(request_id=worker, keys=("a",))) for worker in (0, 1)]
    ended = Ended(
        directory,
        [*HELLO, *waits, (1.0, 2, SetKey(request_id=7, key="a", value=b"")), (0.5, 2, CAUSE)],
        gone=frozenset({0}),
    )
    assert ended.sent(StoreReply) == [(3.0, 2), (3.0, 1)]


def test_a_sign_of_life_is_written_every_second(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    write = master_module.write_status
    monkeypatch.setattr(
        master_module, "write_status", lambda path, status: (states.append(status.state), write(path, status))
    )
    Ended(directory, [*HELLO, (3.5, 2, CAUSE)])
    assert states == ["starting"] * 4 + ["failed"]


def test_every_message_is_a_sign_of_life(directory: RunDirectory) -> None:
    """Worker 1 sends nothing but answers to what nobody asked; worker 2 is silent from the beginning."""
    nonsense = Reply(request_id=5, span=Span("compute", "a", 0.0, 1.0))
    script = [each for _ in range(70) for each in ((1.0, 0, Heartbeat(activity="")), (0.0, 1, nonsense))]
    ended = Ended(directory, [*HELLO, *script])
    assert ended.text.startswith("worker 2 has been silent for 61 s; it was in no request (no heartbeat yet); log: ")
    assert "worker 1" not in ended.text
    assert (ended.blamed, ended.server.rejected[:2]) == ([2], [1, 1])
    assert 61.0 <= ended.after_s < 62.0 + master_module.STACKS_S


def test_how_far_the_start_is_is_recorded_before_anybody_is_heard(directory: RunDirectory) -> None:
    recorded = []

    def hello() -> Hello:
        recorded.append(read_activity(directory.activity("master")))
        return Hello(worker=0, pid=1, host="h")

    Ended(directory, [(0.5, 0, hello), (0.0, 2, hello), (1.0, 2, CAUSE)])
    assert [activity and activity.text for activity in recorded] == [
        f"setup: {number} of 3 workers connected, 0 ready" for number in (0, 1)
    ]


def test_processes_of_other_starts_are_refused(directory: RunDirectory) -> None:
    other = Hello(worker=2, pid=7, host="h", start_id="0" * 8)
    ended = Ended(directory, [*HELLO[:2], (0.0, 2, other), (1.0, 0, CAUSE)])
    assert ended.server.refused == [2]
    assert ended.sent(Alive) == [(0.0, 0), (0.0, 1)]


def test_heartbeats_tell_the_difference_of_clocks_except_on_the_master_s_host(directory: RunDirectory) -> None:
    here = Hello(worker=0, pid=1, host=socket.gethostname())
    beat = Heartbeat(activity="", sent_s=0.0)
    ended = Ended(directory, [(0.0, 0, here), *HELLO[1:], (0.0, 0, beat), (0.0, 1, beat), (1.0, 2, CAUSE)])
    differences = [ended.master._clocks.offset_s(worker) for worker in range(3)]
    assert differences[0] == differences[2] == 0.0
    assert differences[1] > 1e6, "its clock is at the epoch"


def test_who_was_ready_is_known_with_its_device(directory: RunDirectory) -> None:
    ready: Script = [(0.0, worker, Ready(device=device)) for worker, device in enumerate(("GPU", "CPU"))]
    ended = Ended(directory, [*HELLO, *ready, (1.0, 2, CAUSE)])
    assert ended.master._ready == {0: "GPU", 1: "CPU"}
    assert not ended.master._all_ready.is_set()


def test_who_blames_a_peer_is_asked_for_stacks_and_who_does_not_is_not(directory: RunDirectory) -> None:
    """Further failures are waited for eight seconds, and stacks for two; whoever still speaks is asked for them."""
    ended = Ended(directory, [*HELLO, (0.0, 1, PEER_IS_GONE), *alive(0, 2, seconds=20)])
    assert ended.text.startswith("worker 1 failed in ")
    assert (ended.sent(DumpStacks), ended.blamed) == ([(8.0, 0), (8.0, 2)], [1])
    assert ended.after_s == pytest.approx(10.0, abs=0.1)
    ended = Ended(directory, [*HELLO, (0.0, 1, CAUSE), *alive(0, 2)])
    assert (ended.sent(DumpStacks), ended.after_s) == ([], 0.0)


def test_nothing_more_is_waited_for_when_all_workers_have_failed(directory: RunDirectory) -> None:
    """All blame a peer, none is silent: the first one is named."""
    ended = Ended(directory, [*HELLO, *((1.0, worker, PEER_IS_GONE) for worker in (2, 1, 0))])
    assert ended.text.startswith("worker 0 failed in ")
    assert ended.after_s == pytest.approx(3.0 + master_module.STACKS_S, abs=0.1)


def test_who_blames_nobody_is_the_cause_though_another_is_silent(directory: RunDirectory) -> None:
    ended = Ended(directory, [*HELLO, (0.0, 0, PEER_IS_GONE), (5.0, 1, CAUSE)])
    assert (ended.text.partition(";")[0], ended.blamed) == ("worker 1 failed in its start", [1])


def test_who_speaks_while_failures_are_waited_for_is_not_silent(directory: RunDirectory) -> None:
    """Worker 2 says nothing for the last three seconds of eight, and worker 0 for a moment more."""
    script: Script = [
        *HELLO,
        (0.0, 1, PEER_IS_GONE),
        (4.9, 0, Heartbeat(activity="")),
        (0.1, 2, Heartbeat(activity="")),
    ]
    ended = Ended(directory, script)
    assert ended.text.startswith("worker 0 has been silent for 3 s; it was in no request (no heartbeat yet); log: ")
    assert ended.blamed == [0]


def test_stacks_of_earlier_are_not_taken_for_those_of_now(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0 has left stacks before, and is gone now; worker 2 writes its own half a second later."""
    directory.stacks("worker-0").write_text("old")
    send = Server.send

    async def sent(self: Server, worker: int, message: Any) -> None:
        await send(self, worker, message)
        if isinstance(message, DumpStacks):
            asyncio.get_running_loop().call_later(0.5, directory.stacks(f"worker-{worker}").write_text, "now")

    monkeypatch.setattr(Server, "send", sent)
    late = {2: Request("", 5.0), 1: Request("", 7.0)}
    monkeypatch.setattr(master_module.Dispatcher, "late", lambda *_: late)
    ended = Ended(directory, HELLO, gone=frozenset({0}))
    assert ended.text.startswith("no answer within 5 s from worker 2 in no request (no heartbeat yet), worker 1 in ")
    assert ended.text.endswith(f"\nPython stacks of 2 workers: {directory.logs}/stacks-worker-*.txt")
    assert not directory.stacks("worker-0").exists()
    assert sorted(ended.blamed) == [1, 2]
    assert ended.after_s == pytest.approx(1.0 + master_module.STACKS_S, abs=0.1)
    # All write theirs: nothing more is waited for.
    assert Ended(directory, HELLO).after_s == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize("silent_s", [3, 4])
def test_while_another_is_late_more_than_three_seconds_are_silence(
    silent_s: int, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 is late from a time on at which worker 2 has not been heard for so many seconds."""
    clock: list[Any] = []
    make = Server.__init__

    def made(self: Server, *arguments: Any) -> None:
        make(self, *arguments)
        clock.append(self.clock)

    monkeypatch.setattr(Server, "__init__", made)
    monkeypatch.setattr(
        master_module.Dispatcher, "late", lambda *_: {1: Request("", 5.0)} if clock[0].now_s >= silent_s else {}
    )
    ended = Ended(directory, [*HELLO, *alive(0, 1, seconds=20)])
    if silent_s == 3:
        assert ended.text.startswith("no answer within 5 s from worker 1 in ")
    else:
        assert ended.text.startswith("worker 2 has been silent for 4 s; ")


def test_a_full_disk_at_the_end_hides_no_reason(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cannot be written to its end, the rest is closed, and the failure is told."""
    closed = []

    def full(tracker: object) -> None:
        closed.append(type(tracker).__name__)
        raise OSError("No space left on device")

    monkeypatch.setattr(master_module.Trace, "close", full)
    monkeypatch.setattr(master_module.Trackers, "close", full)
    assert Ended(directory, [*HELLO, (0.0, 2, CAUSE)]).text.startswith("worker 2 failed in its start")
    assert closed == ["Trace", "Trackers"]


def test_all_has_ended_when_the_trace_is_closed(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    close = master_module.Trace.close

    async def watch(_: Master) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("the watch")

    def closed(trace: master_module.Trace) -> None:
        ended.append("the trace")
        close(trace)

    monkeypatch.setattr(Master, "_watch", watch)
    monkeypatch.setattr(master_module.Trace, "close", closed)
    Ended(directory, [*HELLO, (0.0, 2, CAUSE)])
    assert ended == ["the watch", "the trace"]
    assert json.loads(directory.trace.read_text())[0]["args"] == {"name": "worker-0"}


def test_an_interruption_is_noted_where_there_is_room(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended(directory, [*HELLO, (0.0, 2, CAUSE)])
    ended.master.interrupted()
    status = read_status(directory.status)
    assert status is not None
    assert (status.state, status.message, status.step) == ("interrupted", "the run was interrupted", 0)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(master_module, "write_status", full)
    ended.master.interrupted()
