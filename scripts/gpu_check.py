"""All that a machine with a GPU is to be asked, in under ten minutes: doctor, tests, PPO and benchmarks, with a table.

Each step has a deadline of its own, and the next one follows whatever became of it. What they print lies in OUT, with
the benchmarks' results and `gpu_check.json`, which names the code and the hardware; profiles lie where `realhf profile`
puts them. The exit code is 1 if a step failed.

It needs no installation where `PYTHONPATH` names the checkout, and its C++ modules were built in place
(`python setup.py build_ext --inplace`). `--cpu` takes the same steps in small on a CPU, to see that they run.

Command: python scripts/gpu_check.py --out benchmarks/results/gpu
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from realhf.base.code_files import python_command
from realhf.machine.gpus import driver_version, visible_gpus

ROOT = Path(__file__).resolve().parents[1]
PPO = "experiments/ppo.py"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, run in the checkout."""

    name: str
    command: tuple[str, ...]
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a step. `result`: "passed", or what went wrong; `log`: what it printed."""

    name: str
    result: str
    seconds: float
    log: str
    command: tuple[str, ...]


def steps(out: Path, *, on_cpu: bool) -> list[Step]:
    """In the order of what rests on what. All deadlines together are under ten minutes."""

    def python(name: str, deadline_s: float, *words: str) -> Step:
        return Step(name=name, command=(sys.executable, *words), deadline_s=deadline_s)

    def module(name: str, deadline_s: float, *words: str) -> Step:
        return Step(name=name, command=python_command(*words), deadline_s=deadline_s)

    def realhf(name: str, deadline_s: float, *words: str) -> Step:
        return module(name, deadline_s, "realhf.cli", *words)

    def ppo(dtype: str, steps: int) -> Step:
        words = ("--steps", str(steps), "--dtype", dtype, "--run-dir", str(out / f"ppo-{dtype}"))
        small = ("--batch-size", "16", "--mini-batches", "1") if on_cpu else ()
        return realhf(f"PPO in {dtype}", 75, "run", PPO, "--num-workers", "1", *words, *small)

    def benchmark(case: str) -> Step:
        small = ("--quick", "--device", "cpu") if on_cpu else ()
        file = str(out / f"{case}.json")
        return python(f"{case} benchmark", 75, "benchmarks/on_gpu.py", case, "--json", file, *small)

    count = 2 if on_cpu else 20
    return [
        realhf("doctor", 100, "doctor", "--runs-dir", str(out), *(() if on_cpu else ("--gpu",))),
        module("tests", 100, "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"),
        realhf("profile", 75, "profile", PPO, "--num-workers", "1"),
        ppo("float32", count),
        ppo("bfloat16", count),
        benchmark("generation"),
        benchmark("training"),
    ]


def run(step: Step, out: Path) -> Outcome:
    """Runs a step to its end or its deadline; no process of it is left behind."""
    log = out / f"{step.name.lower().replace(' ', '-')}.log"
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            code = process.wait(step.deadline_s)
            result = "passed" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            result = f"not done within {step.deadline_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = round(time.monotonic() - started, 1)
    return Outcome(name=step.name, result=result, seconds=seconds, log=str(log), command=step.command)


def hardware() -> str:
    """The GPUs of a run on this machine and their driver, or that there is none."""
    gpus = visible_gpus()
    return f"{', '.join(gpu.name for gpu in gpus)}, driver {driver_version()}" if gpus else "no GPU"


def commit() -> str:
    words = ("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu", help="where all of it goes")
    parser.add_argument("--cpu", action="store_true", help="the same steps in small on a CPU; says nothing about GPUs")
    arguments = parser.parse_args()
    found = hardware()
    if not arguments.cpu and found == "no GPU":
        parser.error("this machine has no GPU; --cpu takes the steps in small on a CPU")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    outcomes = []
    for step in steps(out, on_cpu=arguments.cpu):
        console.print(f"{step.name}, at most {step.deadline_s:g} s ...")
        outcomes.append(run(step, out))
        console.print(f"  {outcomes[-1].result} after {outcomes[-1].seconds:g} s")
    result = {"commit": commit(), "hardware": found, "on_cpu": arguments.cpu, "steps": [asdict(o) for o in outcomes]}
    (out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title=f"{found}; commit {result['commit']}", title_justify="left")
    for column in ("step", "result", "seconds", "log"):
        table.add_column(column)
    for outcome in outcomes:
        table.add_row(outcome.name, outcome.result, f"{outcome.seconds:g}", Path(outcome.log).name)
    console.print(table)
    return int(any(outcome.result != "passed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
