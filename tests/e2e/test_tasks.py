"""A run on a task of reasoning-gym, which brings its own reward; it goes on with the questions that it began with."""

import json
import os
import re
from pathlib import Path

import pytest
import reasoning_gym

from realhf.cli import main
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import SMALL, FinishedRun
from tests.unit.data.tokenizers_of_families import write_qwen

# The question has one number, of one digit: a model of random weights gives some of the answers.
OPTIONS = {"min_terms": 1, "max_terms": 1, "max_digits": 1}
TASK = "reasoning-gym:chain_sum:" + ",".join(f"{name}={value}" for name, value in OPTIONS.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("task")
    write_qwen(folder / "tokenizer")
    words = ("--data", f"{TASK},size=64", "--eval-data", f"{TASK},size=64,seed=1", "--tokenizer", folder / "tokenizer")
    words = (*words, *SMALL, "--batch-size", "64", "--architecture.vocab-size", "320", "--grpo.max-new-tokens", "32")
    words = (*words, "--steps", "1", "--num-workers", "1", "--samples", "64")
    return quickly_finished(folder / "run", "../realhf/experiments/grpo", *words)


def test_the_reward_is_the_score_of_the_last_number(run: FinishedRun) -> None:
    scorer = reasoning_gym.create_dataset("chain_sum", **OPTIONS, seed=0)
    samples = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert {sample["split"] for sample in samples} == {"train", "evaluation"}
    expected = []
    for sample in samples:
        [right] = re.findall(r"\d", sample["prompt"])
        answers = re.findall(r"-?[\d,.]*\d", sample["response"])
        entry = {"answer": right}
        expected.append(scorer.score_answer(answers[-1] if answers else sample["response"], entry))
    assert [sample["reward"] for sample in samples] == pytest.approx(expected, abs=1e-6)
    assert [sample["details"]["rewards"]["reasoning_gym"] for sample in samples] == pytest.approx(expected)
    assert any(expected)
    assert 0 < run.metrics[0]["reward_reasoning_gym"] < 1


def test_a_run_goes_on_with_the_questions_that_it_began_with(run: FinishedRun, capsys: pytest.CaptureFixture) -> None:
    inputs = json.loads((run.path / "inputs.json").read_text())["files"]
    [training], [held_out] = inputs["data set"], inputs["evaluation's data set"]
    assert training != held_out
    again = ["run", "grpo", "--run-dir", str(run.path), "--resume", "--steps", "2"]
    before = Path(training).read_bytes()
    os.unlink(training)  # it is made again
    Path(held_out).write_text(Path(held_out).read_text().replace("final answer", "answer"))
    assert main(again) == 2
    assert f"the evaluation's data set of the run in {run.path} has changed" in capsys.readouterr().err
    assert Path(training).read_bytes() == before
