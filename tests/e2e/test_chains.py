"""Chains and sweeps where one run is started after the other: directories, results, exit codes, what is left."""

import re
from pathlib import Path

import pytest

from realhf.cli import main
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ROOT, FinishedRun

pytestmark = pytest.mark.distributed

SFT = "experiments/sft.py"
FORKED = ["--launcher", "tests.e2e.forked:ForkedLauncher", "--num-workers", "1", "--evaluations", "100"]
SMALL = ["--steps", "1", "--batch-size", "8", "--no-evaluate"]
BROKEN = f"""
from dataclasses import dataclass, replace
from typing import ClassVar
from realhf.api import Update, auto
from realhf.rundir.run import load_experiment_class

Experiment = load_experiment_class({str(ROOT / SFT)!r})

class Missing(Update):
    implementation: ClassVar[str] = "broken_interface:BrokenInterface"

@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class Broken(Experiment):
    @property
    def rpcs(self):
        return [replace(call, interface_impl=Missing(**vars(call.interface_impl))) for call in super().rpcs]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return "--data-dir", str(tmp_path_factory.mktemp("sorting") / "data")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """An experiment whose worker raises in its first call."""
    (tmp_path / "broken.py").write_text(BROKEN)
    text = "class BrokenInterface:\n    def __init__(self, config):\n        pass\n\n"
    text += "    def train_step(self, model, batch, context):\n        raise ArithmeticError('it broke')\n"
    (tmp_path / "broken_interface.py").write_text(text)
    return tmp_path / "broken.py"


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in FinishedRun(run_dir).metrics]


def test_a_stage_starts_from_what_the_one_before_has_trained(data: tuple[str, str], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = ["run", SFT, *SMALL, *data, "--run-dir", str(first), *FORKED]
    words += ["--then", SFT, *SMALL, *data, "--model", str(first), "--run-dir", str(second)]
    assert main(words) == 0
    by_hand = quickly_finished(tmp_path / "hand", "sft", *SMALL, *data, "--model", first, "--num-workers", "1")
    assert losses(second) == losses(by_hand.path) != losses(first)


def test_nothing_begins_behind_a_stage_that_fails(
    data: tuple[str, str], broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = ["run", str(broken), *SMALL, *data, "--run-dir", str(first), *FORKED]
    assert main([*words, "--then", SFT, *SMALL, *data, "--model", str(first), "--run-dir", str(second)]) == 1
    text = capsys.readouterr().err
    assert "it broke" in text
    assert f"not started, since the stage before, {first}, has not ended well: {second}" in text
    assert not second.exists()


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ([SFT, "--lr", "nan"], "lr nan is not finite"),
        ([SFT, "--run-dir", "FIRST"], "two runs have --run-dir .*; give each its own"),
        ([SFT, "--run-dir", "DATA"], "the run directory .*data exists and is not empty"),
        (["nonesuch"], "'nonesuch' is neither a ready experiment nor a Python file"),
        ([SFT, "--launcher", "in-process"], "the stages of a chain have one launcher"),
    ],
)
def test_a_later_stage_that_is_wrong_is_told_before_the_first_begins(
    later: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").touch()
    first = tmp_path / "first"
    later = [{"FIRST": str(first), "DATA": str(tmp_path / "data")}.get(word, word) for word in later]
    assert main(["run", SFT, *SMALL, "--run-dir", str(first), *FORKED, "--then", *later]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not first.exists()


def test_a_sweep_compares_its_runs_in_one_page(
    data: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    assert main(["run", SFT, *SMALL, *data, "--run-dir", str(folder), "--seeds", "5,0", *FORKED]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["compare.html", "seed-0", "seed-5"]
    assert losses(folder / "seed-0") != losses(folder / "seed-5")
    by_hand = quickly_finished(tmp_path / "hand", "sft", *SMALL, *data, "--seed", "5", "--num-workers", "1")
    assert losses(folder / "seed-5") == losses(by_hand.path)
    assert "seed-5" in (folder / "compare.html").read_text()
    assert re.search(r"seed-5 +seed-0", capsys.readouterr().out)


def test_a_run_that_fails_does_not_end_the_sweep(
    data: tuple[str, str], broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = tmp_path / "sweep", (*data, *SMALL, *FORKED)
    assert main(["run", str(broken), "--run-dir", str(folder), "--sweep", "lr=1,2", *words]) == 1
    assert f"{folder}/lr-1 has ended with exit code 1\n{folder}/lr-2 has ended with" in capsys.readouterr().err
    assert (folder / "compare.html").exists()


def test_chains_and_sweeps_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", SFT, "--seeds", "2", "--then", SFT]) == 2
    assert main(["run", SFT, "--run-dir", str(tmp_path), "--resume", "--then", SFT]) == 2
    text = capsys.readouterr().err
    assert "a stage of a chain is one run: give --seeds and --sweep without --then" in text
    assert "--resume goes on with one run; resume each by itself" in text
