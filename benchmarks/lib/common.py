"""What every benchmark needs: its arguments, where it ran, and the result as a table and one JSON line."""

import argparse
import functools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from realhf.base.code_files import python_command

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments(description: str | None) -> argparse.Namespace:
    """`--quick` (under a minute) and `--json FILE`."""
    return argument_parser(description).parse_args()


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of those two, for more arguments of a benchmark."""
    commit(), is_dirty()  # the code that runs is that of now, whatever is committed meanwhile
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    return parser


def case_parser(description: str | None) -> argparse.ArgumentParser:
    """The same with `--case`, for benchmarks of several models and dtypes that take long together."""
    parser = argument_parser(description)
    words = "one model and dtype ('34M bfloat16'); with --json what the file has of others at this commit stays"
    parser.add_argument("--case", default="", metavar="WORDS", help=words)
    return parser


def case(
    name: str, value: float, unit: str, *, baseline: float | None, ratio: float | None, target: float, holds: bool
) -> dict:
    """One measured case; `ratio` says how many times better than the baseline of the same run. Both are None where
    there is nothing to compare with, or where one of the two is 0. `target`: 0 where there is none."""
    if not value or not baseline:
        ratio = None
    if ratio is not None and not math.isfinite(ratio):
        raise ValueError(f"{name}: ratio={ratio} is no number")
    return {
        "case": name,
        "value": value,
        "unit": unit,
        "baseline": baseline,
        "ratio": ratio,
        "target": target,
        "holds": holds,
    }


def finish(benchmark: str, results: list[dict], json_file: Path | None, *, is_part: bool = False) -> None:
    """Prints the table and, as the last line, the JSON object; writes it to `json_file` if given.

    The object names the code (`commit`, and `dirty` where it was changed since), the command and the hardware.
    `is_part`: what the file has of other cases, measured at the same commit, stays.
    """
    if is_part and json_file and json_file.exists():
        before, measured = json.loads(json_file.read_text()), {row["case"] for row in results}
        if before["commit"] == commit():
            results = [row for row in before["results"] if row["case"] not in measured] + results
    table = Table(title=benchmark, title_justify="left")
    for column in ("case", "value", "unit", "baseline", "ratio", "target", "holds"):
        table.add_column(column)
    for row in results:
        numbers = ["-" if row[key] is None else f"{row[key]:.4g}" for key in ("baseline", "ratio", "target")]
        table.add_row(row["case"], f"{row['value']:.4g}", row["unit"], *numbers, "yes" if row["holds"] else "no")
    Console(stderr=True).print(table)
    result: dict[str, Any] = {
        "benchmark": benchmark,
        "commit": commit(),
        "dirty": is_dirty(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "hardware": f"{os.cpu_count()} cores, {_processor()}, one thread a worker",
        "results": results,
    }
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def realhf(*words: str, threads: int = 1) -> None:
    """One `realhf` command with so many threads a worker, quietly; if it fails, the benchmark ends with what it
    said."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = python_command("realhf.cli", *words)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"realhf {' '.join(words)} failed:\n{done.stderr}")


@functools.cache
def commit() -> str:
    """Of the code that runs, short."""
    return _git("rev-parse", "--short", "HEAD") or "unknown"


@functools.cache
def is_dirty() -> bool:
    """Whether files differ from that commit, but for results: one benchmark writes them after the other."""
    return bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results"))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
