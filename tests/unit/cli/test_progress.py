"""Following a file that is being written; lines for people where there is no terminal."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from realhf.cli.output import Output
from realhf.cli.progress import Progress
from realhf.dataflow.plan import ExecutionPlan
from realhf.rundir.events import note
from realhf.rundir.flight_recorder import ActivityWriter
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run, RunSpec


def line(step: int, end_s: float, **stats: float) -> dict[str, Any]:
    calls = {"a": {"start": end_s - 1, "end": end_s, "seconds": 1.0, "predicted_s": 0.5}}
    return {"step": step, "time_s": 1.0, "tokens": 10, "tokens_per_s": 10.0, "calls": calls, **stats}


def test_a_line_now_and_then_and_one_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    with Progress() as progress:
        progress.watched("")
        progress.starting(run_of(), directory, None)
        progress.watched("")
        lines = [
            line(1, 100.0, loss=0.5, reward_mean=0.25, other=1.0),
            line(2, 101.0),
            line(3, 102.5),
            line(4, 103.0, grad_norm=1.0),
        ]
        directory.metrics.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
        directory.evaluations.write_text('{"step":0,"accuracy":0.25}\n')
        note(directory.events, "drift", 4, "a takes 2 times as long")
        note(directory.events, "uniform_rewards", 4, "the rewards teach nothing")
        progress.watched("")
        with directory.metrics.open("a") as file:
            file.write('{"step": 5}\n')
        progress.watched("")
    assert capsys.readouterr().err.splitlines() == [
        f"starting the master and 2 workers; logs in {directory.logs}",
        "evaluation after step 0: accuracy 0.25",
        "step 1 of 4, 1 s a step, about 3.0 s left: reward_mean 0.25  loss 0.5  tokens_per_s 10",
        "step 3 of 4, 1.25 s a step, about 1.2 s left: tokens_per_s 10",
        "step 4 of 4, 1 s a step: grad_norm 1  tokens_per_s 10",
        "the rewards teach nothing",
        f"{directory.metrics} has gained a line that cannot be read and is left out: "
        "Object missing required field `time_s`",
    ]


def run_of(num_workers: int = 2, step: int = 0) -> Run:
    spec = RunSpec(
        experiment_file="", experiment_class="", values={}, working_directory="", num_workers=num_workers,
        devices_per_node=num_workers, resume_step=step,
    )  # fmt: skip
    return Run(spec, SimpleNamespace(steps=4), ExecutionPlan(num_devices=1, calls={}))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_start_tells_its_phases_until_its_first_step_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, clock = RunDirectory.create(tmp_path / "run"), Clock()
    with Progress(clock=clock) as progress:

        def at(seconds: float) -> list[str]:
            clock.now_s = 1000.0 + seconds
            progress.watched("")
            return capsys.readouterr().err.splitlines()

        clock.now_s = 1000.0
        progress.starting(run_of(), directory, None)
        assert at(0) == [f"starting the master and 2 workers; logs in {directory.logs}"]
        assert at(59) == []
        assert at(61) == ["after 1 min 1 s: the master has not begun yet"]
        master, worker = (ActivityWriter(directory.activity(name)) for name in ("master", "worker-0"))
        master.set("setup: 0 of 2 workers connected, 0 ready")
        assert at(62) == [], "no more than a line in two seconds"
        master.set("setup: 2 of 2 workers connected, 1 ready; worker 1: model actor")
        assert at(64) == ["after 1 min 4 s: 2 of 2 workers connected, 1 ready; worker 1: model actor"]
        assert at(70) == []
        master.set("training, steps 1 to 4")
        worker.set("actor_generate of step 1: compute")
        assert at(71) == ["after 1 min 11 s: training, steps 1 to 4"]
        assert at(130) == []
        reminder = "training, steps 1 to 4; worker 0: actor_generate of step 1: compute"
        assert at(131) == [f"after 2 min 11 s: {reminder}"]
        assert at(250) == [], "twice as long"
        assert at(251) == [f"after 4 min 11 s: {reminder}"]
        directory.metrics.write_bytes(msgspec.json.encode(line(1, 1252.0)) + b"\n")
        assert at(252) == ["step 1 of 4, 1 s a step, about 3.0 s left: tokens_per_s 10"]
        master.set("evaluation after step 1")
        assert at(280) == [], "the steps speak for themselves"
        with directory.metrics.open("ab") as file:
            file.write(msgspec.json.encode(line(4, 1281.0)) + b"\n")
        master.set("waiting for the last checkpoint to be written")
        assert at(281) == ["step 4 of 4, 29 s a step: tokens_per_s 10"]
        assert at(284) == ["after 4 min 44 s: waiting for the last checkpoint to be written"]
        progress.starting(run_of(num_workers=1, step=2), directory, "worker-1 was killed")
        assert at(290) == [
            "worker-1 was killed",
            "the run goes on after step 2",
            f"starting the master and 1 worker; logs in {directory.logs}",
            "after 6.0 s: waiting for the last checkpoint to be written",
        ]


def test_a_long_run_tells_less_often(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, clock = RunDirectory.create(tmp_path / "run"), Clock()
    with Progress(clock=clock) as progress:
        run = run_of()
        run.experiment.steps = 10**6
        progress.starting(run, directory, None)
        with directory.metrics.open("ab") as file:
            for step in range(1, 7201):  # two hours, a step a second
                clock.now_s = float(step)
                file.write(msgspec.json.encode(line(step, 1e9 + step)) + b"\n")
                file.flush()
                progress.watched("")
    told = [int(text.split()[1]) for text in capsys.readouterr().err.splitlines() if text.startswith("step ")]
    assert told[:5] == [1, 3, 5, 7, 9]
    assert len(told) < 400
    assert told[-1] - told[-2] == pytest.approx(120, abs=3)


def screen(tmp_path: Path, width: int, run: Run, **stats: float) -> str:
    """The last line on a terminal after step 19, which has `stats`; that of the start without any."""
    directory = RunDirectory.create(tmp_path / "run")
    console = Output(file=io.StringIO(), force_terminal=True, width=width)
    with Progress() as progress:
        progress._console = console
        progress.starting(run, directory, None)
        ActivityWriter(directory.activity("master")).set("training, steps 19 to 24")
        if stats:
            directory.metrics.write_bytes(msgspec.json.encode(line(19, 100.0, **stats)) + b"\n")
        progress.watched("")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    lines = re.split(r"[\r\n]+", shown.strip())
    assert max(len(each) for each in lines if each.startswith("step ")) <= width
    return lines[-1].rstrip()


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (24, "step 19/24  1 s a step"),
        (20, "step 19/24  1 s a s…"),
        (43, "step 19/24  1 s a step  about 5.0 s left"),
        (60, "step 19/24  1 s a step  about 5.0 s left  reward_mean 0.25"),
        (80, "step 19/24  ━━━━━━━╺━  1 s a step  about 5.0 s left  reward_mean 0.25  kl 0.0125"),
        (
            120,
            "step 19/24  ━━━━━━╺━  1 s a step  about 5.0 s left  reward_mean 0.25  kl 0.0125  actor_loss -0.25  "
            "response_length 123.4",
        ),
    ],
)
def test_a_bar_shows_the_step_first_and_then_what_the_terminal_has_room_for(
    width: int, shown: str, tmp_path: Path
) -> None:
    run = run_of()
    run.experiment.steps = 24
    stats = {"reward_mean": 0.25, "kl": 0.0125, "actor_loss": -0.25, "response_length": 123.4}
    assert screen(tmp_path, width, run, **stats) == shown


def test_the_bar_of_a_resumed_run_begins_at_its_step(tmp_path: Path) -> None:
    run = run_of(step=18)
    run.experiment.steps = 24
    assert screen(tmp_path, 60, run) == "step 18/24  ━━━━━━━━━━━━━━━╺━━━━  training, steps 19 to 24"
