"""The first hour on a machine with a GPU, in under ten minutes: what works, what does not, and what to do about it.

The steps come in the order in which one rests on another: driver and packages, one GPU, two GPUs, `realhf profile`,
PPO with predicted beside measured seconds and memory, benchmarks. Each has a deadline, and leaves no process behind.
The first failure ends the check with the last lines of the step's log and a remedy; `--go-on` takes the later steps
too. The exit code is 1 if a step failed.

The folder OUT holds all that an issue needs: logs, results, profiles, `gpu_check.json`, and the run directories without
keys and checkpoints. The last line is the command that packs it.

It needs no installation where `PYTHONPATH` names the checkout, and its C++ modules were built in place
(`python setup.py build_ext --inplace`). `--cpu` takes the same steps in small on a CPU, to see that they run.

Command: python scripts/gpu_check.py
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.cli.output import table_of, wide_output
from realhf.launch.devices import in_words
from realhf.machine.gpu_kernels import WITHOUT
from realhf.machine.gpus import VISIBLE, Gpu, driver_version, visible_gpus
from realhf.machine.torch_build import torch_cuda_version
from realhf.planning.model.hardware import GIB
from realhf.report.run_data import call_times, plan_of
from realhf.report.worker_memory import worker_memory
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.paths import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
PPO = "experiments/ppo.py"
LAST_LINES = 15
STEP = "whole step, fullest worker"
VERSIONS = ("realhf", "torch", "flash-attn", "triton", "megatron-core", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
ENVIRONMENT = ("CUDA", "NCCL", "TORCH", "PYTORCH", "REALHF", "OMP")  # variables that begin otherwise may be secret
# Folders of a run directory that stay behind empty: they are secret, or large.
LEFT_OUT = ("keys", "rendezvous", "checkpoints")


@dataclass(frozen=True)
class Step:
    """A command, run in the checkout.

    remedy: for a failure whose log names none. skipped: why this machine cannot take it. run_dir: where it trains.
    is_shown: its output is short enough to be printed.
    """

    name: str
    command: tuple[str, ...]
    deadline_s: float
    remedy: str
    skipped: str = ""
    run_dir: Path | None = None
    is_shown: bool = False
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The end of a step. `result`: "passed", "skipped: WHY", "not tried", or the failure; `log`: its file in the
    folder; `calls`: of PPO, predicted and measured."""

    name: str
    result: str
    command: tuple[str, ...]
    seconds: float = 0.0
    log: str = ""
    remedy: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return self.result not in ("passed", "not tried") and not self.result.startswith("skipped")


def steps(out: Path, gpus: Sequence[Gpu], *, on_cpu: bool) -> list[Step]:
    """In the order in which one rests on another. All deadlines together are under ten minutes."""
    here = {VISIBLE: ""} if on_cpu else {}
    alone = {VISIBLE: gpus[0].token} if gpus else here
    cpu = ("--cpu",) if on_cpu else ()
    no_gpu, one_gpu = "no GPU" if on_cpu else "", "one GPU" if len(gpus) < 2 and not on_cpu else ""
    one, two, wire = ("one process", "two processes", "gloo") if on_cpu else ("one GPU", "two GPUs", "NCCL")
    file_it = "file an issue with this folder"

    def part(name: str, deadline_s: float, remedy: str, part: str, env: dict[str, str], skipped: str = "") -> Step:
        command = (sys.executable, "scripts/gpu_parts.py", part, *cpu)
        return Step(name, command, deadline_s, remedy, environment=env, skipped=skipped, is_shown=True)

    def tests(name: str, deadline_s: float, remedy: str, *files: str) -> Step:
        command = python_command("pytest", *(f"tests/gpu/test_{file}.py" for file in files), "-p", "no:cacheprovider")
        return Step(name, command, deadline_s, remedy, environment=alone, skipped=no_gpu)

    def realhf(name: str, deadline_s: float, remedy: str, *words: str, run_dir: Path | None = None) -> Step:
        command = python_command("realhf.cli", *words)
        return Step(name, command, deadline_s, remedy, environment=here, run_dir=run_dir)

    def profile(dtype: str) -> Step:
        words = ("profile", PPO, "--num-workers", "1", "--dtype", dtype, "--force")
        return realhf(f"profile in {dtype}", 55, unprofiled, *words)

    def ppo(dtype: str) -> Step:
        run_dir = out / f"ppo-{dtype}"
        small = ("--steps", "2", "--batch-size", "16", "--mini-batches", "1") if on_cpu else ("--steps", "20")
        remedy = f"read {run_dir.name}/logs and docs/troubleshooting.md; try --ppo.decode-graphs off"
        words = ("run", PPO, "--num-workers", "1", "--dtype", dtype, "--run-dir", str(run_dir), *small)
        return realhf(f"PPO in {dtype}", 45, remedy, *words, run_dir=run_dir)

    def benchmark(case: str) -> Step:
        small = ("--quick", "--device", "cpu") if on_cpu else ()
        command = (sys.executable, "benchmarks/on_gpu.py", case, "--json", str(out / f"{case}.json"), *small)
        remedy = f"it needs tens of GB, for 1.5 billion parameters; where the GPU has them, {file_it}"
        return Step(f"{case} benchmark", command, 40, remedy, environment=alone)

    errors = "see `nvidia-smi` and `dmesg | grep Xid` for errors, and for other processes on the GPU"
    attention = f"leave out the kernel that the failed tests name: {WITHOUT}=triton,flash-attn,varlen; {file_it}"
    memory = f'leave out what failed: decode_graphs="off", backend="native", or plans without offload; {file_it}'
    graphs = f'run with GenerationOptions(decode_graphs="off") (--ppo.decode-graphs off for PPO); {file_it}'
    nccl = "NCCL_DEBUG=INFO says more, `nvidia-smi topo -m` shows the links, NCCL_P2P_DISABLE=1 goes around them"
    unprofiled = f"plans do without profiles, with worse predictions: --go-on takes the later steps; {file_it}"
    return [
        part("driver and packages", 30, "see that `nvidia-smi` answers; restart the machine", "packages", here),
        part(one, 30, errors, "one", alone),
        tests("attention kernels", 50, attention, "attention"),
        tests("graphs and memory", 70, memory, "decode_graphs", "waiting", "offload", "realloc", "megatron"),
        part(f"{two}: {wire} in graphs", 45, graphs, "graphs", here, one_gpu),
        part(f"{two}: groups, messages, reallocation", 50, nccl, "groups", here, one_gpu),
        realhf("doctor", 40, "`realhf doctor` prints a line for each check", "doctor", "--runs-dir", str(out)),
        *(profile(dtype) for dtype in ("float32", "bfloat16")),
        *(ppo(dtype) for dtype in ("float32", "bfloat16")),
        benchmark("generation"),
        benchmark("training"),
    ]


def run(step: Step, out: Path) -> Outcome:
    """Runs a step to its end or its deadline. Leaves no process, no key and no checkpoint of it behind."""
    log = out / f"{re.sub('[^a-z0-9]+', '-', step.name.lower())}.log"
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **step.environment},
        )  # fmt: skip
        try:
            code = process.wait(step.deadline_s)
            result = "passed" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            result = f"not done within {step.deadline_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a process may outlive the one that started it
            process.wait()
            for folder in (step.run_dir / name for name in LEFT_OUT) if step.run_dir else ():
                if folder.exists():
                    shutil.rmtree(folder)
                    folder.mkdir()  # commands that read runs look for it
    seconds, text = round(time.monotonic() - started, 1), log.read_text(errors="replace")
    for profile in re.findall(r"^written to (/\S+/profiles/\S+\.json)$", text, re.MULTILINE):
        shutil.copy(profile, out)
    is_good = result == "passed"
    remedy = "" if is_good else "; ".join(re.findall(r"^fail .*?; remedy: (.+)$", text, re.MULTILINE)) or step.remedy
    calls = predicted_and_measured(step.run_dir) if step.run_dir and is_good else []
    return Outcome(step.name, result, step.command, seconds, log.name, remedy, calls)


def predicted_and_measured(run_dir: Path) -> list[dict[str, Any]]:
    """Seconds (medians) and peak bytes of each call of a run, then of a step. No plan predicts bytes of a call."""
    directory, damaged = RunDirectory.open(run_dir), list[str]()
    plan, lines = plan_of(directory, damaged), read_lines(directory.metrics, step_line).values
    assert plan is not None, damaged  # the run has just ended well
    rows = [(time.call, time.predicted_s, time.measured_s) for time in call_times(plan, lines)]
    peaks = {
        name: max((line["calls"][name]["peak_bytes"] for line in lines if name in line["calls"]), default=0)
        for name, *_ in rows
    }
    workers = worker_memory(plan, lines)
    peaks[STEP] = max(worker.measured_bytes for worker in workers)
    predicted = {STEP: max(worker.predicted.peak_bytes for worker in workers if worker.predicted)}
    rows.append((STEP, plan.predicted_step_s, statistics.median(line["time_s"] for line in lines)))
    keys = ("call", "predicted_s", "measured_s", "predicted_bytes", "measured_bytes")
    return [dict(zip(keys, (*row, predicted.get(row[0]), peaks[row[0]]), strict=True)) for row in rows]


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that matter on GPUs."""
    found = {"python": platform.python_version(), "CUDA of torch": torch_cuda_version() or "none"}
    for name in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def hardware(gpus: Sequence[Gpu]) -> str:
    """The GPUs of a run on this machine and their driver, or that there is none."""
    if not gpus:
        return "no GPU"
    return f"{in_words(gpus)} of {gpus[0].memory_bytes / GIB:.0f} GiB, driver {driver_version()}"


def commit() -> str:
    words = ("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def tell(step: Step, outcome: Outcome, out: Path) -> None:
    """Prints the end of a step: for a failure its last lines and the remedy, for PPO predicted beside measured."""
    console = wide_output()
    console.say(f"  {outcome.result} after {outcome.seconds:g} s")
    lines = [f"    {line}" for line in (out / outcome.log).read_text(errors="replace").splitlines()]
    if step.is_shown and not outcome.has_failed:
        console.say(*lines)
    if outcome.has_failed:
        console.say(f"  the last lines of {outcome.log}:", *(lines[-LAST_LINES:] or ["    (nothing)"]))
        console.say(f"  what to do: {outcome.remedy}")
    if outcome.calls:
        columns = ("call", "predicted s", "measured s", "predicted MiB", "measured MiB")
        rows = ([str(call["call"]), *map(cell, list(call.values())[1:])] for call in outcome.calls)
        console.print(table_of("", *columns, rows=rows))


def cell(number: float | None) -> str:
    """Seconds, or bytes, which are integers, in MiB."""
    return "-" if number is None else f"{number:.3f}" if isinstance(number, float) else f"{number / 2**20:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new folder for all results (default runs/gpu-check-TIME)")
    parser.add_argument("--go-on", action="store_true", help="take the later steps after a failure, too")
    parser.add_argument("--cpu", action="store_true", help="the same steps in small on a CPU; says nothing about GPUs")
    arguments = parser.parse_args()
    try:
        gpus = () if arguments.cpu else visible_gpus()
        found = hardware(gpus)
        if not gpus and not arguments.cpu:
            parser.error("this machine has no GPU; --cpu takes the steps in small on a CPU")
    except UserError as error:
        gpus, found = (), str(error)  # of the driver, or of the choice of GPUs: the first step fails with it
    out = (arguments.out or Path("runs") / time.strftime("gpu-check-%Y%m%d-%H%M%S")).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"--out {out} exists and is not empty; give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the step's processes end too
    console = wide_output()
    about = {
        "commit": commit(), "hardware": found, "on_cpu": arguments.cpu, "versions": versions(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)},
    }  # fmt: skip
    outcomes: list[Outcome] = []
    for step in steps(out, gpus, on_cpu=arguments.cpu):
        if step.skipped:
            outcomes.append(Outcome(step.name, f"skipped: {step.skipped}", step.command))
        elif any(outcome.has_failed for outcome in outcomes) and not arguments.go_on:
            outcomes.append(Outcome(step.name, "not tried", step.command))
        else:
            console.say(f"{step.name}, at most {step.deadline_s:g} s ...")
            outcomes.append(run(step, out))
            tell(step, outcomes[-1], out)
        result = about | {"steps": [asdict(outcome) for outcome in outcomes]}
        (out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    title = f"{found}; commit {about['commit']}"
    rows = ((outcome.name, outcome.result, f"{outcome.seconds:g}") for outcome in outcomes)
    console.print(table_of(title, "step", "result", "seconds", rows=rows, words=2))
    console.say("for an issue, pack the folder (it has no keys and no checkpoints):")
    console.say(shlex.join(["tar", "-czf", f"{out.name}.tar.gz", "-C", str(out.parent), out.name]))
    return int(any(outcome.has_failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
