"""`realhf search`: what it prints and writes, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from realhf.cli import main
from tests.unit.planning.evaluate_plan import evaluate
from tests.unit.planning.problem_files import FOLDER, OPTIMA, reference_problem

PROBLEM = str(FOLDER / "n1_steps3.json")
BEST = OPTIMA["n1_steps3"]["best_us_per_step"]


def search(tmp_path: Path, *words: str, file: str = PROBLEM) -> dict[str, Any]:
    out = tmp_path / "out.json"
    assert main(["search", file, *words, "--json", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_the_written_result_is_what_the_reference_evaluator_says(tmp_path: Path) -> None:
    result = search(tmp_path, "--seconds", "600", "--seed", "1", "--threads", "2")
    expected = evaluate(reference_problem("n1_steps3"), result["plan"])
    assert {key: result[key] for key in ("us_per_step", "peak_bytes", "feasible")} == {
        key: expected[key] for key in ("us_per_step", "peak_bytes", "feasible")
    }
    assert (result["us_per_step"], result["lower_bound_us"], result["proven"]) == (BEST, BEST, True)
    assert result["seconds"] < 600  # it does not wait for the time to pass
    assert result["evaluations"] >= result["full_evaluations"] > 0
    assert result["evaluations_per_s"] > 0
    times, costs = zip(*result["trace"], strict=True)
    assert list(times) == sorted(times)
    assert list(costs) == sorted(costs, reverse=True)
    assert costs[-1] == BEST


def test_evaluations_make_a_run_repeatable(tmp_path: Path) -> None:
    words = ("--evaluations", "120000", "--seed", "5", "--threads")
    first, second = (search(tmp_path, *words, threads) for threads in ("1", "3"))
    for result in (first, second):
        for key in ("evaluations_per_s", "seconds", "trace"):
            del result[key]
    assert first == second
    assert first["evaluations"] >= 120000


def test_single_moves_are_kept_as_an_option(tmp_path: Path) -> None:
    result = search(tmp_path, "--evaluations", "2000", "--moves", "single")
    assert result["feasible"]
    assert not result["proven"]
    assert 0 < result["lower_bound_us"] < BEST <= result["us_per_step"]


def test_the_certificate_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", PROBLEM, "--evaluations", "100000"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"best\s+21\.000000 s a step", printed)
    assert re.search(r"lower bound\s+21\.000000 s: optimal", printed)
    assert all(call["name"] in printed for call in reference_problem("n1_steps3")["calls"])


def test_no_plan_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = reference_problem("n1_steps3")
    problem["device_memory_bytes"] = 2**30
    path = tmp_path / "small.json"
    path.write_text(json.dumps(problem))
    result = search(tmp_path, "--evaluations", "1000", file=str(path))
    assert not result["feasible"]
    assert result["proven"]
    assert result["lower_bound_us"] is None
    assert "no plan fits into memory (proven)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.json"], "none.json: cannot be read"),
        ([PROBLEM, "--seconds", "0"], "--seconds 0.0 is not from 0.01"),
        ([PROBLEM, "--seconds", "nan"], "--seconds nan is not from"),
        ([PROBLEM, "--evaluations", "0"], "--evaluations 0 is not from 1 to"),
        ([PROBLEM, "--threads", "0"], "--threads 0 is not from 1 to 1,024"),
        ([PROBLEM, "--seed", "-1"], "--seed -1 is not from 0 to"),
        ([PROBLEM, "--evaluations", "100", "--json", "none/out.json"], "none/out.json: cannot write"),
    ],
)
def test_bad_input_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *words]) == 2
    assert message in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--help"]) == 0
    assert "realhf search problem.json --seconds 10" in capsys.readouterr().out
