"""The loss of an update as a call of its own, with rewards of tokens: the same numbers, and nothing changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.data import sort_task
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.lifecycle.request import experiment_of
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ROOT, SMALL, SMALL_ACTOR, FinishedRun

pytestmark = pytest.mark.distributed

SCRIPT = ROOT / "tests/e2e/probe_script.py"
OFF = ("--probe.off",)
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "micro_batches": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "micro_batches": 2},
}
MEASURED = {"time_s", "tokens_per_s", "calls", "peak_bytes", "plan"}


class Runs:
    """Runs of the script in float64, each once."""

    def __init__(self, folder: Path):
        self._folder, self._data = folder, sort_task.ensure(folder / "data")
        self._made: dict[tuple[str, ...], FinishedRun] = {}

    def run(self, plan: str, *words: str) -> FinishedRun:
        if (plan, *words) in self._made:
            return self._made[plan, *words]
        given = ("--data", str(self._data / "prompts.jsonl"), "--tokenizer", str(self._data / "tokenizer.json"))
        given = (*given, "--texts.data", str(self._data / "sft.jsonl"), *SMALL, "--dtype", "float64", *words)
        given = (*given, "--reinforce.max-new-tokens", "6", "--reinforce.temperature", "0.7", "--actor.lr", "1e-2")
        graph = experiment_of(str(SCRIPT), given).graph
        calls = {name: CallPlan(devices=(0, 2), **PLANS[plan]) for name in graph.model_calls}
        folder = self._folder / "-".join((plan, *words))
        folder.mkdir()
        save_plan(ExecutionPlan(num_devices=2, calls=calls), folder / "plan.json")
        run = quickly_finished(folder / "run", SCRIPT, *given, "--plan", folder / "plan.json")
        return self._made.setdefault((plan, *words), run)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("losses"))


def computed(line: dict[str, Any]) -> dict[str, float]:
    """The statistics of compute_loss, under the names that an update gives them."""
    return {name.removeprefix("computed_"): value for name, value in line.items() if name.startswith("computed_")}


@pytest.mark.parametrize("plan", ["dp2", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("tp2", "pp2"))])
def test_it_is_the_loss_of_the_update_before_its_step(plan: str, runs: Runs) -> None:
    lines = runs.run(plan).metrics
    assert len(lines) == 2
    for line in lines:
        found, texts = computed(line), line["texts_actor_loss"]
        loss, names = found.pop("actor_loss"), {"clip_fraction", "reward_mean", "kl", "kl_per_sequence"}
        assert found.keys() == {*names, "response_length", "entropy"}
        assert found == pytest.approx({name: line[name] for name in found}, rel=1e-12, abs=1e-12)
        assert line["actor_loss"] == pytest.approx(loss + 0.5 * texts, rel=1e-12)
        assert texts > 1, "it is no rounding error"
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-12)
    assert abs(lines[1]["kl"]) > 1e-6, "the first step changes the policy"


@pytest.mark.slow
def test_it_changes_nothing(runs: Runs) -> None:
    """The same run without it has the same statistics and ends with the same bits."""
    with_it, without = runs.run("dp2"), runs.run("dp2", *OFF)
    for line, expected in zip(with_it.metrics, without.metrics, strict=True):
        kept = {name: value for name, value in line.items() if not name.startswith(("computed_", "texts_"))}
        assert {k: v for k, v in kept.items() if k not in MEASURED} == {
            k: v for k, v in expected.items() if k not in MEASURED
        }
    assert torch.equal(*(run.parameters("actor", SMALL_ACTOR) for run in (with_it, without)))


@pytest.mark.slow
def test_plans_agree(runs: Runs) -> None:
    """Also on rewards of tokens, whose samples lie on one rank or on two."""
    first = runs.run("dp2").metrics
    for plan in ("tp2", "pp2"):
        for line, expected in zip(runs.run(plan).metrics, first, strict=True):
            names = [name for name in line if name not in MEASURED]
            assert {n: line[n] for n in names} == pytest.approx({n: expected[n] for n in names}, rel=1e-9, abs=1e-11)
