"""Scripts run: PPO in ten lines is PPO with its calls declared."""

from pathlib import Path
from typing import Any

import pytest

from realhf.data import sort_task
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.lifecycle.request import experiment_of
from realhf.planning.planner import plan_for
from realhf.planning.request import DevicesRequest, PlanRequest, SearchBudget
from tests.e2e.runs import ROOT, SMALL, finished

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
    graphs = [DataflowGraph(one.rpcs, one.dataset.keys) for one in (script, declared)]
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


@pytest.mark.distributed
def test_the_same_numbers(data: Path, tmp_path: Path) -> None:
    words = (*SMALL, "--dtype", "float64", "--steps", "2", "--plan", "tests/plans/grouped.json")
    script = finished(tmp_path / "script", SCRIPT, *options(data), *words)
    declared = finished(tmp_path / "declared", "ppo", "--data-dir", str(data), "--no-evaluate", *words)
    assert statistics(script) == statistics(declared)
