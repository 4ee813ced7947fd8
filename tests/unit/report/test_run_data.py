"""Reading run directories: whole, cut off, damaged."""

import json
from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.cli import main
from realhf.report.run_data import call_times, read_run, read_trace
from realhf.rundir.paths import RunDirectory
from tests.unit.report.run_directories import good_run, step_events, write_run


@pytest.mark.parametrize("cut_off", ["\n]\n", "", ",\n", ',\n{"name":"actor_gen'])
def test_a_trace_may_be_cut_off(tmp_path: Path, cut_off: str) -> None:
    run = write_run(tmp_path / "run", events=step_events(0, 1.0), cut_off=cut_off)
    spans = [event for event in read_trace(run / "trace.json") if event.ph == "X"]
    assert [(span.name, span.tid, span.ts, span.dur) for span in spans] == [
        (event["name"], event["tid"], event["ts"], event["dur"]) for event in step_events(0, 1.0)
    ]


def test_of_a_long_trace_only_the_end_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", events=[event for step in range(20) for event in step_events(step, 2.0 * step)])
    whole = read_trace(run / "trace.json")
    end = read_trace(run / "trace.json", tail_bytes=1000)
    assert 5 < len(end) < 15
    assert end == whole[-len(end) :]


def test_an_empty_trace_and_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert read_trace(path) == []
    path.write_text("")  # opened, nothing flushed yet
    assert read_trace(path) == []
    path.write_text('[\n{"name":1},\n{"name":"a","ph":"X","tid":0}\n]\n')
    damaged: list[str] = []
    assert [event.name for event in read_trace(path, damaged=damaged)] == ["a"]
    (sentence,) = damaged
    assert "trace.json has lines that cannot be read and are left out: line 2: Expected `str`, got `int`" in sentence


def test_times_are_medians(tmp_path: Path) -> None:
    run = read_run(RunDirectory(good_run(tmp_path / "run")))
    times = {time.call: time for time in call_times(run.plan, run.metrics)}
    # Four steps: generate 0.6, 1.2, 1.8, 2.4; actor train_step 1.1, 1.2, 1.3, 1.4.
    assert times["actor_generate"].measured_s == pytest.approx(1.5)
    assert times["actor_generate"].ratio == pytest.approx(3.0)
    assert times["actor_train_step"].measured_s == pytest.approx(1.25)
    assert times["critic_train_step"].predicted_s is None
    assert times["critic_train_step"].ratio is None
    assert run.tokens_per_s == pytest.approx(10_000 / 8)
    assert run.median_step_s == 2.0


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run = read_run(RunDirectory(write_run(tmp_path / "run", state=None)))
    assert (run.status, run.metrics, run.evaluations, run.events) == (None, [], [], [])
    assert run.tokens_per_s is None
    assert [time.measured_s for time in call_times(run.plan, run.metrics)] == [None, None, None]


def test_events_that_a_crash_cut_off_are_left_out(tmp_path: Path) -> None:
    started = {"time_s": 1.0, "event": "started", "step": 0}
    run = write_run(tmp_path / "run", happened=[started, {"event": "failed"}])
    assert [event.event for event in read_run(RunDirectory(run)).happened] == ["started"]


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no run directory: it has no plan.json; give the --run-dir of a run"):
        read_run(RunDirectory(tmp_path))
    with pytest.raises(UserError, match="is no run directory"):
        read_run(RunDirectory(tmp_path / "missing"))


def test_a_run_of_an_earlier_version_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As commit fcc0769 left it: experiment.json and status.json name no format."""
    run = write_run(tmp_path / "run", metrics=[])
    for folder in ("logs", "checkpoints", "keys", "rendezvous", "activity", "launcher"):
        (run / folder).mkdir()
    spec = {"experiment_file": "ppo.py", "experiment_class": "PPO", "values": {}, "working_directory": str(tmp_path)}
    spec |= {"num_workers": 2, "devices_per_node": 2, "record": [], "replay": None, "resume_step": 0}
    (run / "experiment.json").write_text(json.dumps(spec))
    (run / "status.json").write_text('{"state":"done","step":4,"steps":4,"message":"","blamed":[],"updated":1e9}')
    for words in (
        ["status", str(run)],
        ["report", str(run)],
        ["replan", str(run)],
        ["run", "experiments/ppo.py", "--run-dir", str(run), "--resume"],
    ):
        assert main(words) == 2
        assert capsys.readouterr().err == (
            f"error: another version of realhf has written the run directory {run}: of experiment.json, the format is "
            "not named, and this version of realhf reads run/2; use the version that wrote it, or start a new run\n"
        ), words
