"""Scripts run: PPO in ten lines is PPO with its calls declared."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.data import sort_task
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.lifecycle.request import experiment_of
from realhf.planning.planner import plan_for
from realhf.planning.request import DevicesRequest, PlanRequest, SearchBudget
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ROOT, SMALL

SCRIPT = ROOT / "tests/e2e/script_job.py"
MEASURED = {"time_s", "tokens_per_s", "calls", "peak_bytes", "plan"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sort_task.ensure(tmp_path_factory.mktemp("script") / "data")


def options(data: Path) -> tuple[str, ...]:
    return ("--data", str(data / "prompts.jsonl"), "--tokenizer", str(data / "tokenizer.json"))


def described(call: ModelFunctionCallDef) -> tuple[Any, ...]:
    return (call.model_name, call.config, set(call.input_data), call.output_data, call.mini_batches)


def statistics(run: Any) -> list[dict[str, Any]]:
    """Of every step, all but what is measured."""
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in run.metrics]


def test_the_same_graph_and_the_same_plan(data: Path) -> None:
    script = experiment_of(str(SCRIPT), options(data))
    declared = experiment_of("experiments/ppo.py", ("--data-dir", str(data), "--no-evaluate"))
    request = PlanRequest(devices=DevicesRequest(num_workers=4), budget=SearchBudget(evaluations=2000))
    graphs = [one.graph for one in (script, declared)]
    first, second = (
        {
            c.name: (c.model_name, c.config, set(c.input_data), c.output_data, c.mini_batches)
            for c in graph.calls.values()
        }
        for graph in graphs
    )
    assert first == second
    plans = [plan_for(one, request)[0] for one in (script, declared)]
    assert plans[0].calls == plans[1].calls
    assert plans[0].predicted_step_s == plans[1].predicted_step_s


@pytest.mark.slow
@pytest.mark.distributed
def test_the_same_numbers(data: Path, tmp_path: Path) -> None:
    words = (*SMALL, "--dtype", "float64", "--steps", "2", "--plan", "tests/plans/grouped.json")
    script = quickly_finished(tmp_path / "script", SCRIPT, *options(data), *words)
    declared = quickly_finished(tmp_path / "declared", "ppo", "--data-dir", str(data), "--no-evaluate", *words)
    for one, other in zip(statistics(script), statistics(declared), strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-12)  # statistics add up samples in another order


@pytest.mark.distributed
@pytest.mark.slow
def test_an_algorithm_in_one_file_with_other_plans_and_resumed(data: Path, tmp_path: Path) -> None:
    script = ROOT / "tests/e2e/reinforce_script.py"
    words = (*options(data), *SMALL, "--dtype", "float64", "--mini-batches", "2", "--record", "seq")
    words = (*words, "--checkpoint-every", "2")
    one, two, plan = tmp_path / "one", tmp_path / "two", tmp_path / "plan.json"
    calls = {"actor_generate": CallPlan(devices=(0, 2), dp=2), "actor_train_step": CallPlan(devices=(0, 2), tp=2)}
    save_plan(ExecutionPlan(num_devices=2, calls=calls), plan)
    whole = quickly_finished(one, script, *words, "--steps", "4", "--num-workers", "1")
    other = quickly_finished(two, script, *words, "--steps", "4", "--plan", plan)
    for step in range(4):
        first, second = whole.recorded(step, "seq"), other.recorded(step, "seq")
        assert all(torch.equal(first[sample], second[sample]) for sample in range(32))
    names = ("reward_mean", "entropy", "response_length", "actor_loss", "actor_grad_norm", "actor_lr")
    for a, b in zip(whole.metrics, other.metrics, strict=True):
        assert {name: a[name] for name in names} == pytest.approx({name: b[name] for name in names}, abs=1e-9)
    latest = one / "checkpoints/latest"
    latest.unlink()
    latest.symlink_to("step-2")
    shutil.rmtree(one / "checkpoints/step-4")
    again = quickly_finished(one, script, "--resume")
    assert statistics(again) == statistics(whole)


@pytest.mark.distributed
@pytest.mark.slow
def test_fine_tuning_is_that_of_the_declared_experiment(data: Path, tmp_path: Path) -> None:
    words = (*SMALL, "--dtype", "float64", "--steps", "2", "--num-workers", "1")
    files = ("--data", str(data / "sft.jsonl"), "--tokenizer", str(data / "tokenizer.json"))
    files = (*files, "--eval-data", str(data / "evaluation.jsonl"))
    script = quickly_finished(tmp_path / "script", ROOT / "tests/e2e/sft_script.py", *files, *words)
    declared = quickly_finished(tmp_path / "declared", "sft", "--data-dir", str(data), "--no-evaluate", *words)
    for one, other in zip(script.metrics, declared.metrics, strict=True):
        assert [one[f"policy_{name}"] for name in ("loss", "grad_norm")] == [other["loss"], other["grad_norm"]]
    before, after = (json.loads(line) for line in (script.path / "evaluations.jsonl").read_text().splitlines())
    assert 0 < after["policy_loss"] < before["policy_loss"]
