"""Several runs in one page: names, figures, fields that differ, curves that lie together."""

from pathlib import Path

import pytest

from realhf.cli import main
from realhf.report.compared_runs import comparison_page, differing_fields, facts_of, read_runs
from realhf.report.figures import curves_figure, runs_colours
from realhf.report.run_status import read_run_status
from realhf.rundir.paths import RunDirectory
from tests.unit.report.run_directories import good_run, metrics_line
from tests.unit.report.test_page import visible


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs that differ in a nested field, in speed, and in statistics that only the first has."""
    good_run(tmp_path / "first", values={"steps": 4, "ppo": {"kl_coef": 0.1, "keys": ["a"]}})
    slower = [metrics_line(step, kl=0.5 * step, time_s=4.0) for step in (1, 2)]
    good_run(tmp_path / "second", values={"steps": 4, "ppo": {"kl_coef": 0.2, "keys": ["a"]}}, metrics=slower)
    return tmp_path


def test_figures_and_fields_stand_side_by_side(folder: Path) -> None:
    runs = read_runs([folder / "first", folder / "second"])
    assert list(runs) == ["first", "second"]
    first, second = (facts_of(run) for run in runs.values())
    assert first == {
        "state": "finished", "steps": "4", "devices": "2", "s/step (median)": "2", "tokens/s": "1,250",
        "evaluation: accuracy": "0.75", "reward_mean": "0.875", "kl": "0.035", "actor_loss": "-0.1",
        "entropy": "3",
    }  # fmt: skip
    assert (second["steps"], second["s/step (median)"], second["kl"]) == ("2", "4", "1")
    assert second["tokens/s"] == "375"  # 3,000 tokens in 8 s
    assert "reward_mean" not in second
    assert differing_fields(runs) == {"ppo.kl_coef": ["0.1", "0.2"]}


def test_statistics_are_the_means_that_the_status_shows(folder: Path) -> None:
    """Over the last two of four steps: 0.75 and 1, of which the newest is not the mean."""
    shown = facts_of(read_runs([folder / "first", folder / "second"])["first"])
    trends = read_run_status(RunDirectory(folder / "first"), 1e9).trends
    assert trends is not None
    of_status = {trend.name: f"{trend.last:.4g}" for trend in trends.statistics if trend.name != "tokens_per_s"}
    assert of_status["reward_mean"] == "0.875"
    assert of_status.items() <= shown.items()


def test_a_field_that_one_experiment_lacks_differs(folder: Path) -> None:
    good_run(folder / "third", values={"steps": 4})
    rows = differing_fields(read_runs([folder / "first", folder / "third"]))
    assert rows == {"ppo.kl_coef": ["0.1", "-"], "ppo.keys": ["['a']", "-"]}


def test_curves_of_a_statistic_share_a_chart_in_the_colours_of_their_runs() -> None:
    colours = runs_colours(["first", "second"])
    assert len(set(runs_colours([str(i) for i in range(30)]).values())) == 30
    figure = curves_figure({"kl": {"second": ([1, 2], [1.0, 2.0])}, "loss": {"first": ([1], [3.0])}}, colours)
    assert [(line.name, line.line.color) for line in figure.data] == [
        ("second", colours["second"]), ("first", colours["first"]),
    ]  # fmt: skip
    assert [note.text for note in figure.layout.annotations] == ["kl", "loss"]  # the legend is the page's


def test_the_page_names_every_run_once_in_its_legend(folder: Path) -> None:
    page = folder / "page.html"
    page.write_text(comparison_page(read_runs([folder / "first", folder / "second"])))
    text = visible(page)
    assert "2 runs" in text
    assert "ppo.kl_coef 0.1 0.2" in text
    assert "reward_mean 0.875 -" in text
    assert page.read_text().count("&#9632;") == 2


def test_runs_of_one_name_are_told_apart_by_their_paths(folder: Path) -> None:
    (folder / "other").mkdir()
    good_run(folder / "other" / "first")
    runs = read_runs([folder / "first", folder / "other" / "first"])
    assert list(runs) == [str(folder / "first"), str(folder / "other" / "first")]


def test_the_command_prints_and_writes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["compare", "first", "second"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "s/step (median) 2 4" in printed
    assert "written to compare.html" in printed
    assert (folder / "compare.html").stat().st_size < 2.2e6


@pytest.mark.parametrize(
    ("runs", "complaint"),
    [
        (["first"], "one run cannot be compared; give two or more run directories"),
        (["first", "second", "first"], "first is given twice; give each run once"),
        (["first", "."], "is no run directory: it has no plan.json"),
    ],
)
def test_the_command_refuses(
    runs: list[str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["compare", *runs]) == 2
    assert complaint in capsys.readouterr().err
    assert not (folder / "compare.html").exists()
