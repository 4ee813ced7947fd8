"""What it is worth that calls of two steps overlap: PPO with the actor on worker 0 and the critic on worker 1.

One thread a worker, two cores. While the critic trains on step t the actor, which is ready sooner, generates for step
t + 1. With rollouts one step old (`--staleness 1`) a copy of the actor generates on worker 0 while both train on
worker 1. Off is `max_steps_in_flight` 1 in the same plan; on and off take turns.

The first case of each pair is the median step, the second the share of generation's time in which training of a step
before was running. Command: OMP_NUM_THREADS=1 python benchmarks/overlap.py --json benchmarks/results/overlap.json
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.common import case, finish, parse_arguments, realhf

from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.rundir.lines import read_lines, step_line

EXPERIMENT = "benchmarks/jobs/overlap_job.py"
WARM_UP_STEPS = 2
ACTOR, CRITIC = CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
CALLS = {
    "actor_generate": ACTOR,
    "reference_inference": ACTOR,
    "reward_inference": ACTOR,
    "actor_train_step": ACTOR,
    "critic_inference": CRITIC,
    "critic_train_step": CRITIC,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A plan's calls, and what worker 1 is to train of step t while step t + 1 is generated."""

    name: str
    calls: Mapping[str, CallPlan]
    trainings: tuple[str, ...]
    words: tuple[str, ...] = ()


SETTINGS = (
    Setting(name="on-policy", calls=CALLS, trainings=("critic_train_step",)),
    Setting(
        name="one step stale",
        calls=CALLS | {"actor_train_step": CRITIC},
        trainings=("actor_train_step", "critic_train_step"),  # the planner chooses which comes first
        words=("--staleness", "1", "--critic-layers", "4"),
    ),
)


def main() -> None:
    arguments = parse_arguments(__doc__)
    turns, steps = (1, 6) if arguments.quick else (2, 10)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for setting in SETTINGS[:1] if arguments.quick else SETTINGS:
            results += compare(setting, Path(folder), turns, steps)
    finish("overlap", results, arguments.json)


def compare(setting: Setting, folder: Path, turns: int, steps: int) -> list[dict]:
    seconds: dict[int, list[float]] = {1: [], 2: []}
    shares: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(turns):
        for in_flight in seconds:
            lines = metrics(setting, in_flight, folder / f"{setting.name}-{in_flight}-{turn}".replace(" ", "-"), steps)
            seconds[in_flight] += [line["time_s"] for line in lines[WARM_UP_STEPS:]]
            shares[in_flight].append(overlapped_share(lines, setting.trainings))
    off_s, on_s = (statistics.median(seconds[in_flight]) for in_flight in (1, 2))
    off, on = (statistics.median(shares[in_flight]) for in_flight in (1, 2))
    return [
        case(
            f"{setting.name}: step, overlapping against not",
            on_s,
            "s",
            baseline=off_s,
            ratio=off_s / on_s,
            target=1.0,
            holds=off_s > on_s,
        ),
        case(
            f"{setting.name}: generation beside {' or '.join(setting.trainings)} of a step before",
            on,
            "share",
            baseline=off,
            ratio=on,
            target=0.5,
            holds=on >= 0.5 and off == 0,
        ),
    ]


def metrics(setting: Setting, in_flight: int, run_dir: Path, steps: int) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    plan = ExecutionPlan(num_devices=2, calls=dict(setting.calls), max_steps_in_flight=in_flight)
    save_plan(plan, run_dir.with_suffix(".json"))
    words = ("--plan", str(run_dir.with_suffix(".json")), "--steps", str(steps), "--run-dir", str(run_dir))
    realhf("run", EXPERIMENT, *words, *setting.words)
    return read_lines(run_dir / "metrics.jsonl", step_line).values


def overlapped_share(metrics: Sequence[dict[str, Any]], trainings: Sequence[str]) -> float:
    """The part of the time of all generation but the first in which one of `trainings` of a step before was running;
    they are on one worker, one after the other."""
    total = together = 0.0
    for step, line in enumerate(metrics[1:], start=1):
        generates = line["calls"]["actor_generate"]
        total += generates["end"] - generates["start"]
        for trains in (before["calls"][training] for before in metrics[:step] for training in trainings):
            together += max(0.0, min(generates["end"], trains["end"]) - max(generates["start"], trains["start"]))
    return together / total


if __name__ == "__main__":
    main()
