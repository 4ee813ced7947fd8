"""What the launching process does about a drift: searches, says what it found, and asks for a change if that pays."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.dataflow.plan import CallPlan, ExecutionPlan, load_plan, plan_digest
from realhf.lifecycle import replanner as module
from realhf.lifecycle.new import new_run
from realhf.lifecycle.replan import Proposal
from realhf.lifecycle.replanner import Replanner
from realhf.lifecycle.request import Mode, ReplanRequest
from realhf.planning.planner import task_of
from realhf.planning.predict import predict
from realhf.planning.request import Measured, PlanRequest
from realhf.rundir.events import note, read_events
from realhf.rundir.paths import RunDirectory
from realhf.rundir.prepare import prepare
from realhf.rundir.run import Run, RunSpec, load_experiment_class
from tests.unit.lifecycle.requests import request_of
from tests.unit.planning.graphs import cpu_cluster

PRESENT = ExecutionPlan(num_devices=2, calls={"train": CallPlan(devices=(0, 1))})
BETTER = ExecutionPlan(num_devices=2, calls={"train": CallPlan(devices=(0, 2), dp=2)}, predicted_step_s=0.5)


@pytest.fixture
def run() -> Run:
    spec = RunSpec(
        experiment_file="", experiment_class="", values={}, working_directory="", num_workers=2, devices_per_node=2
    )
    return Run(spec, SimpleNamespace(steps=110), PRESENT)


@pytest.fixture
def directory(tmp_path: Path, run: Run) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "run")
    prepare(run, directory)
    return directory


class Search:
    """In the place of a process: it has found `proposal`, or failed."""

    def __init__(self, directory: RunDirectory, proposal: Proposal | None):
        self.returncode = 1
        if proposal is not None:
            (directory.launcher / "proposal.json").write_bytes(msgspec.json.encode(proposal))
            self.returncode = 0

    def poll(self) -> int:
        return self.returncode


def answers(
    run: Run,
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
    found: ExecutionPlan | None,
    cost_s: float,
) -> tuple[Replanner, list[str]]:
    """After a drift at step 10 of 110: what is noted of it. A step takes 1 s, and half of it under `BETTER`."""
    proposal = found and Proposal(factors={"train": 3.0}, step_s=1.0, present_s=1.0, other_s=0.5, plan=found)
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: Search(directory, proposal))
    said: list[str] = []
    replanner = Replanner(run, directory, ReplanRequest(mode=mode, switch_cost_s=cost_s), said.append)
    times = {"start": 5, "end": 6, "seconds": 1, "predicted_s": None}
    line = {"step": 10, "time_s": 1, "tokens": 1, "tokens_per_s": 1, "calls": {"train": times}}
    directory.metrics.write_bytes(b'{"step":\n' + msgspec.json.encode(line) + b"\n")
    note(directory.events, "drift", 10, "train takes 3.00 times what was predicted (3 s, not 1 s)")
    replanner.poll()
    replanner.poll()
    assert said[0] == "drift: train takes 3.00 times what was predicted (3 s, not 1 s)"
    noted = [event.message for event in read_events(directory.events) if event.event == "proposal"]
    assert said[1:] == noted
    return replanner, noted


@pytest.mark.parametrize(
    ("mode", "cost_s", "end", "asks"),
    [
        ("suggest", 10.0, "pays; see realhf replan, or give --replan switch", False),
        ("switch", 10.0, "pays; the run changes to it at the next checkpoint", True),
        ("switch", 50.0, "does not pay", False),
    ],
)
def test_a_better_plan(
    mode: Mode, cost_s: float, end: str, asks: bool, run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    replanner, [message] = answers(run, directory, monkeypatch, mode, BETTER, cost_s)
    assert message == (
        f"plan {plan_digest(BETTER)[:12]}: 0.5 s instead of 1 s a step; 100 steps are left, of 1 s each: gains 50 s, a "
        f"change costs {cost_s:g} s: {end}"
    )
    assert directory.switch.exists() == asks
    if asks:
        again = replanner.next_run()
        assert (again.plan, again.spec.call_factors) == (BETTER, {"train": 3.0})
        prepare(again, directory)
        assert not directory.switch.exists(), "it was asked for once"


def test_the_plan_that_the_run_has_is_no_news(
    run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = msgspec.structs.replace(PRESENT, predicted_step_s=0.1)
    _, [message] = answers(run, directory, monkeypatch, "switch", same, 0.0)
    assert message.endswith("which the run has or has had, is still the best")


def test_a_run_does_not_go_to_and_fro(run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(Run(run.spec, run.experiment, BETTER), directory)
    prepare(run, directory)
    _, [message] = answers(run, directory, monkeypatch, "switch", BETTER, 0.0)
    assert message.endswith("which the run has or has had, is still the best")


def test_a_search_that_fails_is_said(run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    _, [message] = answers(run, directory, monkeypatch, "switch", None, 0.0)
    assert message.startswith("the search for another plan failed; see ")


@pytest.mark.parametrize(
    "content",
    [None, b"", b"\xff", b"{}", b'{"factors":{},"step_s":1,"present_s":1,"plan":{"num_devices":1,"calls":{}}}'],
)
def test_a_damaged_proposal_ends_no_run(
    content: bytes | None, run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Search, "poll", lambda search: damaged(directory.launcher / "proposal.json", content))
    _, [message] = answers(run, directory, monkeypatch, "switch", BETTER, 0.0)
    assert message.startswith(f"the search for another plan left no proposal in {directory.launcher}/proposal.json: ")


def damaged(path: Path, content: bytes | None) -> int:
    """The exit code of a search that left something else."""
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    return 0


def test_a_damaged_plan_is_none_to_go_back_to(
    run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory.path / "plan-1.json").write_bytes(b"\xff")
    _, [message] = answers(run, directory, monkeypatch, "switch", BETTER, 10.0)
    assert message.endswith("pays; the run changes to it at the next checkpoint")


def test_off_only_says_it(run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(run, directory, monkeypatch, "off", BETTER, 0.0)[1] == []


def test_a_change_needs_checkpoints() -> None:
    words = ("experiments/ppo.py", "--plan", "tests/plans/single.json", "--replan", "switch")
    with pytest.raises(UserError, match="give --checkpoint-every STEPS or --checkpoint-every-minutes MINUTES"):
        new_run(request_of(*words))
    assert new_run(request_of(*words, "--checkpoint-every", "5")).spec.saves


def test_factors_hold_for_every_option_of_a_call() -> None:
    experiment = ResolvedExperiment(load_experiment_class("experiments/ppo.py")())
    cluster = cpu_cluster(4, memory=2**33)
    plain, scaled = (
        task_of(experiment, cluster, PlanRequest(measured=Measured(call_factors=f)))
        for f in ({}, {"critic_train_step": 3.0})
    )
    for path in ("tests/plans/dp4.json", "tests/plans/tp4.json"):
        before, after = (predict(task, load_plan(path)) for task in (plain, scaled))
        for name, seconds in before.call_s.items():
            factor = 3.0 if name == "critic_train_step" else 1.0
            assert after.call_s[name] == pytest.approx(factor * seconds, rel=1e-12)
        assert after.step_s > before.step_s


def test_a_drift_during_a_search_is_searched_for_afterwards(
    run: Run, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposal = Proposal(factors={"train": 3.0}, step_s=1.0, present_s=1.0, other_s=0.5, plan=PRESENT)
    searches: list[Search] = []

    class LongSearch(Search):
        is_over = False

        def poll(self) -> Any:
            return self.returncode if self.is_over else None

        def kill(self) -> None: ...

        def wait(self) -> None: ...

    def begin(*_: Any, **__: Any) -> Search:
        searches.append(LongSearch(directory, proposal))
        return searches[-1]

    monkeypatch.setattr(module.subprocess, "Popen", begin)
    replanner = Replanner(run, directory, ReplanRequest(mode="suggest", switch_cost_s=1.0), lambda _: None)
    for name in ("train", "generate", "inference"):  # each in the middle of the search before, or of none
        note(directory.events, "drift", 10, f"{name} takes 3 times as long as the plan predicts")
        replanner.poll()
    assert len(searches) == 1
    searches[0].is_over = True  # type: ignore[attr-defined]
    replanner.poll()
    assert len(searches) == 2, "one for the other two"
    searches[1].is_over = True  # type: ignore[attr-defined]
    replanner.poll()
    assert len(searches) == 2
