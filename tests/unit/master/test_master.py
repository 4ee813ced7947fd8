"""Whom the master names when workers fail, fall silent or never come; the workers are a script."""

import asyncio
import errno
import itertools
import os
import re
import selectors
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.base.errors import RunError, UserError
from realhf.dataflow.plan import ExecutionPlan
from realhf.master import master as master_module
from realhf.master.loop import CallRecord
from realhf.master.master import Master
from realhf.master.replies import Request
from realhf.master.state import Node
from realhf.rundir.flight_recorder import read_activity
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Deadlines, RunSpec
from realhf.rundir.starts import begin_start, current_start
from realhf.rundir.status import Status, read_status, write_status
from realhf.transport import clock as awake
from realhf.transport.messages import Alive, DumpStacks, Failure, Heartbeat, Hello, Ready, Reply, Span, ToMaster
from realhf.transport.server import GoneError
from tests.unit.api.calls import ppo_graph

HELLO = [(0.0, i, Hello(worker=i, pid=i, host="h")) for i in range(3)]
PEER_IS_GONE = Failure(request_id=None, text="RuntimeError: Connection closed by peer", blames_peer=True)


class Clock(selectors.DefaultSelector):
    """What the event loop waits with: nothing takes time, and the clock jumps to when the next thing is to happen."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits for ever"
        self.now_s += timeout
        return super().select(0)


STANDS_STILL = None  # the master, for the seconds given

# A function is called when its turn comes.
Script = list[tuple[float, int, ToMaster | Callable[[], ToMaster] | None]]


class ScriptedServer:
    """Receives (seconds to wait before it, worker, message) and then nothing; what is sent to workers is lost."""

    def __init__(self, script: Script, clock: Clock):
        self.script, self.clock = list(script), clock
        self.rejected: list[int] = []
        self.refused: list[int] = []

    known_workers: frozenset[int] = frozenset()

    def garbage(self, worker: int) -> int:
        return self.rejected.count(worker)

    def reject(self, worker: int) -> None:
        self.rejected.append(worker)

    async def recv(self) -> tuple[int, ToMaster]:
        while self.script:
            pause_s, worker, message = self.script[0]
            if message is STANDS_STILL:
                self.clock.now_s += pause_s
                self.script.pop(0)
                continue
            await asyncio.sleep(pause_s)
            self.script.pop(0)
            return worker, message() if callable(message) else message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, worker: int, message: Any) -> None:
        pass

    def refuse(self, worker: int) -> None:
        self.refused.append(worker)


async def _run(run: Any, directory: RunDirectory, server: Any) -> None:
    await Master(run, directory, server, current_start(directory)).run()


def failure_of(directory: RunDirectory, script: Script, **spec: float) -> str:
    """The message with which a master of three workers ends; also what status.json says."""
    message = end_of(directory, script, **spec)
    status = read_status(directory.status)
    assert status is not None
    assert (status.state, status.message, status.steps) == ("failed", message, 7)
    return message


def end_of(directory: RunDirectory, script: Script, **spec: float) -> str:
    given = {"num_workers": 3, "resume_step": 0, "call_timeout_s": 600.0, "setup_timeout_s": 3600.0, **spec}
    given |= {"tensorboard": False, "wandb_project": None, "trackio_project": None}
    given |= {"stop_early": None, "drift_threshold": 1.5}
    run: Any = SimpleNamespace(
        spec=SimpleNamespace(**given), experiment=SimpleNamespace(steps=7, evaluations={}, graphs={}), planned_steps=7
    )
    run.deadlines, run.initial_steps = Deadlines(), {}
    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now_s  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
        patch.setattr(awake, "time", SimpleNamespace(monotonic=loop.time))
        server: Any = ScriptedServer(script, clock)
        with pytest.raises(RunError) as error:
            runner.run(_run(run, directory, server))
    return str(error.value)


def test_a_master_that_can_write_no_status_leaves_its_reason_to_the_launcher(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Status] = []

    def full(path: Path, status: Status) -> None:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path.name)
        written.append(status)

    monkeypatch.setattr(master_module, "write_status", full)
    message = end_of(directory, [])
    assert message == (
        "status.json cannot be written (No space left on device): make room there, then go on with --resume"
    )
    activity = read_activity(directory.activity("master"))
    assert activity is not None
    assert activity.text == message


def test_a_master_of_an_earlier_start_that_is_interrupted_writes_nothing(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    async def two_starts(run: Any, directory: RunDirectory, server: Any) -> None:
        begin_start(directory)
        earlier = Master(run, directory, server, current_start(directory))
        begin_start(directory)
        present = Master(run, directory, server, current_start(directory))
        monkeypatch.setattr(master_module, "write_status", lambda _, status: written.append(status.state))
        earlier.interrupted()
        assert written == []
        present.interrupted()
        raise RunError("ended")

    monkeypatch.setattr(sys.modules[__name__], "_run", two_starts)
    assert end_of(directory, []) == "ended"
    assert written == ["interrupted"]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def alive(*workers: int, seconds: int = 100) -> Script:
    """A heartbeat of each every second."""
    beats = [(0.0, worker, Heartbeat(activity="computing")) for worker in workers]
    return [(1.0, *beat[1:]) if i == 0 else beat for _ in range(seconds) for i, beat in enumerate(beats)]


def test_workers_that_do_not_become_ready(directory: RunDirectory) -> None:
    script = [*HELLO[:2], (0.0, 0, Ready(device="CPU")), (0.0, 1, Heartbeat(activity="setup: model actor"))]
    text = failure_of(directory, script, setup_timeout_s=20)
    assert text == (
        "not ready within 20 s: worker 1 (setup: model actor), worker 2 (never heard of); "
        f"read {directory.log('worker-1')}"
    )


def test_devices_of_several_kinds_are_refused(directory: RunDirectory) -> None:
    kinds = ["NVIDIA A100-SXM4-40GB", "NVIDIA L40S", "NVIDIA A100-SXM4-40GB"]
    text = failure_of(directory, [*HELLO, *((0.0, i, Ready(device=kinds[i])) for i in (2, 1, 0))])
    assert "NVIDIA A100-SXM4-40GB: worker 0 (host h), 2 (host h); NVIDIA L40S: worker 1 (host h);" in text
    assert "--sbatch=--constraint=FEATURE" in text


def test_a_worker_of_another_start_is_not_heard(directory: RunDirectory) -> None:
    begin_start(directory)
    now = [(0.0, i, Hello(worker=i, pid=i, host="h", start_id=current_start(directory))) for i in range(2)]
    late = (0.0, 2, Hello(worker=2, pid=2, host="h", start_id="0" * 8))
    text = failure_of(directory, [*now, late], setup_timeout_s=20)
    assert text.startswith("not ready within 20 s: worker 0 (never heard of), worker 1 (never heard of), worker 2 (")
    activity = read_activity(directory.activity("master"))
    assert activity is not None
    assert activity.text.startswith("setup: 2 of 3 workers connected")


def test_a_master_of_an_earlier_start_ends_and_writes_nothing(directory: RunDirectory) -> None:
    begin_start(directory)
    master_id = current_start(directory)

    def next_start() -> ToMaster:
        begin_start(directory)
        write_status(directory.status, Status(state="starting", step=3, steps=7))
        return Heartbeat(activity="computing")

    text = end_of(directory, [(1.0, 0, next_start)])
    assert text.startswith(f"this process belongs to start {master_id} of the run in {directory.path}, which goes on")
    status = read_status(directory.status)
    assert status is not None
    assert (status.state, status.step) == ("starting", 3)


def test_a_failure_is_told_at_once_with_its_text(directory: RunDirectory) -> None:
    text = failure_of(directory, [*HELLO, (0.0, 2, Failure(request_id=None, text="ValueError: bad weights\n"))])
    assert text == f"worker 2 failed in its start; log: {directory.log('worker-2')} (host h)\nValueError: bad weights"


def test_a_failure_before_the_first_request_says_what_the_worker_was_doing(directory: RunDirectory) -> None:
    failure = Failure(request_id=None, text="UserError: bad checkpoint")
    text = failure_of(directory, [*HELLO, (0.0, 2, Heartbeat(activity="setup: model actor")), (0.0, 2, failure)])
    assert text.startswith("worker 2 failed in setup: model actor; log: ")


def test_the_cause_is_the_worker_that_blames_no_peer(directory: RunDirectory) -> None:
    cause = Failure(request_id=None, text="OutOfMemoryError")
    text = failure_of(directory, [*HELLO, (0.0, 0, PEER_IS_GONE), (0.0, 1, PEER_IS_GONE), (5.0, 2, cause)])
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


def test_replies_that_make_no_sense_are_counted_and_told(directory: RunDirectory) -> None:
    nonsense = Reply(request_id=5, span=Span("compute", "a", 0.0, 1.0))
    text = failure_of(directory, [*HELLO, *[(0.0, 1, nonsense)] * 3, *alive(0, 2)])
    assert text.startswith("worker 1 has been silent for ")
    assert "(no heartbeat yet), 3 of whose messages made no sense and were dropped; log: " in text


def test_a_lost_connection_is_explained_by_the_failure_behind_it(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drive(_: Master) -> None:
        raise GoneError("the connection to worker 1 is gone")

    monkeypatch.setattr(Master, "_drive", drive)
    script = [*HELLO, (5.0, 1, Failure(request_id=None, text="ValueError: bad weights"))]
    assert failure_of(directory, script).endswith("ValueError: bad weights")
    assert failure_of(directory, HELLO) == "the connection to worker 1 is gone"


def test_late_workers_that_are_alive_are_named_with_the_remedy(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_module.Dispatcher, "late", lambda *_: {0: Request("", 5.0), 2: Request("", 7.0)})
    monkeypatch.setattr(master_module.Dispatcher, "describe", lambda _, worker: f"call {worker}")
    text = failure_of(directory, [*HELLO, (0.0, 0, Heartbeat(activity="sampling"))])
    assert text == (
        "no answer within 5 s from worker 0 in call 0 (sampling), worker 2 in call 2 (no heartbeat yet); raise "
        f"--call-timeout-s if this may take longer; log: {directory.log('worker-0')} (host h), "
        f"{directory.log('worker-2')} (host h)"
    )


def test_where_a_run_is_stuck_the_stacks_of_those_that_answer_are_written(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(_: ScriptedServer, worker: int, message: Any) -> None:
        if message == Alive():
            return
        assert message == DumpStacks()
        if worker == 0:
            directory.stacks("worker-0").write_text("stacks")

    monkeypatch.setattr(ScriptedServer, "send", send)
    monkeypatch.setattr(master_module.Dispatcher, "late", lambda *_: {1: Request("", 5.0)})
    text = failure_of(directory, HELLO)
    assert text.startswith("no answer within 5 s from worker 1 in ")
    assert text.endswith(f"\nPython stacks of 1 workers: {directory.logs}/stacks-worker-*.txt")


def test_late_and_silent_is_silent(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are late only because they wait for it."""
    looks = itertools.count()
    monkeypatch.setattr(
        master_module.Dispatcher,
        "late",
        lambda *_: dict.fromkeys(range(3), Request("", 5.0)) if next(looks) > 10 else {},
    )
    text = failure_of(directory, [*HELLO, *alive(0, 2)])
    assert text.startswith("worker 1 has been silent for ")
    assert "worker 0" not in text


def test_a_master_that_stood_still_has_heard_nobody_and_blames_nobody(directory: RunDirectory) -> None:
    """Whatever holds it up: its workers' heartbeats wait to be read, or they were held up too and come a bit later."""
    held_up = [
        *alive(0, 1, 2, seconds=3),
        (3600.0, 0, STANDS_STILL),
        (20.0, 0, Ready(device="CPU")),
        *alive(0, 1, 2, seconds=3),
    ]
    end: Script = [(0.0, 2, Failure(request_id=None, text="ValueError: bad weights"))]
    text = failure_of(directory, [*HELLO, *held_up, *end], setup_timeout_s=1e6)
    assert text.startswith("worker 2 failed in computing; ")
    # Silence counts on where it was.
    text = failure_of(directory, [*HELLO, *alive(0, 2, seconds=30), *held_up[6:7], *alive(0, 2)], setup_timeout_s=1e6)
    assert text.startswith("worker 1 has been silent for 61 s")


STATISTICS = {"loss": (3.0, 2.0), "token_accuracy": (1.0, 2.0)}


@pytest.mark.parametrize(
    ("best", "resume_step", "is_made"),
    [
        (None, 0, True),
        ("token_accuracy", 0, True),
        ("min:loss", 0, True),
        ("accuracy", 0, True),  # by the evaluation before the first step
        ("min:accuracy", 4, True),  # by one of an earlier start
        ("accurcy", 0, False),
        ("max:loss", 0, False),
        ("step", 4, False),
    ],
)
def test_the_best_by_a_statistic_that_nothing_makes(
    best: str | None, resume_step: int, is_made: bool, directory: RunDirectory
) -> None:
    spec = RunSpec(
        experiment_file="", experiment_class="", values={}, working_directory="", num_workers=1, devices_per_node=1,
        keep_best=best, resume_step=resume_step,
    )  # fmt: skip
    plan = ExecutionPlan(num_devices=1, calls={})
    graph = ppo_graph()
    experiment = SimpleNamespace(graph=graph, graphs={"train": graph}, steps=7, evaluations={})
    run: Any = SimpleNamespace(spec=spec, plan=plan, experiment=experiment, planned_steps=7)
    run.deadlines, run.initial_steps = Deadlines(), {}
    directory.evaluations.write_text('{"step":0,"accuracy":0.5}\n')
    master = Master(run, directory, ScriptedServer([], Clock()))  # type: ignore[arg-type]
    reply = Reply(request_id=0, span=Span("compute", "", 0.0, 1.0), stats=STATISTICS)
    record = CallRecord(Node(resume_step, "sft_train_step"), "sft", {0: reply})
    if is_made:
        master._record_step(resume_step, [record])
        return
    with pytest.raises(RunError) as error:
        master._record_step(resume_step, [record])
    assert re.fullmatch(
        rf"--keep-best {best}: neither step {resume_step + 1} nor an evaluation before it has made such a statistic; "
        r"choose from accuracy, loss, time_s, token_accuracy, tokens_per_s",
        str(error.value),
    )


def test_inputs_that_have_changed_end_the_start(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a job that has waited: on a thread, since large files take a while."""

    def changed(run: object, of: RunDirectory) -> None:
        assert (run, of) == ("the run", directory)
        raise UserError("the data set of the run has changed")

    monkeypatch.setattr("realhf.master.master.check_inputs", changed)
    master: Any = SimpleNamespace(_run="the run", _directory=directory)
    asyncio.run(Master._check_inputs(master))  # of a run that was made before inputs were noted
    directory.inputs.write_text("{}")
    with pytest.raises(RunError, match="the data set of the run has changed"):
        asyncio.run(Master._check_inputs(master))

    async def refuse(_: Master) -> None:
        raise RunError("the data set of the run has changed")

    monkeypatch.setattr(Master, "_check_inputs", refuse)
    assert failure_of(directory, [*HELLO]) == "the data set of the run has changed"


def test_a_mistake_that_the_master_finds_is_told_at_once(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drive(_: Master) -> None:
        raise RunError("--keep-best accurcy: no such statistic")

    monkeypatch.setattr(Master, "_drive", drive)
    script = [*HELLO, (5.0, 1, Failure(request_id=None, text="ValueError: bad weights"))]
    assert failure_of(directory, script) == "--keep-best accurcy: no such statistic"
