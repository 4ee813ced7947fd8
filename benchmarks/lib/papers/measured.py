"""What is measured on this machine: a profile and a run of the main job's PPO, on two workers."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lib.common import ROOT
from lib.papers.rows import Row

from realhf.base.code_files import python_command
from realhf.report.run_data import read_run
from realhf.report.timeline import last_steps
from realhf.rundir.paths import RunDirectory

EXPERIMENT = str(ROOT / "experiments/ppo.py")
WORKERS = ("--num-workers", "2")
SMALL = ("--architecture.hidden-size", "32", "--architecture.intermediate-size", "64", "--batch-size", "8",
         "--ppo.max-new-tokens", "4")  # fmt: skip
FEW = ("--max-tokens", "64", "--repetitions", "1")  # of a profile
MODEL_TYPES, STEPS = 2, 6  # the actor's and the critic's


def rows(quick: bool) -> Iterator[Row]:
    size = SMALL if quick else ()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        _realhf(folder, "profile", EXPERIMENT, *WORKERS, *size, *(FEW if quick else ()))
        seconds = (time.perf_counter() - start) / MODEL_TYPES
        yield Row(figure="real-fig11-profiling", case="one model type", value=seconds, unit="s", kind="measured")
        run = Path(folder, "run")
        steps = ("--steps", str(3 if quick else STEPS), "--no-evaluate")
        _realhf(folder, "run", EXPERIMENT, *WORKERS, *size, *steps, "--run-dir", str(run))
        yield from device_time(run)


def device_time(run: Path) -> Iterator[Row]:
    """The phases of the last two steps of a run."""
    data = read_run(RunDirectory(run))
    assert data.plan
    timeline = last_steps(data.plan, data.events)
    assert timeline, "the run has no complete step"
    for phase in dict.fromkeys(segment.phase for segment in timeline.segments):
        share = 100 * timeline.share(phase)
        yield Row(figure="real-fig10-here", case=phase, value=share, unit="%", kind="measured")


def estimates() -> Iterator[Row]:
    """From the file of `benchmarks/estimator.py`: by the clock, as ReaL measured it."""
    for row in json.loads((ROOT / "benchmarks/results/estimator.json").read_text())["results"]:
        name, _, rest = row["case"].partition(" error by the clock")
        if rest:
            case = f"{name} error of 27 trials"
            yield Row(figure="real-fig11-estimates", case=case, value=100 * row["value"], unit="%", kind="measured")


def _realhf(folder: str, *words: str) -> None:
    """A command beside the checkout, so that it neither reads nor leaves profiles there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_DATA_HOME": folder}
    command = python_command("realhf.cli", *words)
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"realhf {' '.join(words)} failed:\n{done.stderr}")
