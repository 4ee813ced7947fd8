"""The page `docs/papers.md`, from what the papers print and the rows of a result."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lib.papers.published import Figure, Limit, Paper, distance, reproduces
from lib.papers.rows import Row

ROUNDING = 1e-5  # less is shown as 0
NO_PLAN, NOT_APPLICABLE, NOT_EXPLAINED = "no plan", "not applicable", "not explained"
BANDS = (0.05, 0.25, 0.5)

TITLE = """\
# The papers' figures, ours beside them

Tables and figures of the papers that this project follows, each with what is printed and what this project has. Every
number on this page is from `benchmarks/results/papers.json` or `benchmarks/published/*.yaml`, and the page is made from
them by one command (about twenty minutes on two cores; `--quick` for a look):

```sh
python benchmarks/papers.py
```
"""

NOTHING = "The planner has changed since that was last run, so there are no figures at the moment.\n"

LABELS = """\
Ours is simulated: predicted by the [cost model](cost_model.md) and the simulator of the planner, the same on every
machine; plans are searched with a fixed seed and number of evaluations, with the choices of computation open. What is
measured stands on [measurements.md](measurements.md). *Error* is ours over the published value, less 1; for a bound it
says whether it holds. A dash: no value is printed. *No plan*: none fits into memory, or no division of the batch or the
model is legal. *Not applicable*: a value is published, and there is none of ours. A value reproduces if it is within
25 % of the published one. Where it does not, its row has what explains it, or *not explained*. Nothing was fitted to
the values of this page but the constants of the H100, to ReaL's tables of calls; where these tables are shown, each is
predicted from the others alone.
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
    parts = [TITLE, "\n".join(summary(papers, rows)) + "\n", prose(LABELS) + "\n", LIMITS]
    for paper in papers:
        parts += [f"## {paper.name}\n", prose(f"{paper.source}. {paper.testbed}") + "\n"]
        parts += [section(figure, [row for row in rows if row.figure == figure.id]) for figure in paper.figures]
    return "\n".join(parts)


@dataclass
class Count:
    """Of published values: how many are printed, not applicable, points within each of BANDS, bounds and those that
    hold, and those that are not reproduced for no known reason."""

    printed: int = 0
    not_applicable: int = 0
    points: int = 0
    within: list[int] = field(default_factory=lambda: [0] * len(BANDS))
    bounds: int = 0
    hold: int = 0
    not_explained: int = 0

    def __add__(self, other: "Count") -> "Count":
        pairs = zip(self.within, other.within, strict=True)
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "within"}
        return Count(**sums, within=[a + b for a, b in pairs])

    def line(self, name: str) -> str:
        within = " | ".join(map(str, self.within))
        numbers = f"{self.printed} | {self.not_applicable} | {self.points} | {within} | {self.hold} of {self.bounds}"
        return f"| {name} | {numbers} | {self.not_explained} |"


def count(figure: Figure, rows: Sequence[Row]) -> Count:
    """Over the printed values of a figure; what is derived from them does not count."""
    ours, found = {row.case: row.value for row in rows if row.figure == figure.id and not row.column}, Count()
    for case, known in figure.values.items():
        if case in figure.derived:
            continue
        found.printed, value = found.printed + 1, ours.get(case)
        if value is None:
            found.not_applicable += 1
            continue
        if isinstance(known, Limit):
            found.bounds, found.hold = found.bounds + 1, found.hold + known.holds(value)
        else:
            found.points += 1
            found.within = [n + (distance(known, value) <= band) for n, band in zip(found.within, BANDS, strict=True)]
        found.not_explained += not reproduces(known, value) and case not in figure.reasons
    return found


def summary(papers: Sequence[Paper], rows: Sequence[Row]) -> Iterator[str]:
    """What reproduces: by paper, and by section."""
    of = {figure.id: count(figure, rows) for paper in papers for figure in paper.figures}
    sums = {paper.name: sum((of[figure.id] for figure in paper.figures), Count()) for paper in papers}
    heading = "printed values | not applicable | points | within 5 % | 25 % | 50 % | bounds that hold | not explained |"
    yield from ("## What reproduces", "")
    yield from (f"| paper | {heading}", "|---" * 9 + "|")
    for paper in papers:
        yield sums[paper.name].line(f"{paper.name}: {paper.source}")
    yield from (sum(sums.values(), Count()).line("all"), "")
    yield from (f"| section | {heading}", "|---" * 9 + "|")
    for paper in papers:
        for figure in paper.figures:
            if of[figure.id].printed:
                yield of[figure.id].line(f"{paper.name}, {figure.title}")


def section(figure: Figure, rows: Sequence[Row]) -> str:
    """Heading, setting, table, picture and explanation of a figure."""
    blocks = [f"### {figure.title}", prose(figure.setting)]
    if figure.says:
        blocks.append(prose(f"The paper: {figure.says}"))
    if figure.not_reproduced:
        blocks.append(prose(f"**Not reproduced.** {figure.not_reproduced}"))
    missing = figure.values.keys() - {row.case for row in rows if not row.column}
    rows = [
        *rows,
        *(Row(figure=figure.id, case=case, value=None, unit="") for case in figure.values if case in missing),
    ]
    if alone := [row for row in rows if not row.column]:
        blocks.append("\n".join(beside_published(figure, alone)))
    if columns := [row for row in rows if row.column]:
        blocks.append("\n".join(side_by_side(columns)))
    blocks += [f"![{figure.title}](images/papers/{name}.svg)" for name in figure.pictures]
    if figure.why:
        blocks.append(prose(f"What explains the distance: {figure.why}"))
    return "\n\n".join(blocks) + "\n"


def beside_published(figure: Figure, rows: Sequence[Row]) -> Iterator[str]:
    yield "| | published | ours | error | why |"
    yield "|---|---|---|---|---|"
    for row in rows:
        known = figure.values.get(row.case)
        printed = published(known, row.unit) + (" (derived)" if row.case in figure.derived else "")
        ours = NOT_APPLICABLE if known is not None and row.value is None else shown(row)
        yield f"| {row.case} | {printed} | {ours} | {error(known, row.value)} | {why(figure, row)} |"


def why(figure: Figure, row: Row) -> str:
    """What explains a value that does not reproduce, or that nothing does."""
    known = figure.values.get(row.case)
    if known is None or row.value is None or reproduces(known, row.value):
        return ""
    return " ".join(figure.reasons.get(row.case, NOT_EXPLAINED).split())


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
