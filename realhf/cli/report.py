"""Writes RUN_DIR/report.html: metrics, predicted against measured times, the last steps on every worker,
the plan. Works while the run goes on and after it failed, and needs no network to be read.

example:
  realhf report runs/ppo-20260101-120000
"""

import argparse
from pathlib import Path

from realhf.rundir.paths import RunDirectory


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, whatever its state")


def execute(arguments: argparse.Namespace) -> int:
    from realhf.report.page import write_report  # plotly takes a while to import; the other commands need none

    print(write_report(RunDirectory(arguments.run_dir)))
    return 0
