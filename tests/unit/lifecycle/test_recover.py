"""Starting again: from where, how often, and what the run directory looks like then."""

import errno
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.api.experiment import SETTINGS_ATTRIBUTE, AutoSettings
from realhf.api.resolved import ResolvedExperiment
from realhf.base import files
from realhf.base.errors import RunError, UserError
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset
from realhf.data.inputs import keep_inputs
from realhf.dataflow.plan import ExecutionPlan
from realhf.launch import supervisor
from realhf.launch.launcher import Exit, Launcher
from realhf.launch.process import Job, ProcessSpec
from realhf.lifecycle import shrink
from realhf.lifecycle.controller import Controller, Listener, continued, last_step
from realhf.lifecycle.request import RecoveryRequest, RunRequest
from realhf.rundir.events import Event, note, read_events
from realhf.rundir.flight_recorder import ActivityWriter
from realhf.rundir.paths import MASTER, RunDirectory
from realhf.rundir.prepare import prepare
from realhf.rundir.run import Run, RunSpec, load_plan
from realhf.rundir.status import read_status
from tests.unit.launch.saved_runs import damage, save
from tests.unit.report.run_directories import metrics_line


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Of an experiment without calls, whose times nobody could keep."""
    monkeypatch.setattr("realhf.lifecycle.controller.keep_times", lambda *_: [])
    spec = RunSpec(
        experiment_file="", experiment_class="", values={}, working_directory="", num_workers=2, devices_per_node=2
    )
    return Run(
        spec,
        ResolvedExperiment(SimpleNamespace(steps=9, **{SETTINGS_ATTRIBUTE: AutoSettings(batch_size=1)})),
        ExecutionPlan(num_devices=2, calls={}),
    )


@pytest.fixture
def directory(tmp_path: Path, run: Run) -> RunDirectory:
    """After five steps with checkpoints after the second and the fourth, and part of a sixth."""
    directory = RunDirectory.create(tmp_path / "run")
    prepare(run, directory)
    directory.metrics.write_text("".join(json.dumps(metrics_line(step)) + "\n" for step in range(1, 6)) + '{"step":6,')
    directory.evaluations.write_text('{"step":0}\n{"step":4}\n{"step":5}\n')
    directory.trace.write_text("[\n")
    (directory.rendezvous / "master.json").write_text("of a process that is gone")
    directory.activity("worker-7").write_bytes(b"")
    for step in (1, 5):
        (directory.path / f"rollouts/step-{step}").mkdir(parents=True)
    for step in (2, 4):
        save(directory.checkpoints, step)
    (directory.checkpoints / ".step-6.part").mkdir()
    return directory


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)


@dataclass
class FakeLauncher(Launcher):
    """Devices "a", "b", ... of which a job has the first that it does not avoid. The n-th start ends at once as the
    n-th end says: the exit code, and whose it is; if that is 0, all processes end well."""

    directory: RunDirectory
    ends: list[tuple[int, str]]
    devices: str = "abcdef"
    gone: frozenset[str] = frozenset()
    starts: list[tuple[int, str]] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    of_job: str = ""

    def start(self, job: Job) -> None:
        code, name = self.ends.pop(0)
        names = [name] if code else [process.name for process in job.processes]
        self.exits = [Exit(name=name, returncode=code) for name in names]
        self.of_job = "".join(sorted(set(self.devices) - job.avoided))[: len(job.workers)]
        resume_step = json.loads(self.directory.experiment.read_text())["resume_step"]
        self.starts.append((resume_step, self.of_job))

    def poll(self) -> list[Exit]:
        exits, self.exits = self.exits, []
        return exits

    def stop(self, *, grace_s: float = 5.0) -> None:
        pass

    def place(self, worker: int) -> str | None:
        return self.of_job[worker]

    def lost(self) -> frozenset[str]:
        return self.gone

    def room(self, avoided: frozenset[str]) -> int:
        return len(set(self.devices) - avoided)


def carry_out(run: Run, directory: RunDirectory, codes: list[int], max_restarts: int) -> list[int]:
    """The steps that the restarts go on from, where the n-th start ends with the n-th code."""
    launcher = FakeLauncher(directory, [(code, MASTER) for code in codes])
    recovery = RecoveryRequest(recover="auto", max_restarts=max_restarts) if max_restarts else RecoveryRequest()
    try:
        go_on(run, launcher, recovery)
    finally:
        assert not launcher.ends
    return [step for step, _ in launcher.starts[1:]]


def go_on(run: Run, launcher: FakeLauncher, recovery: RecoveryRequest) -> list[str | None]:
    """The reasons that are told for its starts."""
    told: list[str | None] = []

    class Reasons(Listener):
        def starting(self, run: Run, directory: RunDirectory, reason: str | None) -> None:
            told.append(reason)

    request = RunRequest(experiment="experiment.py", recovery=recovery)
    Controller(run, request, launcher.directory, launcher, Reasons()).run_to_end()
    return told


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a plan for any number of workers."""

    def plan_for_fewer(run: Run, request: RunRequest, num_workers: int, watch: Any) -> tuple[ExecutionPlan, None]:
        return ExecutionPlan(num_devices=num_workers, calls={}, predicted_step_s=0.25), None

    monkeypatch.setattr(shrink, "plan_for_fewer", plan_for_fewer)


def test_a_run_goes_on_from_its_newest_good_checkpoint(run: Run, directory: RunDirectory) -> None:
    assert last_step(directory) == 5
    keys = {path.name: path.read_bytes() for path in directory.keys.iterdir()}
    assert carry_out(run, directory, [-9, 0], max_restarts=3) == [4]
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert directory.evaluations.read_text() == '{"step":0}\n{"step":4}\n'
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == ["latest", "step-2", "step-4"]
    assert [path.name for path in (directory.path / "rollouts").iterdir()] == ["step-1"]
    assert (directory.path / "trace-1.json").exists()
    assert not directory.trace.exists()
    assert not list(directory.rendezvous.iterdir())
    assert not list(directory.activity("x").parent.iterdir())
    new_keys = {path.name: path.read_bytes() for path in directory.keys.iterdir()}
    assert new_keys.keys() == keys.keys()
    assert not set(new_keys.values()) & set(keys.values()), "what is left of the earlier start cannot join"
    assert json.loads(directory.experiment.read_text())["resume_step"] == 4
    assert load_plan(directory.plan) == run.plan
    status = read_status(directory.status)
    assert status is not None
    assert (status.state, status.step, status.steps) == ("starting", 4, 9)
    failed, again = read_events(directory.events)[-2:]
    assert (failed.event, failed.step) == ("failed", 5)
    assert failed.message.startswith("master was killed by signal 9 (SIGKILL)")
    assert (again.event, again.step, again.message) == ("restarted", 4, "2 workers, from checkpoints/step-4")


def test_a_damaged_one_is_passed_over_and_said(run: Run, directory: RunDirectory) -> None:
    damage(directory.checkpoints / "step-4")
    assert carry_out(run, directory, [1, 0], max_restarts=1) == [2]
    message = read_events(directory.events)[-1].message
    assert message.startswith("2 workers, from checkpoints/step-2; step 4 is not good: checkpoint file ")
    assert "has other content than when it was saved" in message
    names = sorted(path.name for path in directory.checkpoints.iterdir())
    assert names == ["damaged-step-4", "latest", "step-2"], "the later one is put aside, and not lost"
    assert (directory.checkpoints / "latest").readlink() == Path("step-2")
    assert [json.loads(line)["step"] for line in directory.metrics.read_text().splitlines()] == [1, 2]


def test_a_damaged_line_is_told_and_goes(run: Run, directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (directory.metrics, directory.evaluations):
        lines = path.read_bytes().split(b"\n")
        path.write_bytes(b"\n".join([lines[0], b"\xff" + lines[1], *lines[2:]]))
    directory.events.write_bytes(b'{"time_s":')
    assert carry_out(run, directory, [-9, 0], max_restarts=1) == [4]
    assert [json.loads(line)["step"] for line in directory.metrics.read_text().splitlines()] == [1, 3, 4]
    assert directory.evaluations.read_text() == '{"step":0}\n'
    told = [event.message for event in read_events(directory.events) if event.event == "damaged"]
    assert told == capsys.readouterr().err.splitlines()
    assert [message.partition(" has lines that cannot be read and are left out: line 2: ")[0] for message in told] == [
        str(directory.metrics),
        str(directory.evaluations),
    ]


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b'{"state":"dancing","step":0,"steps":1}'])
def test_a_damaged_status_ends_nothing(content: bytes, run: Run, directory: RunDirectory) -> None:
    directory.status.write_bytes(content)
    assert carry_out(run, directory, [1, 0], max_restarts=1) == [4]
    status = read_status(directory.status)
    assert status is not None
    assert status.state == "starting"


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, r"No space left on device\): make room there"),
        (errno.EROFS, r"Read-only file system\): mount it writable"),
    ],
)
def test_a_directory_that_cannot_be_written_is_said_and_nothing_is_left(
    number: int, reason: str, run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    ActivityWriter(directory.activity(MASTER)).set("the master's last word")
    monkeypatch.setattr(files.os, "fsync", refuse)
    monkeypatch.setattr("realhf.lifecycle.controller.write_launched", lambda *_: None)  # when there was room yet
    match = (
        r"master ended with exit code 1; last activity: the master's last word(.|\n)*the run cannot be restarted: "
        rf".*launcher/start cannot be written \({reason}, then go on with --resume"
    )
    with pytest.raises(RunError, match=match):
        carry_out(run, directory, [1], max_restarts=3)
    assert last_step(directory) == 5
    assert not list(directory.path.rglob("*.part"))


def test_an_end_that_nobody_can_read_is_a_failure(run: Run, directory: RunDirectory) -> None:
    """Whether the run has ended, or is between two plans, is what the status says."""
    directory.status.write_bytes(b"")
    with pytest.raises(RunError, match=r"the processes have ended, but .*status.json is damaged \(.*\); remove it"):
        carry_out(run, directory, [0], max_restarts=0)


def test_without_a_checkpoint_it_starts_from_the_beginning(run: Run, directory: RunDirectory) -> None:
    for step in (2, 4):
        damage(directory.checkpoints / f"step-{step}")
    assert carry_out(run, directory, [1, 0], max_restarts=1) == [0]
    assert directory.metrics.read_text() == ""
    names = sorted(path.name for path in directory.checkpoints.iterdir())
    assert names == ["damaged-step-2", "damaged-step-4"]


def test_a_run_whose_data_has_changed_is_not_restarted(
    run: Run, directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    run.experiment.source.dataset = PromptDataset(path=str(rows), tokenizer=str(tmp_path))
    monkeypatch.setattr(ResolvedExperiment, "graph", SimpleNamespace(calls={}, models={}))
    monkeypatch.setattr(ResolvedExperiment, "setups", {})
    keep_inputs(run, directory)
    assert carry_out(run, directory, [1, 0], max_restarts=3) == [4]
    rows.write_text('{"prompt": "one"}\n')
    match = (
        r"(?s)^master ended with exit code 1.*the run cannot be restarted: the data set of the run .*rows\.jsonl has "
    )
    with pytest.raises(RunError, match=match):
        carry_out(run, directory, [1], max_restarts=3)
    with pytest.raises(UserError, match=r"the data set of the run .*rows\.jsonl has other content"):
        continued(run, run, directory)  # as where SLURM starts the job once more


def test_restarts_are_counted(run: Run, directory: RunDirectory) -> None:
    with pytest.raises(RunError, match="master ended with exit code 3"):
        carry_out(run, directory, [1, 2, 3], max_restarts=2)
    kinds = [event.event for event in read_events(directory.events)]
    assert kinds == ["failed", "restarted", "failed", "restarted"]


def test_without_recovery_the_first_failure_ends_it(run: Run, directory: RunDirectory) -> None:
    with pytest.raises(RunError, match="master ended with exit code 1"):
        carry_out(run, directory, [1], max_restarts=0)
    assert not read_events(directory.events)
    assert last_step(directory) == 5, "everything is left for looking at"


def test_events_survive_a_cut_off_line_and_a_disk_that_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    note(path, "checkpoint", 2)
    with path.open("a") as file:
        file.write('{"time_s":')
    assert [(event.event, event.step) for event in read_events(path)] == [("checkpoint", 2)]
    note(path, "checkpoint", 4)
    assert [event.step for event in read_events(path)] == [2, 4], "the next one is a line of its own"
    note(tmp_path, "failed", 3, "why")  # a directory cannot be written either
    assert "not noted" in capsys.readouterr().err


DEAD = (-9, "worker-1")
DONE = (0, MASTER)
ELASTIC = RecoveryRequest(recover="auto", max_restarts=5, min_workers=1)


def restarts(directory: RunDirectory) -> list[str]:
    return [f"{event.event}: {event.message}" for event in read_events(directory.events) if event.event != "failed"]


@pytest.mark.usefixtures("plans")
def test_a_worker_that_dies_twice_at_one_place_is_done_without(run: Run, directory: RunDirectory) -> None:
    launcher = FakeLauncher(directory, [DEAD, DEAD, DONE], devices="ab")
    first_start, *reasons = go_on(run, launcher, ELASTIC)
    assert first_start is None
    assert [reason and reason.partition(" (")[0] for reason in reasons] == ["worker-1 was killed by signal 9"] * 2
    assert launcher.starts == [(0, "ab"), (4, "ab"), (4, "a")]
    saved = json.loads(directory.experiment.read_text())
    assert (saved["num_workers"], saved["devices_per_node"], saved["avoided"]) == (1, 1, ["b"])
    assert load_plan(directory.plan).num_devices == 1
    assert load_plan(directory.path / "plan-1.json") == run.plan
    assert sorted(path.name for path in directory.keys.glob("*.secret")) == ["master.secret", "worker-0.secret"]
    first, changed, second = restarts(directory)
    assert first == "restarted: 2 workers, from checkpoints/step-4"
    plans = r"plan \w{12} instead of \w{12}, 0\.25 s a step predicted"
    assert re.fullmatch(rf"replanned: 1 worker instead of 2; without b; {plans}", changed)
    assert second == "restarted: 1 worker, from checkpoints/step-4"


def test_other_workers_in_turn_are_no_reason(run: Run, directory: RunDirectory) -> None:
    launcher = FakeLauncher(directory, [DEAD, (-9, "worker-0"), DEAD, DONE], devices="ab")
    go_on(run, launcher, ELASTIC)
    assert [devices for _, devices in launcher.starts] == ["ab"] * 4


def test_where_there_are_other_places_the_run_keeps_its_size(run: Run, directory: RunDirectory) -> None:
    launcher = FakeLauncher(directory, [DEAD, DEAD, DONE], devices="abc")
    go_on(run, launcher, ELASTIC)
    assert [devices for _, devices in launcher.starts] == ["ab", "ab", "ac"]
    assert restarts(directory)[1] == "replanned: without b"
    assert load_plan(directory.plan) == run.plan


@pytest.mark.usefixtures("plans")
def test_places_that_are_gone_are_not_tried_again(run: Run, directory: RunDirectory) -> None:
    launcher = FakeLauncher(directory, [(-9, MASTER), DONE], devices="ab", gone=frozenset("a"))
    go_on(run, launcher, ELASTIC)
    assert [devices for _, devices in launcher.starts] == ["ab", "b"]


def test_without_min_workers_nothing_changes(run: Run, directory: RunDirectory) -> None:
    launcher = FakeLauncher(directory, [DEAD, DEAD, DONE], devices="ab", gone=frozenset("a"))
    go_on(run, launcher, RecoveryRequest(recover="auto", max_restarts=5))
    assert [devices for _, devices in launcher.starts] == ["ab", "ab", "ab"]


@pytest.mark.parametrize(
    ("least", "message"),
    [
        (
            2,
            r"room for 1 workers, fewer than --min-workers 2: without b; repair these, and .* --resume --num-workers 2",
        ),
        (1, r"no plan for the 1 workers that there is room for: nothing fits on 1"),
    ],
)
def test_too_few_workers_end_the_run(
    least: int, message: str, run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_plan(run: Run, request: RunRequest, num_workers: int, watch: Any) -> tuple[ExecutionPlan, None]:
        raise UserError(f"nothing fits on {num_workers}")

    monkeypatch.setattr(shrink, "plan_for_fewer", no_plan)
    launcher = FakeLauncher(directory, [DEAD, DEAD], devices="ab")
    with pytest.raises(RunError, match=r"(?s)^worker-1 was killed by signal 9 .*" + message):
        go_on(run, launcher, replace(ELASTIC, min_workers=least))


def silent_master(directory: RunDirectory, run: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A launcher whose master writes one sign of life and no more."""

    class Silent(FakeLauncher):
        def start(self, job: Job) -> None:
            status = json.loads(directory.status.read_text())
            directory.status.write_text(json.dumps(status | {"updated": status["updated"] + 1}))

    monkeypatch.setattr(supervisor, "MASTER_SILENCE_S", 0.1)
    return Silent(directory, [])


def test_a_master_that_hangs_is_given_up(run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = silent_master(directory, run, monkeypatch)
    spec = ProcessSpec(name=MASTER, argv=("true",))
    job = Job(directory=directory, processes=(spec,), workers_per_node=1)
    with pytest.raises(RunError, match=r"^the master has been silent for \d+ s: it hangs, or its node does; log: "):
        supervisor.supervise(launcher, job, lambda: None)


def test_an_event_says_when(tmp_path: Path) -> None:
    note(tmp_path / "events.jsonl", "started", 0, "two workers")
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event == Event(time_s=event.time_s, event="started", step=0, message="two workers")
    assert event.time_s > 1e9
