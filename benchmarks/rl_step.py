"""A step of GRPO and of PPO beside TRL's trainers on the CPU: tokens/s, where our step goes, the machine's limit.

Two Llamas (4 M and 34 M parameters, 2,048 tokens) in float32, 64 responses of 64 tokens to prompts of 32 (GRPO: eight
to each), four optimizer steps, a reference model, a rule for a reward. The cores are the same: TRL has one process with
two threads; ours has two workers with a thread each or one worker with two, whichever its planner predicts to be faster
after a profile (`python benchmarks/lib/trl_steps.py` says what TRL is given). The two sides take turns, and the ratio
is the median over the turns of the medians of their steps. Beside it: the phases of our step; the share of the
machine's limit, which are the products of the step at the rate of a large product in both threads (prompts of a group
counted once; for decoding, what must be read if that takes longer); the predicted step beside the measured one.

`--case "grpo 4M float32"` takes one of the settings. `--quick` takes that one, one turn, a plan by rule and no profile.
TRL is the one that is installed, 1.12: PPO is in none that is later.
Command: python benchmarks/rl_step.py --json benchmarks/results/rl_step.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from lib.common import case, case_parser, finish, realhf
from lib.pages import RUNS

from realhf.dataflow.plan import CallPlan, ExecutionPlan, load_plan, save_plan
from realhf.rundir.lines import read_lines, step_line

sys.path.insert(0, str(Path(__file__).parent / "jobs"))

from rl_step_job import BATCH, GROUP, NEW_TOKENS, PROMPT_TOKENS, SIZES, VOCABULARY, RLStepJob, ensure_data

MEASURES = (
    *RUNS,
    "benchmarks/jobs/rl_step_job.py",
    "benchmarks/jobs/rl_step_job_interface.py",
    "benchmarks/lib/trl_steps.py",
)
JOB = "benchmarks/jobs/rl_step_job.py"
TRL = Path(__file__).parent / "lib" / "trl_steps.py"
CORES = 2
PREDICTION_TARGET = 0.15
LIMIT_TARGET = 0.5
RESPONSE_TOKENS = BATCH * NEW_TOKENS


@dataclass(frozen=True)
class Setting:
    """`target`: how many times TRL's tokens/s. `ours` and `theirs`: steps of a turn, the first of each not counted."""

    algorithm: str
    size: str
    dtype: str
    target: float
    ours: int
    theirs: int
    turns: int

    def __str__(self) -> str:
        return f"{self.algorithm} {self.size} {self.dtype}"

    @property
    def job(self) -> RLStepJob:
        return RLStepJob(algorithm=self.algorithm, size=self.size, dtype=self.dtype)

    @property
    def words(self) -> tuple[str, ...]:
        """The options of the experiment."""
        return ("--algorithm", self.algorithm, "--size", self.size, "--dtype", self.dtype)


SETTINGS = (
    Setting("grpo", "4M", "float32", target=3.0, ours=8, theirs=5, turns=3),
    Setting("ppo", "4M", "float32", target=3.0, ours=8, theirs=5, turns=3),
    Setting("grpo", "34M", "float32", target=2.6, ours=4, theirs=3, turns=2),
)


@dataclass(frozen=True)
class Cores:
    """How ours has the cores: workers of `threads` threads each."""

    workers: int

    @property
    def threads(self) -> int:
        return CORES // self.workers

    def __str__(self) -> str:
        return f"{self.workers} worker{'s' * (self.workers > 1)} x {self.threads} thread{'s' * (self.threads > 1)}"


@dataclass(frozen=True)
class Turn:
    """Seconds of a step of each side, and of the calls of ours; `trl`: their version."""

    ours_s: float
    theirs_s: float
    calls_s: dict[str, float]
    trl: str


def main() -> None:
    arguments = case_parser(__doc__).parse_args()
    chosen = [s for s in SETTINGS if str(s).startswith(arguments.case)]
    with tempfile.TemporaryDirectory() as folder:
        data = ensure_data(Path(folder) / "data")
        results = [
            row
            for setting in (chosen[:1] if arguments.quick else chosen)
            for row in cases(setting, Path(folder) / str(setting).replace(" ", "-"), data, arguments)
        ]
    finish("rl_step", results, arguments.json, is_part=bool(arguments.case))


def cases(setting: Setting, folder: Path, data: Path, arguments: argparse.Namespace) -> Iterator[dict]:
    folder.mkdir()
    plan, cores = by_rule(setting, folder) if arguments.quick else planned(setting, folder, data)
    turns, rates = [], [machine_rates(setting.dtype)]
    for i in range(1 if arguments.quick else setting.turns):
        ours_s, calls_s = our_steps(setting, folder / f"run-{i}", plan, cores, data)
        theirs_s, version = their_step_s(setting, data)
        turns.append(Turn(ours_s, theirs_s, calls_s, version))
        rates.append(machine_rates(setting.dtype))
    ours_s, theirs_s = (statistics.median(getattr(turn, side) for turn in turns) for side in ("ours_s", "theirs_s"))
    ratio = statistics.median(turn.theirs_s / turn.ours_s for turn in turns)
    yield case(
        f"{setting}: response tokens, {cores}, beside TRL {turns[0].trl}",
        RESPONSE_TOKENS / ours_s,
        "tokens/s",
        baseline=RESPONSE_TOKENS / theirs_s,
        ratio=ratio,
        target=setting.target,
        holds=ratio >= setting.target,
    )
    for name, seconds in phases(turns).items():
        yield case(f"{setting}: {name}", seconds, "s", baseline=ours_s, ratio=ours_s / seconds, target=0.0, holds=True)
    flops, bandwidth = (max(rate[i] for rate in rates) for i in range(2))
    limit = limit_s(setting, flops, bandwidth)
    yield case(
        f"{setting}: share of the machine's limit",
        limit / ours_s,
        f"of {flops / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s",
        baseline=limit / theirs_s,
        ratio=ratio,
        target=LIMIT_TARGET,
        holds=limit / ours_s >= LIMIT_TARGET,
    )
    predicted_s = load_plan(plan).predicted_step_s
    if predicted_s is not None:
        error = predicted_s / ours_s
        yield case(
            f"{setting}: predicted step against the measured one",
            predicted_s,
            "s",
            baseline=ours_s,
            ratio=error,
            target=PREDICTION_TARGET,
            holds=abs(error - 1) <= PREDICTION_TARGET,
        )


def by_rule(setting: Setting, folder: Path) -> tuple[Path, Cores]:
    """All calls data-parallel on two workers."""
    call = CallPlan(devices=(0, CORES), dp=CORES)
    plan = ExecutionPlan(num_devices=CORES, calls={each.name: call for each in setting.job.rpcs})
    save_plan(plan, folder / "plan.json")
    return folder / "plan.json", Cores(CORES)


def planned(setting: Setting, folder: Path, data: Path) -> tuple[Path, Cores]:
    """The searched plan that is predicted to be the fastest, with either use of the cores, each profiled first."""
    found = []
    for cores in (Cores(2), Cores(1)):
        workers = ("--num-workers", str(cores.workers))
        words = (*workers, *setting.words, "--data-dir", str(data))
        realhf("profile", JOB, "--force", "--max-tokens", "2048", *words, threads=cores.threads)
        plan = folder / f"plan-{cores.workers}.json"
        realhf("plan", JOB, "--output", str(plan), *words, threads=cores.threads)
        found.append((load_plan(plan).predicted_step_s or float("inf"), plan, cores))
    _, plan, cores = min(found, key=lambda each: each[0])
    return plan, cores


def our_steps(setting: Setting, run_dir: Path, plan: Path, cores: Cores, data: Path) -> tuple[float, dict[str, float]]:
    """Median seconds of a step and of its calls, without the first."""
    words = ("--plan", str(plan), "--steps", str(setting.ours), "--run-dir", str(run_dir), "--data-dir", str(data))
    realhf("run", JOB, "--num-workers", str(cores.workers), *words, *setting.words, threads=cores.threads)
    steps = read_lines(run_dir / "metrics.jsonl", step_line).values
    ends = [max(call["end"] for call in step["calls"].values()) for step in steps]
    calls = {
        name: statistics.median(step["calls"][name]["seconds"] for step in steps[1:]) for name in steps[0]["calls"]
    }
    return statistics.median(after - before for before, after in pairwise(ends)), calls


def their_step_s(setting: Setting, data: Path) -> tuple[float, str]:
    """Median seconds of a step of TRL, without the first, and its version."""
    words = (setting.algorithm, setting.size, setting.dtype, str(setting.theirs), str(data))
    environment = {**os.environ, "OMP_NUM_THREADS": str(CORES)}
    done = subprocess.run(
        [sys.executable, str(TRL), *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{TRL.name} {' '.join(words)} failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(found["step_s"][1:]), found["version"]


def phases(turns: list[Turn]) -> dict[str, float]:
    """Seconds of our step: calls by kind; the rest is what remains of the step, below 0 where calls overlap."""
    kinds = {"generate": "_generate", "inference": "_inference", "train": "_train_step"}
    found = {
        kind: statistics.median(
            sum(seconds for name, seconds in turn.calls_s.items() if name.endswith(suffix)) for turn in turns
        )
        for kind, suffix in kinds.items()
    }
    return found | {"the rest": statistics.median(t.ours_s for t in turns) - sum(found.values())}


def limit_s(setting: Setting, flops: float, bandwidth: float) -> float:
    """Products at the rate of large ones; while decoding, what must be read a step if that takes longer.

    6 FLOP a weight and token in training, 2 in other passes (Kaplan et al., 2020, section 2.1); attention is left out.
    """
    shape, item = SIZES[setting.size], 4 if setting.dtype == "float32" else 2
    layers = shape.num_layers * (4 * shape.hidden_size**2 + 3 * shape.hidden_size * shape.intermediate_size)
    head = shape.hidden_size * VOCABULARY
    prompts = BATCH // GROUP if setting.algorithm == "grpo" else BATCH
    read_prompts = 2 * layers * prompts * PROMPT_TOKENS
    responses = BATCH * NEW_TOKENS
    actor = read_prompts + 2 * (layers + head) * responses  # a forward pass over all tokens, with the head on responses
    critic = read_prompts + 2 * layers * responses
    passes = actor + 3 * actor  # the reference; training
    if setting.algorithm == "ppo":
        passes += critic + 3 * critic
    decode = 2 * (layers + head) * BATCH / flops
    kv = 2 * shape.num_layers * shape.hidden_size * item
    steps = (
        max(decode, ((layers + head) * item + kv * BATCH * (PROMPT_TOKENS + step)) / bandwidth)
        for step in range(NEW_TOKENS)
    )
    return (read_prompts + passes) / flops + sum(steps)


def machine_rates(dtype: str) -> tuple[float, float]:
    """FLOP/s of a large product and bytes/s of a sum over more than the caches hold, on all cores."""
    torch.set_num_threads(CORES)
    x, weight = (torch.randn(1024, 1024).to(getattr(torch, dtype)) for _ in range(2))
    large = torch.ones(64 << 20)
    return 2 * 1024**3 / best_s(lambda: x @ weight), large.nbytes / best_s(large.sum)


def best_s(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(once() for _ in range(20))


if __name__ == "__main__":
    main()
