"""The page `docs/papers.md`, from what the papers print and the rows of a result."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from lib.papers.published import Figure, Limit, Paper
from lib.papers.rows import Row

ROUNDING = 1e-5  # less is shown as 0
NO_PLAN = "no plan"

TITLE = """\
# The papers' figures, ours beside them

Tables and figures of the papers that this project follows, each with what is printed and what this project has. Every
number on this page is from `benchmarks/results/papers.json` or `benchmarks/published/*.yaml`, and the page is made from
them by one command (about ten minutes on two cores; `--quick` for a look):

```sh
python benchmarks/papers.py
```
"""

NOTHING = "The planner has changed since that was last run, so there are no figures at the moment.\n"

LABELS = """\
Ours is simulated: predicted by the [cost model](cost_model.md) and the simulator of the planner, the same on every
machine; plans are searched with a fixed seed and number of evaluations. What is measured stands on
[measurements.md](measurements.md). *Error* is ours over the published value, less 1; for a bound it says whether it
holds. A dash: no value is printed. *No plan*: none fits into memory, or no division of the batch or the model is legal.
Nothing was fitted to the values of this page but the constants of the H100, to ReaL's tables of calls; where these
tables are shown, each is predicted from the others alone.
"""

LIMITS = """\
What holds for all of it:

- **Only latencies get worse with size**: there is no contention for links, no topology above the node, no stragglers,
  no failures. Flat weak scaling is in part that assumption.
- **A search picks plans that the model flatters**: gains are likelier to be over- than underestimated.
- **Other systems are their layouts**: DeepSpeed-Chat and OpenRLHF are placements with ZeRO-3 for the engine of the
  section. Their own kernels and overheads are not modelled.
- **No constant of the A100 was measured**: its description takes the H100's fractions of peaks and its software costs.
- All responses have the maximal length, as in the papers' measurements.
"""


def prose(text: str) -> str:
    """A paragraph in lines of the width that pages have."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def of_results(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of a result (`case_of` of `benchmarks/papers.py` wrote them)."""
    names = [field.name for field in fields(Row)]
    return [Row(**{name: row["row"][name] for name in names}) for row in results]


def page(papers: Sequence[Paper], result: Mapping[str, Any] | None) -> str:
    """The whole page. `result` is the object of `benchmarks/results/papers.json`, None where that is missing."""
    if result is None:
        return "\n".join([TITLE.replace("`benchmarks/results/papers.json`", "the command's results"), NOTHING])
    rows = of_results(result["results"])
    parts = [TITLE, prose(LABELS) + "\n", LIMITS]
    for paper in papers:
        parts += [f"## {paper.name}\n", prose(f"{paper.source}. {paper.testbed}") + "\n"]
        parts += [section(figure, [row for row in rows if row.figure == figure.id]) for figure in paper.figures]
    return "\n".join(parts)


def section(figure: Figure, rows: Sequence[Row]) -> str:
    """Heading, setting, table, picture and explanation of a figure."""
    blocks = [f"### {figure.title}", prose(figure.setting)]
    if figure.says:
        blocks.append(prose(f"The paper: {figure.says}"))
    if figure.not_reproduced:
        blocks.append(prose(f"**Not reproduced.** {figure.not_reproduced}"))
    if alone := [row for row in rows if not row.column]:
        blocks.append("\n".join(beside_published(figure, alone)))
    if columns := [row for row in rows if row.column]:
        blocks.append("\n".join(side_by_side(columns)))
    blocks += [f"![{figure.title}](images/papers/{name}.svg)" for name in figure.pictures]
    if figure.why:
        blocks.append(prose(f"What explains the distance: {figure.why}"))
    return "\n\n".join(blocks) + "\n"


def beside_published(figure: Figure, rows: Sequence[Row]) -> Iterator[str]:
    yield "| | published | ours | error |"
    yield "|---|---|---|---|"
    for row in rows:
        known = figure.values.get(row.case)
        yield f"| {row.case} | {published(known, row.unit)} | {shown(row)} | {error(known, row.value)} |"


def side_by_side(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each case, its columns in their order."""
    columns = list(dict.fromkeys(row.column for row in rows))
    unit = rows[0].unit
    yield f"| {unit} | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for case in dict.fromkeys(row.case for row in rows):
        values = {row.column: number(row.value) for row in rows if row.case == case}
        yield f"| {case} | " + " | ".join(values.get(column, "") for column in columns) + " |"


def number(value: float | None) -> str:
    if value is None:
        return NO_PLAN
    if abs(value) < ROUNDING:
        return "0"
    if value == int(value) and abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def shown(row: Row) -> str:
    return f"{number(row.value)} {row.unit}".strip() if row.value is not None else NO_PLAN


def published(known: float | Limit | None, unit: str) -> str:
    match known:
        case None:
            return "-"
        case Limit(at_most=bound) if bound is not None:
            return f"at most {number(bound)} {unit}".strip()
        case Limit(at_least=bound):
            return f"at least {number(bound)} {unit}".strip()
        case value:
            return f"{number(value)} {unit}".strip()


def error(known: float | Limit | None, value: float | None) -> str:
    if known is None or value is None:
        return "-"
    if isinstance(known, Limit):
        return "holds" if known.holds(value) else "does not hold"
    return f"{100 * (value / known - 1):+.0f} %" if known else ("0 %" if value == known else "-")
