"""Where a run stands: numbers by hand, of runs that go on, have ended or were lost."""

import json
import os
import socket
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from realhf import cli
from realhf.report import run_status
from realhf.report.run_status import METRICS_TAIL_BYTES, Speed, read_run_status
from realhf.rundir.flight_recorder import ActivityWriter
from realhf.rundir.paths import RunDirectory
from tests.unit.report.run_directories import PLAN, RATIONALE, metrics_line, write_run

NOW_S = 1e9 + 100
FORMAT = {"format": "run-status/1"}
MIB = 2**20


def line(step: int, end_s: float) -> dict[str, Any]:
    """A step of 1000 tokens a step's number that ended `end_s` after 1e9."""
    calls = {"actor_generate": {"start": 1e9 + end_s - 1, "end": 1e9 + end_s, "seconds": 1.0, "predicted_s": None}}
    return metrics_line(step) | {"calls": calls}


def running(path: Path, updated_s: float = 1e9 + 99.5) -> RunDirectory:
    """Steps 1 and 2, a failure, and from the checkpoint after step 2 on steps 3 to 5 of 25."""
    write_run(
        path,
        plan=PLAN | {"rationale": RATIONALE},
        metrics=[line(1, 10), line(2, 20), line(3, 80), line(4, 82), line(5, 86)],
        happened=[
            {"time_s": 1e9, "event": "started", "step": 0},
            {"time_s": 1e9 + 21, "event": "checkpoint", "step": 2},
            {"time_s": 1e9 + 22, "event": "uniform_rewards", "step": 2, "message": "the rewards teach nothing"},
            {"time_s": 1e9 + 40, "event": "failed", "step": 3, "message": "worker-1 was killed\n  | its log"},
            {"time_s": 1e9 + 41, "event": "restarted", "step": 2},
            {"time_s": 1e9 + 87, "event": "checkpoint", "step": 5},
        ],
    )
    status = {"state": "running", "step": 5, "steps": 25, "updated": updated_s, **FORMAT}
    (path / "status.json").write_bytes(msgspec.json.encode(status))
    for step in (2, 5):
        (path / f"checkpoints/step-{step}").mkdir(parents=True)
    (path / "checkpoints/.step-6.part").mkdir()
    return RunDirectory(path)


def note_activity(directory: RunDirectory, process: str, text: str, since_s: float) -> None:
    path = directory.activity(process)
    path.parent.mkdir(exist_ok=True)
    ActivityWriter(path).set(text)
    data = bytearray(path.read_bytes())
    struct.pack_into("<d", data, 8 + data[0] * 252, since_s)  # the clock is not the test's
    path.write_bytes(data)


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    directory = running(tmp_path / "run")
    note_activity(directory, "master", "steps 4 to 6", 1e9 + 80)
    note_activity(directory, "worker-1", "actor_generate of step 6: compute", 1e9 + 98)
    status = read_run_status(directory, NOW_S)
    assert (status.state, status.experiment, status.step, status.steps) == ("running", "PPOExperiment", 5, 25)
    # Steps 4 and 5, 4000 and 5000 tokens, took the six seconds since the end of step 3: the restart does not count.
    assert status.speed == Speed(step_s=3.0, tokens_per_s=1500.0)
    assert status.remaining_s == 60.0
    assert status.silent_s == pytest.approx(0.5)
    assert (status.checkpoints, status.checkpoint_age_s) == ((2, 5), 13.0)
    assert (status.restarts, status.last_failure) == (1, "worker-1 was killed")
    assert status.uniform_rewards == "the rewards teach nothing"
    master, first, second = status.processes
    assert (master.name, master.activity, master.since_s, master.peak_bytes) == ("master", "steps 4 to 6", 20.0, None)
    assert (first.name, first.activity, first.since_s) == ("worker-0", None, None)
    assert (second.activity, second.since_s) == ("actor_generate of step 6: compute", 2.0)
    assert (first.peak_bytes, second.peak_bytes) == (400 * MIB, 205 * MIB)
    assert (second.predicted_bytes, status.memory_limit_bytes) == (300 * MIB, 800 * MIB)


def test_where_the_status_is_damaged_metrics_and_experiment_tell_the_steps(tmp_path: Path) -> None:
    directory = running(tmp_path / "run")
    expected = max(json.loads(line)["step"] for line in directory.metrics.read_text().splitlines())
    experiment = json.loads(directory.experiment.read_bytes())
    directory.experiment.write_text(json.dumps(experiment | {"values": {"steps": 40}}))
    directory.status.write_bytes(b"")
    status = read_run_status(directory, NOW_S)
    assert (status.state, status.step, status.steps) == ("unknown", expected, 40)
    directory.experiment.write_text(json.dumps(experiment | {"values": {"steps": "x"}}))
    assert read_run_status(directory, NOW_S).steps == 0


def test_a_run_of_which_nothing_is_heard_any_more_is_lost(tmp_path: Path) -> None:
    status = read_run_status(running(tmp_path / "run", updated_s=1e9 + 30), NOW_S)
    assert (status.state, status.silent_s, status.remaining_s) == ("lost", 70.0, None)


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    status = read_run_status(RunDirectory(write_run(tmp_path / "run", state=None)), NOW_S)
    assert (status.state, status.speed, status.checkpoints, status.restarts) == ("not started", None, (), 0)
    assert [process.activity for process in status.processes] == [None] * 3


def test_a_finished_run_is_finished_and_its_processes_do_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = running(tmp_path / "run")
    note_activity(directory, "worker-1", "waiting for the first request", 1e9 + 98)
    directory.status.write_bytes(
        msgspec.json.encode({"state": "done", "step": 25, "steps": 25, "updated": 1e9 + 90, **FORMAT})
    )
    status = read_run_status(directory, NOW_S + 1e6)
    assert (status.state, status.silent_s, status.remaining_s) == ("finished", None, None)
    assert [(process.activity, process.since_s) for process in status.processes] == [(None, None)] * 3
    assert cli.main(["status", str(directory.path)]) == 0
    text = capsys.readouterr().out
    assert "run: finished, PPOExperiment, 2 workers" in text.replace("\n", " ")
    for gone in ("is doing", "did last", "left", "waiting for", "sign of life"):
        assert gone not in text
    assert "205 MiB" in text
    assert cli.main(["status", str(directory.path), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["state"] == "finished"


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_a_run_that_broke_says_what_its_processes_did_last(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = running(tmp_path / "run")
    note_activity(directory, "worker-1", "actor_generate of step 6: compute", 1e9 + 98)
    acting = "\x9b31m\u202e\x1b[2J"  # a colour, the direction of what follows, an empty screen
    message = "saved: the checkpoint after step 5"
    directory.status.write_bytes(
        msgspec.json.encode(
            {"state": state, "step": 5, "steps": 25, "updated": 1e9 + 90, "message": message + acting, **FORMAT}
        )
    )
    status = read_run_status(directory, NOW_S + 1e6)
    assert (status.state, status.silent_s, status.remaining_s) == (state, None, None)
    assert cli.main(["status", str(directory.path), "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert "\x1b" not in printed
    assert msgspec.json.decode(printed)["message"] == message + acting
    assert cli.main(["status", str(directory.path)]) == 0
    text = capsys.readouterr().out
    assert not {"\x9b", "\u202e", "\x1b"} & set(text)
    for part in (f": {state}, ", "did last", "actor_generate of step 6: compute", message):
        assert part in text


@pytest.mark.parametrize("state", ["starting", "running", "replan"])
@pytest.mark.parametrize(
    ("holder", "is_job", "is_lost"),
    [
        ("process {gone} on {host}", False, True),
        ("process {gone} on {host}", True, False),  # a job lives on without the process that submitted it
        ("process {gone} on another", False, False),
        ("process {here} on {host}", False, False),
        ("", False, False),
    ],
)
def test_a_run_whose_launching_process_is_gone_is_lost_whatever_it_was_at(
    state: str, holder: str, is_job: bool, is_lost: bool, tmp_path: Path
) -> None:
    directory = running(tmp_path / "run")
    status = {"state": state, "step": 0, "steps": 25, "updated": NOW_S - 30, **FORMAT}
    directory.status.write_bytes(msgspec.json.encode(status))
    directory.launcher.mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    text = holder.format(gone=ended.pid, here=os.getpid(), host=socket.gethostname())
    (directory.launcher / "launcher.lock").write_text(text)
    if is_job:
        (directory.launcher / "job.sbatch").touch()
    assert read_run_status(directory, NOW_S).state == ("lost" if is_lost else state)


def test_the_speed_after_one_step_is_that_step_s(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", state="running", metrics=[line(1, 10)])
    assert read_run_status(RunDirectory(run), NOW_S).speed == Speed(step_s=2.0, tokens_per_s=500.0)


def test_of_a_long_run_the_last_steps_are_read(tmp_path: Path) -> None:
    lines = [line(step, 2.0 * step) for step in range(1, 2000)]
    run = write_run(tmp_path / "run", metrics=lines)
    assert (run / "metrics.jsonl").stat().st_size < 2**20
    (run / "metrics.jsonl").write_text("no JSON here\n" + "x" * 2**20 + "\n" + (run / "metrics.jsonl").read_text())
    speed = read_run_status(RunDirectory(run), NOW_S).speed
    assert speed is not None
    assert speed.step_s == pytest.approx(2.0)


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = running(tmp_path / "run")
    note_activity(directory, "worker-1", "actor_generate of step 6: compute", 1e9 + 98)
    assert cli.main(["status", str(directory.path)]) == 0
    text = capsys.readouterr().out
    verify = "realhf verify: any of steps 1 to 5, from the beginning, those after step 2 from a checkpoint"
    for part in ("step 5 of 25; 3 s a step, 1,500 tokens/s", "the newest after step 5", verify, "worker-1 was killed"):
        assert part in text
    for cell in ("actor_generate of step 6: compute", "205 MiB", "300 MiB", "limit 800 MiB"):
        assert cell in text
    assert "go on from the checkpoint after step 5 with --resume" in text  # it is long ago

    assert cli.main(["status", str(directory.path), "--json"]) == 0
    read = msgspec.json.decode(capsys.readouterr().out)
    assert (read["state"], read["step"], read["speed"]) == ("lost", 5, {"step_s": 3.0, "tokens_per_s": 1500.0})
    assert read["processes"][2]["activity"] == "actor_generate of step 6: compute"


def test_a_directory_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "is no run directory: it has no plan.json; give the --run-dir of a run" in capsys.readouterr().err


def test_what_a_run_has_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The means of the first and of the last ten of 30 steps; rewards rise by 0.01 a step."""
    metrics = [line(step, 2.0 * step) | {"reward_mean": step / 100, "kl": 0.5} for step in range(1, 31)]
    metrics[0] |= {"kl": None}
    evaluations = [{"step": step, "math": step / 10, "format": 1.0} for step in range(0, 31, 3)]
    run = write_run(tmp_path / "run", metrics=metrics, evaluations=evaluations)
    status = read_run_status(RunDirectory(run), NOW_S)
    assert status.trends is not None
    assert (status.trends.first_steps, status.trends.last_steps) == ((1, 10), (21, 30))
    reward, kl, speed = status.trends.statistics
    assert (reward.name, kl.name, speed.name) == ("reward_mean", "kl", "tokens_per_s")
    assert (reward.first, reward.last) == (pytest.approx(0.055), pytest.approx(0.255))
    assert len(reward.parts) == 24
    assert list(reward.parts) == sorted(reward.parts, key=float)
    assert (kl.first, kl.last, kl.parts[0]) == (0.5, 0.5, 0.5)
    assert [each["step"] for each in status.evaluations] == [0, 18, 21, 24, 27, 30]
    assert cli.main(["status", str(run)]) == 0
    text = capsys.readouterr().out
    for row in (
        "training steps 1-10 steps 21-30 over the run",
        "reward_mean 0.055 0.255 ▁",
        "kl 0.5 0.5 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁",
        "evaluation after step 0 18 21 24 27 30",
        "math 0 1.8 2.1 2.4 2.7 3",
    ):
        assert row in " ".join(text.split())


@pytest.mark.parametrize(("steps", "first", "last"), [(1, (1, 1), (1, 1)), (2, (1, 1), (2, 2)), (5, (1, 2), (4, 5))])
def test_the_first_and_the_last_steps_of_a_short_run_do_not_overlap(
    steps: int, first: tuple[int, int], last: tuple[int, int], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", metrics=[line(step, 2.0 * step) for step in range(1, steps + 1)])
    trends = read_run_status(RunDirectory(run), NOW_S).trends
    assert trends is not None
    assert (trends.first_steps, trends.last_steps) == (first, last)
    assert cli.main(["status", str(run)]) == 0


def test_the_course_of_a_long_run_is_read_from_its_beginning_on(tmp_path: Path) -> None:
    lines = [line(step, 2.0 * step) | {"kl": float(step), "padding": "x" * 1000} for step in range(1, 4001)]
    run = write_run(tmp_path / "run", metrics=lines)
    assert (run / "metrics.jsonl").stat().st_size > 4 * METRICS_TAIL_BYTES
    trends = read_run_status(RunDirectory(run), NOW_S).trends
    assert trends is not None
    assert (trends.first_steps, trends.last_steps) == ((1, 10), (3991, 4000))
    kl = trends.statistics[0]
    assert (kl.first, kl.last) == (5.5, 3995.5)
    assert None not in kl.parts
    assert kl.parts[11] == pytest.approx(1917, rel=0.1)  # between steps 1834 and 2000


def test_now_is_by_the_clock_of_a_master_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory.create(tmp_path / "run")

    def says(updated: float, state: str = "running") -> None:
        status = {"state": state, "step": 1, "steps": 9, "updated": updated, "format": "run-status/1"}
        directory.status.write_bytes(msgspec.json.encode(status))

    clock = SimpleNamespace(now_s=5000.0, written=[1001.0])

    def sleep(seconds: float) -> None:
        clock.now_s += seconds
        if clock.written:
            says(clock.written.pop())

    fake = SimpleNamespace(time=lambda: clock.now_s, monotonic=lambda: clock.now_s, sleep=sleep)
    monkeypatch.setattr(run_status, "time", fake)
    monkeypatch.setattr(run_status, "LOOKED_AT_S", 2.5)
    says(1000.0)
    assert run_status.run_now_s(directory) == 1001.0
    assert run_status.run_now_s(directory) == clock.now_s > 5002.0  # nothing is written any more
    says(clock.now_s - 1)
    assert run_status.run_now_s(directory) == clock.now_s
    says(1000.0, "failed")
    before = clock.now_s
    assert run_status.run_now_s(directory) == before == clock.now_s
