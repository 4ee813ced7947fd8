"""The main job: its fine-tuning learns in miniature, and all its commands fit together."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from realhf import cli
from tests.e2e.runs import ROOT, SMALL, finished

pytestmark = pytest.mark.distributed


def evaluations(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_fine_tuning_learns_to_sort(tmp_path: Path) -> None:
    """Random weights answer nothing right; with the seed, 33 % of the held-out prompts are right at the end. Other
    processors round otherwise, so half of that will do."""
    sizes = {"hidden-size": 96, "intermediate-size": 192, "num-layers": 2, "num-heads": 4, "num-kv-heads": 4}
    model = " ".join(f"--architecture.{name} {size}" for name, size in sizes.items())
    words = "--steps 250 --batch-size 64 --lr 3e-3 --warmup-steps 5 --num-workers 1 --seed 0"
    run = finished(tmp_path / "run", "sft", *model.split(), *words.split())
    before, *_, after = evaluations(run.path)
    assert before["accuracy"] < 0.02
    assert after["accuracy"] > 0.16


def test_the_main_job_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its commands, with few steps of a small model; benchmarks/learning.py has what it reaches."""
    job = runpy.run_path(str(ROOT / "scripts/main_job.py"))

    def in_small(*words: str) -> None:
        command, experiment, *others = words
        more = ["--only", "memory"]
        if command == "run":
            more = ["--steps", "2", "--batch-size", "32", "--launcher", "tests.e2e.forked:ForkedLauncher"]
            more += SMALL if experiment == "experiments/sft.py" else []
        assert cli.main([command, str(ROOT / experiment), *others, *more]) == 0, words

    monkeypatch.chdir(tmp_path)  # the profile is kept outside of the checkout
    monkeypatch.setattr(sys, "argv", ["main_job.py", "--root", str(tmp_path / "job")])
    monkeypatch.setitem(job["main"].__globals__, "realhf", in_small)
    job["main"]()
    printed = capsys.readouterr().out
    rows = re.findall(r"(temperature 1|greedy) +([\d.]+)% +([\d.]+)% +([+-][\d.]+) points", printed)
    accuracies = [
        evaluations(tmp_path / "job/ppo")[at][key] for key in ("accuracy", "accuracy_greedy") for at in (0, -1)
    ]
    assert [float(number) for _, *both, _ in rows for number in both] == [round(100 * a, 1) for a in accuracies]
    spec = json.loads((tmp_path / "job/ppo/experiment.json").read_text())
    scores = evaluations(tmp_path / "job/reward")[-1]
    assert f"{scores['sample_score']:.6f}" in json.dumps(spec), "rewards are standardised by what the reward model says"
    assert (tmp_path / "job/ppo/report.html").is_file()
