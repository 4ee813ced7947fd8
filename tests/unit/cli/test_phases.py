"""Planning says what it does on stderr, a line a phase, and nothing of that on stdout."""

import io
from pathlib import Path

import pytest

from realhf.cli import main
from realhf.cli.output import Output, Phases

PPO = str(Path(__file__).parents[3] / "experiments/ppo.py")


def test_a_line_a_phase() -> None:
    now = iter([0.0, 1.0, 2.2, 3.0, 15.0])
    out = io.StringIO()
    with Phases(Output(file=out, width=200), clock=lambda: next(now)) as watch:
        watch("options", "")
        watch("searching for 10 s", "")
        watch("searching for 10 s", "best 98.2 s a step after 120,000 plans")
    assert out.getvalue() == ("options (1.2 s)\nsearching for 10 s: best 98.2 s a step after 120,000 plans (12 s)\n")


def test_a_terminal_shows_the_present_phase() -> None:
    out = io.StringIO()
    with Phases(Output(file=out, width=200, force_terminal=True)) as watch:
        watch("searching for 10 s", "best 98.2 s a step after 120,000 plans")
    assert out.getvalue().count("best 98.2 s a step after 120,000 plans") >= 1


def test_a_plan_tells_its_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--actor",
        "llama3-7b",
        "--critic",
        "llama3-7b",
        "--batch-size",
        "64",
        "--cluster",
        "h200-1x8",
        "--offload",
        "none",
    ]
    assert main(["plan", PPO, *words, "--evaluations", "500", "--compare"]) == 0
    captured = capsys.readouterr()
    lines = [line.rpartition(" (")[0] for line in captured.err.splitlines()]
    assert [line.partition(":")[0] for line in lines] == [
        "plans by rule", "options", "tables", "searching, 500 plans", "comparison"
    ]  # fmt: skip
    assert "best " in lines[3]
    assert " s a step after " in lines[3]
    assert "searching" not in captured.out
