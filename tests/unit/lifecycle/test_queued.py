"""A run that its job plans: what is left for the job, and what the job makes of it, on stand-ins for its devices."""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realhf.base.errors import RunError, UserError
from realhf.cli.in_job import main, plan_here
from realhf.data.inputs import check_inputs
from realhf.dataflow.plan import load_plan
from realhf.launch.launcher import Exit, Launcher
from realhf.launch.process import Job
from realhf.lifecycle.controller import Listener
from realhf.lifecycle.new import new_run
from realhf.lifecycle.queued import QueuedRun, queued_run
from realhf.lifecycle.request import RunRequest
from realhf.lifecycle.unplanned import note_unplanned, plans_in_job
from realhf.planning.here import hardware_here
from realhf.planning.model.descriptions import leave_description
from realhf.rundir.events import read_events
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import load_run
from realhf.rundir.starts import current_start, is_to_be_planned
from realhf.rundir.status import EndRequest, RunState, Status, known_status, request_end, write_status
from tests.unit.lifecycle.requests import request_of
from tests.unit.machine.nvml import H100, stand_in

WORDS = ("experiments/sft.py", "--steps", "2", "--batch-size", "8", "--no-evaluate", "--evaluations", "100")
SLURM = ("--launcher", "slurm", "--nodes", "2", "--gpus-per-node", "2", "--cpus-per-worker", "1", "--ignore-runs")


@pytest.fixture(autouse=True)
def profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without GPUs; descriptions and profiles lie in the folder that is returned."""
    stand_in(monkeypatch, tmp_path, [])
    for module in ("descriptions", "profile"):
        monkeypatch.setattr(f"realhf.planning.model.{module}.profiles_root", lambda: tmp_path / "profiles")
    return tmp_path / "profiles"


def asked(tmp_path: Path, *words: str) -> RunRequest:
    return request_of(*WORDS, "--data-dir", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run"), *SLURM, *words)


def left(request: RunRequest, after: RunDirectory | None = None) -> QueuedRun:
    with contextlib.ExitStack() as held:
        return queued_run(request, None, held, after)


def test_the_plan_is_that_of_a_login_node_that_knows_the_hardware(
    monkeypatch: pytest.MonkeyPatch, profiles: Path, tmp_path: Path
) -> None:
    request = asked(tmp_path)
    assert plans_in_job(request)
    queued = left(request)
    assert is_to_be_planned(queued.directory)
    assert [process.name for process in queued.job().processes] == ["master", *(f"worker-{i}" for i in range(4))]
    before = current_start(queued.directory)

    stand_in(monkeypatch, tmp_path, [H100, H100])
    assert plan_here(queued.directory)
    run = load_run(queued.directory)
    assert run.spec.hardware is not None
    assert {"data set", "tokenizer of the data set"} <= json.loads(queued.directory.inputs.read_text())["files"].keys()
    assert run.spec.hardware.name == "nvidia-h100-80gb-hbm3"
    assert not is_to_be_planned(queued.directory)
    assert before != current_start(queued.directory) == queued.job().start_id
    assert sorted(path.name for path in queued.directory.keys.iterdir() if "secret" in path.name)[0] == "master.secret"
    leave_description(hardware_here(), profiles)

    stand_in(monkeypatch, tmp_path, [])
    now = asked(tmp_path)  # a description is known by now
    assert not plans_in_job(now)
    assert new_run(now).plan.calls == load_plan(queued.directory.plan).calls


def test_hardware_that_is_given_is_planned_for_at_once_unless_the_job_is_to(tmp_path: Path) -> None:
    assert not plans_in_job(asked(tmp_path, "--hardware", "h100"))
    assert not plans_in_job(asked(tmp_path, "--cpu-only"))
    assert plans_in_job(asked(tmp_path, "--hardware", "h100", "--plan-in-job"))


def test_a_run_that_is_planned_now_notes_its_inputs_now(tmp_path: Path) -> None:
    """Which the master compares when the job begins."""
    words = ("--nodes", "1", "--gpus-per-node", "1", "--rule", "colocate")
    request = asked(tmp_path, "--cpu-only", *words)
    with contextlib.ExitStack() as held:
        queued = queued_run(request, new_run(request), held)
    check_inputs(load_run(queued.directory), queued.directory)
    (tmp_path / "data/sft.jsonl").write_text((tmp_path / "data/sft.jsonl").read_text().partition("\n")[2])
    with pytest.raises(UserError, match=r"sft\.jsonl has other content"):
        check_inputs(load_run(queued.directory), queued.directory)


def test_what_the_job_finds_wrong_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = left(asked(tmp_path))  # and there is no GPU on its node either
    monkeypatch.setattr("sys.argv", ["in_job", str(queued.directory.path)])
    assert main() == 2
    status = known_status(queued.directory.status)
    assert status is not None
    assert (status.state, status.steps, status.returncode) == ("failed", 2, 2)
    assert "this machine has no GPU and no profile of any" in status.message
    assert is_to_be_planned(queued.directory)


@pytest.mark.parametrize(
    ("state", "code", "message"),
    [
        ("failed", 17, "failed"),
        ("stopped", 130, "was stopped"),
        ("running", 1, "has not ended well: it is running"),
        (None, 1, "has not ended well: it is gone"),
    ],
)
def test_a_stage_waits_for_a_good_end_of_the_one_before(
    state: RunState | None, code: int, message: str, tmp_path: Path
) -> None:
    before = RunDirectory.create(tmp_path / "before")
    if state is not None:
        write_status(before.status, Status(state=state, step=1, steps=2, returncode=17))
    queued = left(asked(tmp_path, "--cpu-only"), before)
    with pytest.raises(RunError, match=f"not started, since the stage before, {before.path}, {message}$") as raised:
        plan_here(queued.directory)
    assert raised.value.returncode == code
    write_status(before.status, Status(state="done", step=2, steps=2))
    assert plan_here(queued.directory)


def test_a_run_that_was_stopped_meanwhile_does_not_begin(tmp_path: Path) -> None:
    queued = left(asked(tmp_path, "--cpu-only"))
    request_end(queued.directory.stop, EndRequest(reason="asked"))
    assert not plan_here(queued.directory)
    status = known_status(queued.directory.status)
    assert status is not None
    assert status.state == "stopped"
    request_end(queued.directory.stop, EndRequest(reason="notice"))
    with pytest.raises(RunError, match="before its run had begun; give a longer --time-limit"):
        plan_here(queued.directory)


def test_a_request_is_read_with_care(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = left(asked(tmp_path, "--cpu-only"))
    content = json.loads(queued.directory.request.read_text())
    assert content["working_directory"] == os.getcwd()
    queued.directory.request.write_text(json.dumps(content | {"command": "rm"}))
    with pytest.raises(UserError, match=r"request\.json is damaged \(.*command"):
        plan_here(queued.directory)
    queued.directory.request.write_text(json.dumps(content | {"working_directory": "/nowhere"}))
    with pytest.raises(UserError, match="the working directory /nowhere of the command cannot be entered here"):
        plan_here(queued.directory)


def test_a_size_that_is_not_known_leaves_nothing(tmp_path: Path) -> None:
    words = (*WORDS, "--launcher", "slurm", "--run-dir", str(tmp_path / "run"))
    with pytest.raises(UserError, match="nothing here tells the devices of the job's nodes: give --gpus-per-node"):
        left(request_of(*words))
    assert not (tmp_path / "run").exists()


class Watched(Launcher):
    """A queue whose job does `acts` at the second look, and whose processes end so at the fourth."""

    is_remote = queues = True
    acts: Callable[[RunDirectory], Any]
    returncode = 0

    def __init__(self, options: Any) -> None:
        self.looks = 0

    def adopt(self, job: Job, job_id: str) -> None:
        self.job, self.id = job, job_id

    def job_id(self) -> str:
        return self.id

    def poll(self) -> list[Exit]:
        self.looks += 1
        if self.looks == 2:
            type(self).acts(self.job.directory)
        ends = self.looks == 4
        return [Exit(name=one.name, returncode=self.returncode) for one in self.job.processes] if ends else []

    def stop(self, *, grace_s: float = 5.0) -> None: ...


class Told(Listener):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def starting(self, run: Any, directory: RunDirectory, reason: str | None) -> None:
        self.said.append(f"starting {run.spec.num_workers} workers")


def watched(tmp_path: Path, acts: Callable[[RunDirectory], Any], code: int = 0) -> tuple[QueuedRun, Told]:
    launcher = type("Watched", (Watched,), {"acts": acts, "returncode": code})
    queued = left(asked(tmp_path, "--cpu-only"))
    queued = QueuedRun(replace(queued.request, launcher=launcher), queued.directory, "17")
    told = Told()
    queued.carry_out(told)
    return queued, told


def test_a_job_is_watched_from_the_queue_to_the_end_of_the_run_that_it_plans(tmp_path: Path) -> None:
    queued, told = watched(tmp_path, plan_here)
    assert [text for text in told.said if "starting" in text] == ["starting 4 workers"]
    assert told.said[0].startswith("planned for 2 x 2 cpu")
    assert [event.event for event in read_events(queued.directory.events)] == ["started", "ended"]
    assert (queued.directory.path / "report.html").exists()


def test_why_a_run_was_not_planned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the data is gone"):
        watched(tmp_path, lambda directory: note_unplanned(directory, "the data is gone", 2), code=1)
    assert not (tmp_path / "run").exists(), "the corrected command may name the same directory"
    with pytest.raises(RunError, match="it broke") as raised:
        watched(tmp_path, lambda directory: note_unplanned(directory, "it broke", 17), code=1)
    assert raised.value.returncode == 17
    status = known_status(RunDirectory(tmp_path / "run").status)
    assert status is not None
    assert (status.state, status.message, status.steps, status.returncode) == ("failed", "it broke", 2, 17)
