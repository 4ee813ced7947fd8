"""A KV cache that does not hold all sequences is a choice of the plan: what had to be refused before runs, as
predicted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.lifecycle.request import experiment_of
from realhf.planning.clusters import cluster_of
from realhf.planning.planner import search_for, task_of
from realhf.planning.request import DevicesRequest, Measured, PlanRequest, SearchBudget
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ROOT

SCRIPT = ROOT / "tests/e2e/reinforce_script.py"
# Fifteen samples are not divided into equal micro-batches, and training one at a time takes little memory.
WORDS = (
    *("--batch-size", "15", "--mini-batches", "15", "--dtype", "float64"),
    *("--options.samples-per-prompt", "1", "--options.max-new-tokens", "64", "--options.epochs", "1"),
    *("--options.eos-token", "-1"),  # every response is as long as the limit
    *("--architecture.num-layers", "8", "--architecture.hidden-size", "32", "--architecture.intermediate-size", "32"),
    *("--architecture.num-heads", "2", "--architecture.num-kv-heads", "2"),
)
MEMORY_GB, ROOMY_GB = 0.0205, 0.1
EVALUATIONS = 1000


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    data = sort_task.ensure(tmp_path_factory.mktemp("budget") / "data")
    return ("--data", str(data / "prompts.jsonl"), "--tokenizer", str(data / "tokenizer.json"), *WORDS)


@pytest.mark.distributed
def test_a_search_finds_a_cache_that_fits_and_the_run_preempts_as_predicted(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    cluster = cluster_of(DevicesRequest(num_workers=1, hardware="cpu", memory_gb=MEMORY_GB), None)
    task = task_of(experiment_of(str(SCRIPT), words), cluster, PlanRequest(measured=Measured(ignores_runs=True)))
    with pytest.raises(UserError, match="no plan fits into memory"):
        search_for(replace(task, mixed=frozenset()), SearchBudget(evaluations=EVALUATIONS))

    common = ("--hardware", "cpu", "--num-workers", "1", "--evaluations", str(EVALUATIONS), "--steps", "1")
    common = (*common, "--record", "seq", *words)
    tight = quickly_finished(tmp_path / "tight", SCRIPT, *common, "--memory-gb", str(MEMORY_GB))
    plan = json.loads((tight.path / "plan.json").read_text())
    assert plan["calls"]["actor_generate"]["compute"]["kv_cache_tokens"] > 0
    [worth] = [one for one in plan["rationale"]["worth"] if one["of"] == "actor_generate"]
    assert worth["without_s"] is None, "nothing fits without"
    predicted = plan["rationale"]["preemptions"]["actor_generate"]
    [line] = tight.metrics
    assert predicted / 1.5 <= line["calls"]["actor_generate"]["preemptions"] <= predicted * 1.5
    assert f"{predicted:.0f} a step and rank predicted, " in (tight.path / "report.html").read_text()

    roomy = quickly_finished(tmp_path / "roomy", SCRIPT, *common, "--memory-gb", str(ROOMY_GB))
    assert json.loads((roomy.path / "plan.json").read_text())["calls"]["actor_generate"]["compute"] == {}
    assert "preemptions" not in roomy.metrics[0]["calls"]["actor_generate"]
    few, all_at_once = tight.recorded(0, "seq"), roomy.recorded(0, "seq")
    assert all(torch.equal(few[sample], all_at_once[sample]) for sample in range(15))
