"""How well the planner predicts: nine settings of the main job, three random plans each, two workers.

ReaL's estimator protocol (its evaluation, "at most 28 % apart over 27 trials"). The model types are
profiled in the same invocation. Plans are drawn at random from all options of every call, not
searched: a good plan is not easier to predict than a bad one. Responses always have full length: the
vocabulary is so large that the end token is hardly ever drawn from random weights.

A step is measured at the speed that the machine had while the profile was taken: see `machine_speed.py`. The errors
against the clock are given too.
"""

import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lib.common import case, finish, parse_arguments, realhf
from lib.machine_speed import Speed, speed_probes

from realhf.dataflow.plan import ExecutionPlan, load_plan, save_plan
from realhf.planning.here import CPU
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.options import call_options
from realhf.planning.planner import task_of
from realhf.planning.predict import predict
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.run import load_experiment_class

EXPERIMENT = "experiments/ppo.py"
NUM_WORKERS = 2
STEPS = 5
PLANS_A_SETTING = 3
MAX_MICRO_BATCHES = 4
TARGET = 0.20


@dataclass(frozen=True)
class Setting:
    hidden_size: int
    batch_size: int
    new_tokens: int

    @property
    def model(self) -> dict[str, int]:
        """Fields of the experiment's model."""
        return {
            "hidden_size": self.hidden_size, "intermediate_size": 8 * self.hidden_size // 3, "vocab_size": 2048
        }  # fmt: skip

    def experiment(self) -> Any:
        default = load_experiment_class(EXPERIMENT)()
        return replace(
            default,
            architecture=replace(default.architecture, **self.model),
            batch_size=self.batch_size,
            ppo=replace(default.ppo, max_new_tokens=self.new_tokens),
        )

    def words(self) -> list[str]:
        """The options of the experiment."""
        fields = [word for name, value in self.model.items() for word in (f"--architecture.{name}", str(value))]
        return [*fields, "--batch-size", str(self.batch_size), "--ppo.max-new-tokens", str(self.new_tokens)]

    def __str__(self) -> str:
        return f"hidden {self.hidden_size}, batch {self.batch_size}, {self.new_tokens} new tokens"


# Each size with each batch, each length with each size and with each batch.
SETTINGS = [
    Setting(hidden, batch, (8, 16, 32)[(i + j) % 3])
    for i, hidden in enumerate((96, 192, 288))
    for j, batch in enumerate((32, 64, 128))
]


@dataclass(frozen=True)
class Trial:
    """Seconds of a step: as predicted, as measured at the speed of the profile, and by the clock."""

    name: str
    predicted_s: float
    measured_s: float
    clock_s: float


def main() -> None:
    arguments = parse_arguments(__doc__)
    settings = SETTINGS[4:5] if arguments.quick else SETTINGS
    plans_a_setting = 1 if arguments.quick else PLANS_A_SETTING
    trials = []
    with tempfile.TemporaryDirectory() as folder, speed_probes() as speed:
        for setting in settings:
            start = time.time()
            realhf("profile", EXPERIMENT, "--force", "--num-workers", str(NUM_WORKERS), *setting.words())
            slowness = speed.slowness(start, time.time())
            for i in range(plans_a_setting):
                plan, run_dir = random_plan(setting, seed=i), Path(folder) / f"{len(trials)}"
                trials.append(trial(f"{setting}, plan {i + 1}", setting, plan, run_dir, speed, slowness))
    finish("estimator", [*map(row, trials), *over_all(trials)], arguments.json)


def random_plan(setting: Setting, seed: int) -> ExecutionPlan:
    """A plan that fits into memory, every call's option drawn by itself."""
    hardware = load_hardware(CPU)
    cluster = Cluster(devices_per_node=NUM_WORKERS, hardware=hardware)
    task = task_of(setting.experiment(), cluster)
    draw = random.Random(f"{setting} {seed}")
    while True:
        calls = {}
        for call in task.graph.calls.values():
            options = call_options(call, task.batch_size, cluster)
            calls[call.name] = draw.choice([o for o in options if o.micro_batches <= MAX_MICRO_BATCHES]).call_plan()
        prediction = predict(task, ExecutionPlan(num_devices=NUM_WORKERS, calls=calls, models=task.graph.models))
        if prediction.fits:
            return prediction.plan


def trial(name: str, setting: Setting, plan: ExecutionPlan, run_dir: Path, speed: Speed, slowness: float) -> Trial:
    """Runs a plan; the first step warms up and is not counted. `slowness`: of the machine during the profile."""
    save_plan(plan, run_dir.with_suffix(".json"))
    words = ["--plan", str(run_dir.with_suffix(".json")), "--steps", str(1 + STEPS), "--no-evaluate", *setting.words()]
    realhf("run", EXPERIMENT, "--num-workers", str(NUM_WORKERS), "--run-dir", str(run_dir), *words)
    steps = read_lines(run_dir / "metrics.jsonl", step_line).values
    ends = [max(call["end"] for call in step["calls"].values()) for step in steps]
    at_equal_speed = [(end - start) * slowness / speed.slowness(start, end) for start, end in pairwise(ends)]
    return Trial(
        name,
        predicted_s=load_plan(run_dir / "plan.json").predicted_step_s or 0.0,
        measured_s=statistics.mean(at_equal_speed),
        clock_s=statistics.mean(end - start for start, end in pairwise(ends)),
    )


def row(trial: Trial) -> dict:
    """A trial as a case: `ratio` is predicted / measured."""
    ratio = trial.predicted_s / trial.measured_s
    return case(
        trial.name,
        trial.predicted_s,
        "s",
        baseline=trial.measured_s,
        ratio=ratio,
        target=TARGET,
        holds=abs(ratio - 1) <= TARGET,
    )


def over_all(trials: list[Trial]) -> list[dict]:
    """Mean and worst error of the trials."""
    errors = [abs(trial.predicted_s / trial.measured_s - 1) for trial in trials]
    by_clock = [abs(trial.predicted_s / trial.clock_s - 1) for trial in trials]
    figures = {
        "mean error": statistics.mean(errors),
        "worst error": max(errors),
        "mean error by the clock": statistics.mean(by_clock),
        "worst error by the clock": max(by_clock),
    }
    return [
        case(
            f"{name} (baseline: the worst that ReaL reports)",
            value,
            "share of the measured step",
            baseline=0.28,
            ratio=0.28 / value,
            target=TARGET,
            holds=value <= TARGET,
        )
        for name, value in figures.items()
    ]


if __name__ == "__main__":
    main()
