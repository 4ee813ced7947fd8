"""`make real`, cut short: the real model, its data, GRPO and the evaluation, by the one command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def last_number(text: str) -> str | None:
    return ([None, *re.findall(r"-?\d+", text)])[-1]


def test_a_real_model_is_fetched_trained_and_evaluated(tmp_path: Path) -> None:
    root, cache = tmp_path / "real", os.environ.get("PIP_CACHE_DIR", Path.home() / ".cache/pip")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path), "PIP_CACHE_DIR": str(cache)}
    environment["XDG_DATA_HOME"] = str(tmp_path)  # and profiles, outside of the checkout
    words = [sys.executable, ROOT / "scripts/real_job.py", "--root", root, "--steps", "1"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if "pip could not fetch" in done.stderr:
        pytest.skip(f"the package index cannot be reached: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-4000:]

    held_out, train = lines(root / "held_out.jsonl"), lines(root / "train.jsonl")
    assert len(held_out) == 500
    assert len(train) > 1000
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in train}
    before, after = sorted((root / "evaluation").iterdir())
    for folder in (before, after):
        answers = lines(folder / "samples.jsonl")
        assert sorted(answer["sample"] for answer in answers) == list(range(500))
        for answer in answers:
            row = held_out[answer["sample"]]
            assert row["prompt"] in answer["prompt"]
            assert answer["reward"] == float(last_number(answer["response"]) == row["answer"]), answer
    shown = done.stdout.partition("the first held-out questions\n")[2]
    assert shown.count("before: ") == shown.count("after: ") == 6
    assert re.search(r"whole job: \d+\.\d minutes", shown)
    assert (root / "grpo/report.html").is_file()
