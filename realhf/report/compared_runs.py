"""Several runs in one HTML page: figures side by side, differences between the experiments, curves together."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.base.errors import UserError
from realhf.report.curves import EVALUATION, Curve, trends_of
from realhf.report.figures import runs_colours
from realhf.report.html import document
from realhf.report.run_data import RunData, read_run
from realhf.rundir.paths import RunDirectory

MISSING = "-"


def read_runs(paths: Sequence[Path]) -> dict[str, RunData]:
    """The runs by the names of their directories; by their paths where two have one name.

    Raises:
        UserError: a directory is not a run's, is given twice, or is the only one.
    """
    directories = [RunDirectory(path) for path in paths]
    if len(directories) < 2:
        raise UserError("one run cannot be compared; give two or more run directories")
    for i, directory in enumerate(directories):
        if directory in directories[:i]:
            raise UserError(f"{directory.path} is given twice; give each run once")
    names = [directory.path.name for directory in directories]
    return {
        directory.path.name if names.count(directory.path.name) == 1 else str(directory.path): read_run(directory)
        for directory in directories
    }


def facts_of(run: RunData) -> dict[str, str]:
    """The kind, state and speed of a run, in short, and its statistics."""
    step_s, tokens_per_s = run.median_step_s, run.tokens_per_s
    return {
        "state": run.state,
        "steps": str(run.metrics[-1]["step"] if run.metrics else 0),
        "devices": str(run.plan.num_devices) if run.plan else MISSING,
        "s/step (median)": MISSING if step_s is None else f"{step_s:.3g}",
        "tokens/s": MISSING if tokens_per_s is None else f"{tokens_per_s:,.0f}",
    } | {name: f"{value:.4g}" for name, value in _statistics(run)}


def side_by_side(runs: Mapping[str, RunData]) -> list[list[str]]:
    """Rows of `facts_of`: the name of a fact, and each run's."""
    facts = [facts_of(run) for run in runs.values()]
    names = dict.fromkeys(name for each in facts for name in each)
    return [[name, *(each.get(name, MISSING) for each in facts)] for name in names]


def differing_fields(runs: Mapping[str, RunData]) -> dict[str, list[str]]:
    """The fields of the experiments that are not the same in all runs, by dotted name, with each run's value."""
    fields = [dict(_flat(run.experiment.get("values", {}))) for run in runs.values()]
    names = dict.fromkeys(name for each in fields for name in each)
    rows = {name: [each.get(name, MISSING) for each in fields] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def comparison_page(runs: Mapping[str, RunData]) -> str:
    """The page as HTML, one file with all that it needs."""
    return document(
        "compare.html",
        title=f"{len(runs)} runs",
        runs=runs,
        colours=runs_colours(list(runs)),
        facts=side_by_side(runs),
        differing=[[name, *values] for name, values in differing_fields(runs).items()],
        charts=_charts(runs),
    )


def _charts(runs: Mapping[str, RunData]) -> tuple[dict[str, dict[str, Curve]], dict[str, dict[str, Curve]]]:
    """The charts to show first, and the others, with a curve for each run that has the statistic."""
    main: dict[str, dict[str, Curve]] = {}
    others: dict[str, dict[str, Curve]] = {}
    for name, run in runs.items():
        for charts, curves in zip((main, others), run.curves, strict=True):
            for statistic, curve in curves.items():
                charts.setdefault(statistic, {})[name] = curve
    return main, others


def _statistics(run: RunData) -> Iterator[tuple[str, float]]:
    """The newest values of evaluations, and the means over the last steps, which `realhf status` shows too."""
    for name, (_, values) in run.curves[0].items():
        known = [value for value in values if value is not None]
        if known and name.startswith(EVALUATION):
            yield name, known[-1]
    trends = trends_of(run.metrics)
    for trend in trends.statistics if trends else ():
        if trend.last is not None and trend.name != "tokens_per_s":
            yield trend.name, trend.last


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The fields of nested objects, by dotted name."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)
