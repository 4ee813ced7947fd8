"""A step of a real size now and at another commit, in turns in one run: seconds, processor time, page faults.

`real_size_job.py` under `real_size_plan.json` in this checkout and in one of `--against COMMIT` (or of a folder with a
checkout whose C++ modules are built), A B A B: what else the machine does falls on both. Each checkout runs the job as
it has it, since what a job imports has moved; a commit from before there was one gets the first. The median of the
steps after the first counts. Processor time and page faults are those of all processes of a run, start and checkpoint
included; `ratio` is how many times less it is now.

With 0.5B about four minutes a turn, and a minute to build; 18 GiB of memory and 8 GB of disk. `--quick`: 4M.
Command: python benchmarks/real_size_in_turns.py --json benchmarks/results/real_size_in_turns.json
"""

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lib.common import ROOT, argument_parser, case, finish

from realhf.base.code_files import python_command
from realhf.rundir.lines import read_lines, step_line

BEFORE = "fcc0769"  # memory traffic as it was before it was looked at
TARGET = 1.3
PLAN = ROOT / "benchmarks/jobs/real_size_plan.json"
FIRST_JOB = "c209b31"  # the commit that has it
JOBS = ("benchmarks/jobs/real_size_job.py", "benchmarks/real_size_job.py")  # where it lies, and where it lay


@dataclass(frozen=True)
class Taken:
    """By one run: seconds of each step after the first; of all its processes, seconds and minor page faults."""

    steps_s: list[float]
    user_s: float
    system_s: float
    page_faults: float


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--against", default=BEFORE, metavar="COMMIT", help="a commit, or a folder with a checkout")
    parser.add_argument("--size", default="0.5B", help="of the job (default 0.5B)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each checkout (default 3)")
    parser.add_argument("--steps", type=int, default=4, help="of a run (default 4)")
    arguments = parser.parse_args()
    size, turns = ("4M", 1) if arguments.quick else (arguments.size, arguments.turns)
    now: list[Taken] = []
    before: list[Taken] = []
    with tempfile.TemporaryDirectory() as folder, checkout(arguments.against, Path(folder)) as other:
        for _ in range(turns):
            before.append(run(other, size, arguments.steps, Path(folder) / "run"))
            now.append(run(ROOT, size, arguments.steps, Path(folder) / "run"))
    finish("real_size_in_turns", compare(f"{size} against {arguments.against}", before, now), arguments.json)


@contextmanager
def checkout(of: str, folder: Path) -> Iterator[Path]:
    """The folder `of`, or a worktree of that commit below `folder` with its C++ modules, which goes afterwards."""
    if Path(of).is_dir():
        yield Path(of).resolve()
        return
    tree, built = folder / "checkout", folder / "built"
    subprocess.run(["git", "worktree", "add", "--detach", str(tree), of], cwd=ROOT, check=True, capture_output=True)
    try:
        if not any((tree / job).exists() for job in JOBS):
            first = (JOBS[-1], JOBS[-1].replace(".py", "_interface.py"))
            subprocess.run(["git", "checkout", "--quiet", FIRST_JOB, "--", *first], cwd=tree, check=True)
        install = ("pip", "install", "--quiet", "--no-deps", "--target", str(built), str(tree))
        subprocess.run(python_command(*install), check=True)
        for module in built.rglob("*.so"):
            shutil.copy(module, tree / module.relative_to(built))
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run(root: Path, size: str, steps: int, run_dir: Path) -> Taken:
    """The job under the package of `root`."""
    words = ("--plan", str(PLAN), "--size", size, "--steps", str(steps), "--run-dir", str(run_dir))
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    job = next(root / job for job in JOBS if (root / job).exists())
    command = python_command("realhf.cli", "run", str(job), *words)
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{root}: the run failed:\n{done.stderr}")
    lines = read_lines(run_dir / "metrics.jsonl", step_line).values
    shutil.rmtree(run_dir)
    return Taken(
        steps_s=[line["time_s"] for line in lines[1:]],
        user_s=end.ru_utime - start.ru_utime,
        system_s=end.ru_stime - start.ru_stime,
        page_faults=end.ru_minflt - start.ru_minflt,
    )


def compare(name: str, before: list[Taken], now: list[Taken]) -> list[dict]:
    """The median step, which has a target; user and system time and page faults, which are for reading."""
    medians = [statistics.median(s for taken in side for s in taken.steps_s) for side in (before, now)]
    rows = [("step", "s", TARGET, *medians)]
    for field, unit in (("user_s", "s"), ("system_s", "s"), ("page_faults", "faults")):
        values = [statistics.median(getattr(taken, field) for taken in side) for side in (before, now)]
        rows.append((f"{field.removesuffix('_s').replace('_', ' ')} of a run", unit, 1.0, *values))
    return [
        case(f"{name}: {what}", new, unit, baseline=old, ratio=old / new, target=target, holds=old / new >= target)
        for what, unit, target, old, new in rows
    ]


if __name__ == "__main__":
    main()
