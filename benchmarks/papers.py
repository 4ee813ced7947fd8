"""The figures of the papers, ours beside them: makes `docs/papers.md`, its pictures and its results file.

    python benchmarks/papers.py

`benchmarks/published/*.yaml` has what the papers print. Ours is simulated, and the same on every machine. With
`--quick` there are a few small cells, and nothing is written unless `--out FOLDER` says where.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lib.common import ROOT, argument_parser, case, finish
from lib.papers import assumptions, hybridflow, osdp, real, real_app
from lib.papers.cells import Cell
from lib.papers.page import page
from lib.papers.published import Limit, load_papers, reproduces
from lib.papers.rows import Row
from lib.papers.simulated import Simulated, simulate_cell

MEASURES = (
    "realhf/planning",
    ":!realhf/planning/explain",
    "realhf/architecture",
    "realhf/geometry",
    "realhf/realloc/plan",
    "csrc/search",
    "benchmarks/lib/breakdown.py",
    "benchmarks/lib/hybridflow_transition.py",
    "benchmarks/lib/papers",
    ":!benchmarks/lib/papers/page.py",
    ":!benchmarks/lib/papers/published.py",
    ":!benchmarks/lib/papers/rows.py",
    ":!benchmarks/lib/papers/svg.py",
    "benchmarks/published/hardware",
    "scripts/calibrate_cost_model.py",
)
PAGE, PICTURES, RESULT = Path("docs/papers.md"), Path("docs/images/papers"), Path("benchmarks/results/papers.json")
MODULES = (real, real_app, hybridflow, assumptions)

T = TypeVar("T")
R = TypeVar("R")


def simulated(pool: ProcessPoolExecutor, quick: bool) -> dict[Cell, Simulated]:
    """Every cell once."""
    cells = list(dict.fromkeys(cell for module in MODULES for cell in module.cells(quick)))
    cells.sort(key=lambda cell: -cell.num_devices)  # the longest first
    return dict(watched("simulated", cells, pool.map(simulate_cell, cells)))


def strategies(pool: ProcessPoolExecutor, quick: bool) -> dict[osdp.Setting, osdp.Columns]:
    settings = osdp.settings(quick)
    return dict(watched("strategies", settings, pool.map(osdp.run, settings)))


def watched(what: str, work: Sequence[T], results: Iterable[R]) -> Iterator[tuple[T, R]]:
    """Each piece of work with its result; what is done is said on standard error."""
    for i, pair in enumerate(zip(work, results, strict=True), 1):
        print(f"{what}: {i} of {len(work)}", file=sys.stderr, flush=True)
        yield pair


def rows(done: Mapping[Cell, Simulated], found: osdp.Found, quick: bool) -> Iterator[Row]:
    for module in MODULES:
        yield from module.rows(done, quick)
    yield from osdp.rows(found)


def case_of(row: Row, known: float | Limit | None) -> dict[str, Any]:
    """A row as a case: the baseline is the published value or bound, which the row holds to (`reproduces`). A value of
    0 stands for no plan, too."""
    published = known.number if isinstance(known, Limit) else known
    value = row.value or 0.0
    return {
        **case(
            " ".join(filter(None, [row.figure, row.case, row.column])), value, row.unit,
            baseline=published, ratio=value / published if published else None, target=published or 0.0,
            holds=row.value is not None and (known is None or reproduces(known, row.value)),
        ),
        "row": {"figure": row.figure, "case": row.case, "value": row.value, "unit": row.unit, "column": row.column},
    }  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write below this folder (default: the checkout)")
    parser.add_argument("--page", action="store_true", help="only make the page from the results file that is there")
    arguments = parser.parse_args()
    quick, papers = arguments.quick, load_papers()
    out = arguments.out or (None if quick else ROOT)
    result_file = arguments.json or (out / RESULT if out else None)
    if not arguments.page:
        with ProcessPoolExecutor(max_workers=2) as pool:
            done, found = simulated(pool, quick), strategies(pool, quick)
        values = {figure.id: figure.values for paper in papers for figure in paper.figures}
        cases = [case_of(row, values[row.figure].get(row.case)) for row in rows(done, found, quick)]
        if result_file:
            result_file.parent.mkdir(parents=True, exist_ok=True)
        finish("papers", cases, result_file)
    if out and result_file:
        if not arguments.page:
            draw(done, found, quick, out / PICTURES)
        result = json.loads(result_file.read_text()) if result_file.is_file() else None
        (out / PAGE).parent.mkdir(parents=True, exist_ok=True)
        (out / PAGE).write_text(page(papers, result))
        if result is None:
            shutil.rmtree(out / PICTURES, ignore_errors=True)


def draw(done: Mapping[Cell, Simulated], found: osdp.Found, quick: bool, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for module in (real, real_app, hybridflow):
        module.pictures(done, quick, folder)
    osdp.pictures(found, folder)


if __name__ == "__main__":
    main()
