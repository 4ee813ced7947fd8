"""Calls beside the devices, on workers of real runs."""

import json
from pathlib import Path

import pytest
import torch

from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.report.run_data import read_trace
from realhf.rundir.checkpoints import read_state
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ROOT, FinishedRun, realhf

pytestmark = pytest.mark.distributed

JOB = "../tests/e2e/beside_job"
CALLS = ["actor_generate", "reference_inference", "critic_inference", "actor_train_step", "critic_train_step"]
ONE = CallPlan(devices=(0, 1))
ALONE = ExecutionPlan(num_devices=1, calls=dict.fromkeys(CALLS, ONE))
# The rules run on both workers; what they read comes from a tensor-parallel pair.
TWO = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), tp=2),
        "reference_inference": ONE,
        "critic_inference": CallPlan(devices=(1, 1)),
        "actor_train_step": CallPlan(devices=(0, 2), dp=2),
        "critic_train_step": CallPlan(devices=(1, 1)),
    },
)
MEASURED = {"calls", "time_s", "tokens_per_s", "peak_bytes", "plan", "num_workers"}


def run_under(plan: ExecutionPlan, folder: Path, *words: str | Path) -> FinishedRun:
    folder.mkdir(exist_ok=True)
    save_plan(plan, folder / "plan.json")
    return quickly_finished(
        folder / "run", JOB, "--plan", folder / "plan.json", "--record", "seq", "score", "reward", *words
    )


def check_metrics(run: FinishedRun, other: FinishedRun, rel: float) -> None:
    for one, two in zip(run.metrics, other.metrics, strict=True):
        assert one.keys() == two.keys()
        values = {name: (value, two[name]) for name, value in one.items() if name not in MEASURED}
        assert all(value == pytest.approx(again, rel=rel, abs=rel) for value, again in values.values()), values


def samples_of(run: FinishedRun) -> list[dict]:
    return [json.loads(line) for line in (run.path / "samples.jsonl").open()]


def check_samples(run: FinishedRun, steps: int) -> None:
    """Three of each step, with what was recorded of them, and of each evaluation, always the same."""
    by_split: dict[str, list[dict]] = {"train": [], "evaluation": []}
    for each in samples_of(run):
        by_split[each["split"]].append(each)
    assert [each["step"] for each in by_split["train"]] == [1 + i // 3 for i in range(3 * steps)]
    assert [each["step"] for each in by_split["evaluation"]] == [0] * 3 + [steps] * 3
    first, last = ([(each["sample"], each["prompt"]) for each in by_split["evaluation"][i : i + 3]] for i in (0, 3))
    assert first == last
    for each in by_split["train"]:
        rewards = run.recorded(each["step"] - 1, "reward", "bonus")
        assert each["reward"] == rewards[each["sample"]].item()
        assert each["prompt"].startswith("<bos>")
        assert each["weights"] == run.metrics[each["step"] - 1]["calls"]["actor_generate"]["weights"]
    made = run.metrics[-1]["calls"]["actor_train_step"]["new_weights"]
    assert {each["weights"] for each in by_split["evaluation"][3:]} == {made}


def test_rules_run_while_other_calls_compute_with_the_same_result_under_every_plan(tmp_path: Path) -> None:
    """Made sure on any machine: the rule ends only when the reference's inference has computed, which is behind it in
    the requests of the same worker, and ends when the rule has begun."""
    runs = []
    for name, plan in (("alone", ALONE), ("two", TWO)):
        meeting = tmp_path / f"{name} meeting"
        meeting.mkdir()
        runs.append(run_under(plan, tmp_path / name, "--meeting", meeting))
    alone, two = runs
    for run in runs:
        events = [event for event in read_trace(run.path / "trace.json") if event.ph == "X" and event.tid == 0]
        spans = {event.name: event for event in events if event.cat != "transfer"}
        for step in (1, 2):
            rule, reference = spans[f"rule of step {step}"], spans[f"reference_inference of step {step}"]
            assert (rule.cat, reference.cat) == ("beside", "compute")
            assert rule.ts < reference.ts + reference.dur
            assert reference.ts < rule.ts + rule.dur
    for step in range(2):
        for key, call in (("seq", "actor_generate"), ("score", "rule"), ("reward", "bonus")):
            first, second = alone.recorded(step, key, call), two.recorded(step, key, call)
            assert first.keys() == second.keys() == set(range(8))
            assert all(torch.equal(first[sample], second[sample]) for sample in first), key
    check_metrics(alone, two, rel=1e-9)
    check_samples(alone, steps=2)
    texts = [[{**each, "weights": ""} for each in samples_of(run)] for run in runs]  # weights differ by rounding
    assert texts[0] == texts[1]
    of_evaluation = [[json.loads(line) for line in (run.path / "evaluations.jsonl").open()] for run in runs]
    assert [line["step"] for line in of_evaluation[0]] == [0, 2]
    for one, other in zip(*of_evaluation, strict=True):
        assert one["rule_score"] == pytest.approx(other["rule_score"], rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "plan", "texts"),
    [
        ("exception", ALONE, ["worker 0 failed in rule of step 2;", "ValueError: the rule is broken"]),
        pytest.param(
            "nan",
            ALONE,
            [
                "worker 0 failed in rule of step 2;",
                "rule: RuleInterface.inference",
                "output 'score', sample 0, has nan at [0], must be finite",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "state",
            TWO,
            ["rule of step 2: worker", "leaves context.state['own']=", "all ranks have to compute the same"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_rule_does_wrong_ends_the_run_and_is_named(
    kind: str, plan: ExecutionPlan, texts: list[str], tmp_path: Path
) -> None:
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "trouble").write_text(f"1 {kind}")
    words = ("--plan", tmp_path / "plan.json", "--trouble", tmp_path / "trouble", "--no-evaluate")
    done = realhf("run", ROOT / "tests/e2e/beside_job.py", "--run-dir", tmp_path / "run", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert all(text in done.stderr for text in texts), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("resumed_under", [TWO, ALONE])
def test_numbers_that_a_call_keeps_go_on_after_a_resume(resumed_under: ExecutionPlan, tmp_path: Path) -> None:
    """The mean of all steps so far, which the scores of each step are measured against, and training by them: bit for
    bit under the same plan, and the scores also under another with more workers."""
    words = ("--no-evaluate", "--steps", "3", "--checkpoint-every", "1", "--trouble", tmp_path / "trouble")
    whole = run_under(ALONE, tmp_path / "whole", *words)
    save_plan(ALONE, tmp_path / "plan.json")
    (tmp_path / "trouble").write_text("2 exception")
    job, folder = ROOT / "tests/e2e/beside_job.py", tmp_path / "run"
    given = ("--plan", tmp_path / "plan.json", "--record", "seq", "score", "reward", *words)
    assert realhf("run", job, "--run-dir", folder, *given).returncode == 1
    (tmp_path / "trouble").unlink()
    save_plan(resumed_under, tmp_path / "resumed.json")
    done = realhf("run", job, "--run-dir", folder, "--resume", "--plan", tmp_path / "resumed.json")
    assert done.returncode == 0, done.stderr
    again = FinishedRun(folder)
    states = [read_state(run.path / "checkpoints/step-3").calls for run in (whole, again)]
    assert states[0] == states[1]
    assert states[0].keys() == {"rule"}
    assert states[0]["rule"]["steps"] == 3.0
    for step in range(3):
        first, second = whole.recorded(step, "score", "rule"), again.recorded(step, "score", "rule")
        assert all(torch.equal(first[sample], second[sample]) for sample in first)
    assert samples_of(again) == samples_of(whole)
    check_metrics(whole, again, rel=0.0 if resumed_under is ALONE else 1e-9)
