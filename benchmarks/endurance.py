"""Endurance: after a thousand steps of a small main job every process has the memory and files it had at their start.

A launcher, a master and two workers are watched from outside (/proc): memory that is theirs alone (unique set size),
open file descriptors, threads. The median of steps 51 to 100 is held against that of the last fifty. The job has
reallocations, transfers, a model that follows another, two steps in flight, and checkpoints written beside training,
of which two are kept. Linux only.

A process may have 4 MiB more at the end. What the interpreter takes in one piece, once, is less: an arena for small
objects (1 MiB), or its table of interned strings, which it lays anew when names of files have filled it (0.9 MiB in the
master, after about 200 steps). A leak of 5 KB a step is more.

It computes in float64, whose products on the CPU keep nothing. For float32, oneDNN keeps the kernels of every number of
tokens that it has seen, up to 1,024 of some hundred kilobytes: there a worker grows until it has seen the lengths that
there are (`--dtype float32`: by 20 MB in 500 steps, and not in the 500 after them).
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from jobs.fault_job import PLAN
from lib.common import argument_parser, case, finish
from lib.fault_injection import processes

from realhf.base.code_files import python_command
from realhf.dataflow.plan import save_plan
from realhf.rundir.status import read_status

MEASURES = (
    "realhf/engine",
    ":!realhf/engine/megatron_*.py",
    ":!realhf/engine/transformers_backend.py",
    "realhf/launch",
    ":!realhf/launch/slurm",
    "realhf/master",
    "realhf/realloc",
    "realhf/rundir",
    "realhf/transport",
    "realhf/worker",
    "csrc/host",
    "benchmarks/jobs/fault_job.py",
    "benchmarks/jobs/fault_job_interface.py",
)
LAUNCHER = "launcher"
# What is on its way while a process starts, and what the first steps fill (caches, the pools of allocators).
WARM_UP_STEPS = 50
GROWTH_TARGET_MIB = 4.0
SAMPLE_EVERY_S = 0.1
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a process has after `step` steps."""

    step: int
    unique_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Medians of the steps after the warm-up, and of as many at the end."""

    name: str
    first: Sample
    last: Sample

    @property
    def growth_mib(self) -> float:
        return (self.last.unique_bytes - self.first.unique_bytes) / MIB

    @property
    def is_constant(self) -> bool:
        """Whether files and threads are as many as before."""
        return (self.first.descriptors, self.first.threads) == (self.last.descriptors, self.last.threads)


def compare(name: str, samples: Sequence[Sample], steps: int, warm_up: int) -> Comparison:
    """The steps after the warm-up beside the last ones."""
    first = [sample for sample in samples if warm_up < sample.step <= 2 * warm_up]
    last = [sample for sample in samples if steps - warm_up <= sample.step < steps]
    if not (first and last):
        sys.exit(f"{name} was sampled {len(first)} and {len(last)} times; take more --steps")
    return Comparison(name=name, first=_median(first), last=_median(last))


def _median(samples: Sequence[Sample]) -> Sample:
    return Sample(
        step=samples[0].step,
        unique_bytes=statistics.median_low(sample.unique_bytes for sample in samples),
        descriptors=statistics.median_low(sample.descriptors for sample in samples),
        threads=statistics.median_low(sample.threads for sample in samples),
    )


def watched_run(folder: Path, steps: int, dtype: str) -> Mapping[str, Sequence[Sample]]:
    """Samples of every process of a run of so many steps, the first ones first."""
    plan, run_dir, output = folder / "plan.json", folder / "run", folder / "output.txt"
    save_plan(PLAN, plan)
    command = list(python_command("realhf.cli", "run", str(Path(__file__).with_name("jobs") / "fault_job.py")))
    command += ["--run-dir", str(run_dir), "--plan", str(plan), "--steps", str(steps), "--reference-eta", "0.1"]
    command += ["--checkpoint-every", "10", "--keep-checkpoints", "2", "--dtype", dtype]
    samples: dict[str, list[Sample]] = defaultdict(list)
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=file, stderr=subprocess.STDOUT
        )
    found: dict[str, psutil.Process] = {}
    while launcher.poll() is None:
        status = read_status(run_dir / "status.json")
        if status is not None and status.state == "running" and status.step < steps:
            if not found:
                pids = processes(run_dir) | {LAUNCHER: launcher.pid}
                found = {name: psutil.Process(pid) for name, pid in pids.items()}
            for name, process in found.items():
                if (sample := _sample(process, status.step)) is not None:
                    samples[name].append(sample)
        time.sleep(SAMPLE_EVERY_S)
    if launcher.returncode:
        sys.exit(f"the run failed:\n{output.read_text()}")
    return samples


def _sample(process: psutil.Process, step: int) -> Sample | None:
    """None where the process has ended."""
    try:
        return Sample(
            step=step,
            unique_bytes=process.memory_full_info().uss,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
        )
    except psutil.Error:
        return None


def cases(comparisons: Sequence[Comparison]) -> list[dict]:
    """Two rows a process: by how much its memory grew, and its files and threads."""
    rows = []
    for found in comparisons:
        first, last = found.first, found.last
        rows.append(
            case(
                f"{found.name}: growth of its memory, from {first.unique_bytes / MIB:.1f} MiB",
                found.growth_mib,
                "MiB",
                baseline=None,
                ratio=None,
                target=GROWTH_TARGET_MIB,
                holds=found.growth_mib <= GROWTH_TARGET_MIB,
            )
        )
        rows.append(
            case(
                f"{found.name}: open files ({last.threads} threads, {first.threads} before)",
                last.descriptors,
                "files",
                baseline=first.descriptors,
                ratio=first.descriptors / last.descriptors,
                target=1.0,
                holds=found.is_constant,
            )
        )
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, help="default 1,000; with --quick 120")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64", help="of the models")
    arguments = parser.parse_args()
    steps = arguments.steps or (120 if arguments.quick else 1000)
    warm_up = min(WARM_UP_STEPS, steps // 4)
    with tempfile.TemporaryDirectory(prefix="realhf-endurance-") as folder:
        samples = watched_run(Path(folder), steps, arguments.dtype)
    comparisons = [compare(name, samples[name], steps, warm_up) for name in sorted(samples)]
    results = cases(comparisons)
    finish("endurance", results, arguments.json)
    sys.exit(not all(row["holds"] for row in results))


if __name__ == "__main__":
    main()
