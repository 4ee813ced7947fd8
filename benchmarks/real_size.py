"""Predicted against measured memory and time: GRPO on models of 4 M, 34 M and 0.5 billion parameters, two workers.

`real_size_job.py` under `real_size_plan.json` (tp 2); each size is profiled first, in the same invocation. Of memory
the most that each worker took in any step counts, beyond the program itself (`realhf/worker/memory_use.py`); the
prediction is to be at least that and at most 15 % more. Of time the steps after the first, at the
speed that the machine had while the profile was taken (`machine_speed.py`); the clock's is given too.

`--case 34M` takes one size. All of it takes about ten minutes and 16 GiB of memory, 0.5B eight of them; `--quick`
takes 4M alone. Command: python benchmarks/real_size.py --json benchmarks/results/real_size.json
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lib.common import case, case_parser, finish, realhf
from lib.machine_speed import Speed, speed_probes

from realhf.dataflow.plan import ExecutionPlan, load_plan
from realhf.rundir.lines import read_lines, step_line

JOB, PLAN = "benchmarks/jobs/real_size_job.py", "benchmarks/jobs/real_size_plan.json"
MEMORY_TARGET, TIME_TARGET = 1.15, 0.15


@dataclass(frozen=True)
class Setting:
    size: str
    dtype: str
    steps: int

    def __str__(self) -> str:
        return f"{self.size} {self.dtype}"

    @property
    def words(self) -> tuple[str, ...]:
        """The options of the experiment."""
        return ("--size", self.size, "--dtype", self.dtype)


SETTINGS = (
    Setting("4M", "bfloat16", steps=10),
    Setting("4M", "float32", steps=10),
    Setting("34M", "bfloat16", steps=6),
    Setting("34M", "float32", steps=6),
    Setting("0.5B", "bfloat16", steps=4),
)


def main() -> None:
    arguments = case_parser(__doc__).parse_args()
    settings = [s for s in SETTINGS if str(s).startswith(arguments.case)]
    results = []
    with tempfile.TemporaryDirectory() as folder, speed_probes() as speed:
        for setting in settings[:1] if arguments.quick else settings:
            results += cases(setting, Path(folder) / str(setting).replace(" ", "-"), speed, quick=arguments.quick)
    finish("real_size", results, arguments.json, is_part=bool(arguments.case))


def cases(setting: Setting, run_dir: Path, speed: Speed, *, quick: bool) -> list[dict]:
    """Profiles, runs, and compares with what the run's plan says."""
    start = time.time()
    extent = ("--max-tokens", "1024", "--repetitions", "2" if quick else "5")  # the job's micro-batch has 768 tokens
    realhf("profile", JOB, "--force", "--num-workers", "2", *extent, *setting.words)
    slowness = speed.slowness(start, time.time())
    words = ("--plan", PLAN, "--steps", str(setting.steps), "--run-dir", str(run_dir))
    realhf("run", JOB, *words, *setting.words)
    plan = load_plan(run_dir / "plan.json")
    steps = read_lines(run_dir / "metrics.jsonl", step_line).values
    ends = [max(call["end"] for call in step["calls"].values()) for step in steps]
    at_equal_speed = [(end - start) * slowness / speed.slowness(start, end) for start, end in pairwise(ends)]
    predicted_s = plan.predicted_step_s or 0.0
    return [
        *(memory_case(setting, plan, worker, steps) for worker in range(plan.num_devices)),
        time_case(f"{setting}: step", predicted_s, statistics.median(at_equal_speed)),
        time_case(f"{setting}: step by the clock", predicted_s, statistics.median(b - a for a, b in pairwise(ends))),
    ]


def memory_case(setting: Setting, plan: ExecutionPlan, worker: int, steps: list[dict]) -> dict:
    """The predicted peak of a worker against the largest measured one; `ratio` is predicted / measured."""
    assert plan.rationale is not None, "the run's plan has the reasons"
    predicted = next(
        memory.peak_bytes for memory in plan.rationale.memory if memory.devices[0] <= worker < sum(memory.devices)
    )
    measured = max(step["peak_bytes"][worker] for step in steps)
    ratio = predicted / measured
    return case(
        f"{setting}: memory of worker {worker}",
        predicted,
        "bytes",
        baseline=measured,
        ratio=ratio,
        target=MEMORY_TARGET,
        holds=1 <= ratio <= MEMORY_TARGET,
    )


def time_case(name: str, predicted_s: float, measured_s: float) -> dict:
    """`ratio` is predicted / measured."""
    ratio = predicted_s / measured_s
    holds = abs(ratio - 1) <= TIME_TARGET
    return case(name, predicted_s, "s", baseline=measured_s, ratio=ratio, target=TIME_TARGET, holds=holds)


if __name__ == "__main__":
    main()
