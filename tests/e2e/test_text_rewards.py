"""Rewards on texts, on workers of real runs."""

import json
from pathlib import Path

import pytest
import torch

from realhf.dataflow.plan import save_plan
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ROOT, FinishedRun, realhf
from tests.e2e.test_beside import ALONE, TWO

pytestmark = pytest.mark.distributed

JOB = ROOT / "tests/e2e/text_reward_job.py"
NAMES = ["reward_total", "reward_in_order", "reward_long", "reward_judged", "reward_failures"]


@pytest.mark.slow
def test_rewards_are_the_same_on_one_worker_and_on_two(tmp_path: Path) -> None:
    runs: list[FinishedRun] = []
    for name, plan in (("alone", ALONE), ("two", TWO)):
        save_plan(plan, tmp_path / f"{name}.json")
        words = ("--plan", tmp_path / f"{name}.json", "--record", "reward")
        runs.append(quickly_finished(tmp_path / name, "../tests/e2e/text_reward_job", *words))
    alone, two = runs
    for step in range(2):
        first, second = (run.recorded(step, "reward", "score") for run in runs)
        assert first.keys() == second.keys() == set(range(8))
        assert all(torch.equal(first[sample], second[sample]) for sample in first)
        for name in NAMES:
            assert alone.metrics[step][name] == pytest.approx(two.metrics[step][name], rel=1e-9), name
        one = alone.metrics[step]
        total = one["reward_in_order"] + 0.1 * one["reward_long"] + one["reward_judged"]
        assert one["reward_total"] == pytest.approx(total)
        assert one["reward_failures"] == 0
        assert one["reward_seconds"] > 0
    for run in runs:
        lines = [json.loads(line) for line in (run.path / "evaluations.jsonl").open()]
        assert [line["step"] for line in lines] == [0, 2]
        assert all(0 < line["reward_in_order"] <= 1 for line in lines)
        assert "[async reward process] judging" in (run.path / "logs/worker-0.log").read_text()


def run(tmp_path: Path, *words: str) -> tuple[int, str]:
    save_plan(ALONE, tmp_path / "plan.json")
    done = realhf("run", JOB, "--run-dir", tmp_path / "run", "--plan", tmp_path / "plan.json", "--no-evaluate", *words)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_failure_ends_the_run_or_is_counted(tmp_path: Path) -> None:
    code, text = run(tmp_path, "--functions", "broken")
    assert code == 1
    assert "worker 0 failed in score of step 1;" in text
    assert "reward broken (text_reward_functions.py:" in text
    assert "ValueError: odd" in text
    (tmp_path / "zero").mkdir()
    code, text = run(tmp_path / "zero", "--functions", "broken", "--on-error", "zero")
    assert code == 0, text
    [line, *_] = [json.loads(line) for line in (tmp_path / "zero/run/metrics.jsonl").open()]
    assert line["reward_total"] == pytest.approx(1 - line["reward_failures"])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("asks_for_more", "asks for 'solution', and the data have no such column: they have prompt"),
        ("nothing", "has no function 'nothing'; it has the functions asks_for_more, broken"),
    ],
)
def test_mistakes_are_told_before_a_process_starts(function: str, words: str, tmp_path: Path) -> None:
    code, text = run(tmp_path, "--functions", function)
    assert code == 2
    assert words in " ".join(text.split())
    assert not (tmp_path / "run").exists()
