"""Draws the metrics of several runs in one page, with what differs in their experiments, and prints their
figures side by side. Works while runs go on and after they failed.

example:
  realhf compare runs/first runs/second --html compare.html
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from realhf.cli.output import table_of, wide_output


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the directory of a run")
    command.add_argument("--html", type=Path, default=Path("compare.html"), help="the page (default compare.html)")


def execute(arguments: argparse.Namespace) -> int:
    compare(arguments.run_dirs, arguments.html)
    return 0


def compare(run_dirs: Sequence[Path], page: Path) -> None:
    """Prints the figures of runs side by side, and writes the page. Raises UserError as `read_runs`."""
    from realhf.report.compared_runs import comparison_page, read_runs, side_by_side  # plotly takes a while to import

    runs, out = read_runs(run_dirs), wide_output()
    out.print(table_of("runs", "", *runs, rows=side_by_side(runs)))
    out.write(page, comparison_page(runs).encode())
