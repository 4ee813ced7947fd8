"""A run that goes on with fewer devices, or under a better plan, computes what it would have computed."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from realhf.dataflow.plan import CallPlan, ExecutionPlan, load_plan, save_plan
from tests.e2e.runs import FinishedRun, finished
from tests.e2e.test_resume import JOB, LOSSES, MODELS, TWO, as_after_two_steps

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 18  # so many that drift is seen, and time is left to change the plan
TRAININGS = ("actor_train_step", "critic_train_step")
ONE_OF_TWO = ExecutionPlan(num_devices=2, calls=dict.fromkeys(TWO.calls, CallPlan(devices=(0, 1))))
COMMON = ("--checkpoint-every", "2", "--steps", str(STEPS), "--reference-eta", "0.1", "--dtype", "float64")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """What both runs would have computed, on one of two workers; `fault`, beside it, is its fault file."""
    folder = tmp_path_factory.mktemp("whole")
    save_plan(ONE_OF_TWO, folder / "plan.json")
    return finished(folder / "run", JOB, *COMMON, "--plan", folder / "plan.json", "--fault-file", folder / "fault")


def events(run: FinishedRun) -> list[dict]:
    return [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]


def test_a_run_goes_on_with_fewer_workers(whole: FinishedRun, tmp_path: Path) -> None:
    """Device 1 kills its worker from the fourth step on; then one worker goes on under a plan that is searched."""
    save_plan(TWO, tmp_path / "plan.json")
    (tmp_path / "fault").write_text("device 1 from step 3")
    recovery = ("--recover", "auto", "--min-workers", "1", "--fault-file", tmp_path / "fault", "--evaluations", "1000")
    run = finished(tmp_path / "run", JOB, *COMMON, "--plan", tmp_path / "plan.json", *recovery)

    (change,) = [event for event in events(run) if event["event"] == "replanned"]
    assert change["message"].startswith("1 worker instead of 2; without 1; plan ")
    saved = json.loads((run.path / "experiment.json").read_text())
    assert (saved["num_workers"], saved["avoided"]) == (1, ["1"])
    assert json.loads((run.path / "plan-1.json").read_text())["num_devices"] == 2
    assert [line["num_workers"] for line in run.metrics] == [2, 2, *[1] * (STEPS - 2)]
    first, last = run.metrics[0]["plan"], run.metrics[-1]["plan"]
    assert f"plan {last} instead of {first}" in change["message"]
    assert "1 worker instead of 2" in (run.path / "report.html").read_text()
    check_close(run, whole)


def check_close(run: FinishedRun, whole: FinishedRun) -> None:
    """In float64 within rounding."""
    for expected, got in zip(whole.metrics, run.metrics, strict=True):
        for loss in LOSSES:
            assert got[loss] == pytest.approx(expected[loss], rel=1e-7, abs=1e-13), (expected["step"], loss)
    for model, config in MODELS.items():
        difference = run.parameters(model, config) - whole.parameters(model, config)
        assert torch.linalg.vector_norm(difference) < 1e-9, model


@contextlib.contextmanager
def hurried_search(run_dir: Path) -> Iterator[None]:
    """The search for another plan gets its share of a busy machine, where it would wait until nothing else computes."""
    ended = threading.Event()

    def hurry() -> None:
        while not ended.wait(0.2):
            for command in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):  # it has ended, or a user may not hurry it
                    if {b"replan", bytes(run_dir)} <= set(command.read_bytes().split(b"\0")):
                        for thread in (command.parent / "task").iterdir():
                            os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))

    watch = threading.Thread(target=hurry)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def test_a_run_changes_to_a_better_plan(whole: FinishedRun, tmp_path: Path) -> None:
    """Actor and critic are trained on one device, one after the other, and take thousands of times what falsified
    predictions say: a plan that trains them side by side is far better. The fifteenth step waits for the search, so
    that it is found in time."""
    fault, run_dir = whole.path.parent / "fault", tmp_path / "run"
    as_after_two_steps(whole.path, run_dir)
    fault.write_text(f"step 14 waits for proposal in {run_dir}/events.jsonl")
    plan = load_plan(run_dir / "plan.json")
    falsified = {name: replace(plan.calls[name], predicted_s=1e-5) for name in TRAININGS}
    save_plan(replace(plan, calls=plan.calls | falsified), run_dir / "plan.json")

    with hurried_search(run_dir):
        run = finished(run_dir, JOB, "--resume", "--replan", "switch", "--switch-cost-s", "0")
    found = events(run)
    assert {event["event"] for event in found} >= {"drift", "proposal", "replanned"}
    assert "restarted" not in {event["event"] for event in found}
    (change,) = [event for event in found if event["event"] == "replanned"]
    before, after = run.metrics[0]["plan"], run.metrics[-1]["plan"]
    assert f"plan {after} instead of {before}" in change["message"]
    assert [line["plan"] for line in run.metrics].index(after) == change["step"], "which is where it changed"
    assert change["step"] % 2 == 0
    actor, critic = (load_plan(run.path / "plan.json").calls[name].devices for name in TRAININGS)
    assert actor != critic
    assert load_plan(run.path / "plan-1.json").calls["critic_train_step"].devices == (0, 1)
    assert json.loads((run.path / "experiment.json").read_text())["call_factors"]["critic_train_step"] > 10
    check_close(run, whole)
