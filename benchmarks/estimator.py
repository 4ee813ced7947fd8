"""How well the planner predicts: nine settings of the main job, three random plans each, two workers.

ReaL's estimator protocol (its evaluation, "at most 28 % apart over 27 trials"). The model types are
profiled in the same invocation. Plans are drawn at random from all options of every call, not
searched: a good plan is not easier to predict than a bad one. Responses always have full length: the
vocabulary is so large that the end token is hardly ever drawn from random weights.

A step of a trial is the mean of its steps by the clock, as in ReaL. A call counts with the median of its steps: how
many of the calls lie in the interval that was predicted for them, the middle 90 % of the planner's draws. What the
machine does beside is part of what an interval has to cover. `--seed` draws other plans: the error of a call beyond
its profile (`profiled_error` of a description) was set by the plans of seed 0, and is judged by others.
"""

import math
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lib.common import argument_parser, case, finish, realhf
from lib.pages import RUNS

from realhf.api.resolved import ResolvedExperiment
from realhf.dataflow.plan import ExecutionPlan, load_plan, save_plan
from realhf.planning.here import CPU
from realhf.planning.model.cluster import Cluster, device_meshes
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.options import options_on
from realhf.planning.planner import task_of
from realhf.planning.predict import predict
from realhf.planning.request import PlanRequest
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.run import load_experiment_class

MEASURES = (
    *RUNS,
    "realhf/algorithms/reward",
    "experiments/ppo.py",
)
EXPERIMENT = "experiments/ppo.py"
NUM_WORKERS = 2
STEPS = 5
PLANS_A_SETTING = 3
MAX_MICRO_BATCHES = 4
TARGET = 0.20
REAL_WORST = 0.28
LEVEL = 0.90  # part of the draws that an interval has in it
WIDEST = 2.5


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


@dataclass(frozen=True, kw_only=True)
class MeasuredCall:
    """A call of a trial: its prediction, interval and measured median, in seconds."""

    name: str
    predicted_s: float
    interval_s: tuple[float, float]
    measured_s: float

    @property
    def lies_inside(self) -> bool:
        return self.interval_s[0] <= self.measured_s <= self.interval_s[1]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Seconds of a step, as predicted and as measured, and its calls."""

    name: str
    predicted_s: float
    measured_s: float
    calls: Sequence[MeasuredCall]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the plans (default 1)")
    arguments = parser.parse_args()
    settings = SETTINGS[4:5] if arguments.quick else SETTINGS
    plans_a_setting = 1 if arguments.quick else PLANS_A_SETTING
    trials = []
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            realhf("profile", EXPERIMENT, "--force", "--num-workers", str(NUM_WORKERS), *setting.words())
            for i in range(plans_a_setting):
                plan = random_plan(setting, seed=arguments.seed * plans_a_setting + i)
                trials.append(trial(f"{setting}, plan {i + 1}", setting, plan, Path(folder) / f"{len(trials)}"))
    calls = [call for each in trials for call in each.calls]
    finish("estimator", [*over_all(trials), *map(row, trials), *interval_rows(calls)], arguments.json)


def random_plan(setting: Setting, seed: int) -> ExecutionPlan:
    """A plan that fits into memory, every call's option drawn by itself."""
    hardware = load_hardware(CPU)
    cluster = Cluster(devices_per_node=NUM_WORKERS, hardware=hardware)
    task = task_of(ResolvedExperiment(setting.experiment()), cluster, PlanRequest(offload=()))
    draw = random.Random(f"{setting} {seed}")
    while True:
        calls = {}
        for call in task.graph.calls.values():
            options = options_on(device_meshes(cluster), call, call.mini_batch_size(task.batch_size))
            calls[call.name] = draw.choice([o for o in options if o.micro_batches <= MAX_MICRO_BATCHES]).call_plan()
        prediction = predict(task, ExecutionPlan(num_devices=NUM_WORKERS, calls=calls, models=task.graph.models))
        if prediction.fits:
            return prediction.plan


def trial(name: str, setting: Setting, plan: ExecutionPlan, run_dir: Path) -> Trial:
    """Runs a plan; the first step warms up and is not counted."""
    save_plan(plan, run_dir.with_suffix(".json"))
    words = ["--plan", str(run_dir.with_suffix(".json")), "--steps", str(1 + STEPS), "--no-evaluate", *setting.words()]
    realhf("run", EXPERIMENT, "--num-workers", str(NUM_WORKERS), "--run-dir", str(run_dir), *words)
    steps = read_lines(run_dir / "metrics.jsonl", step_line).values
    ends = [max(call["end"] for call in step["calls"].values()) for step in steps]
    made = load_plan(run_dir / "plan.json")
    return Trial(
        name=name,
        predicted_s=made.predicted_step_s or 0.0,
        measured_s=statistics.mean(end - start for start, end in pairwise(ends)),
        calls=measured_calls(made, [step["calls"] for step in steps[1:]]),
    )


def measured_calls(plan: ExecutionPlan, steps: Sequence[Mapping[str, Any]]) -> list[MeasuredCall]:
    """The calls of a plan with the medians of what they took in `steps`."""
    assert plan.intervals
    return [
        MeasuredCall(
            name=name,
            predicted_s=call.predicted_s or 0.0,
            interval_s=plan.intervals.call_s[name],
            measured_s=statistics.median(step[name]["seconds"] for step in steps),
        )
        for name, call in plan.calls.items()
    ]


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


def over_all(trials: Sequence[Trial]) -> list[dict]:
    """Mean and worst error of the trials' steps, beside the worst that ReaL reports."""
    errors = [abs(trial.predicted_s / trial.measured_s - 1) for trial in trials]
    return [
        case(
            f"{name} error of {len(trials)} predicted steps",
            value,
            "of the measured step",
            baseline=REAL_WORST,
            ratio=REAL_WORST / value,
            target=TARGET,
            holds=value <= TARGET,
        )
        for name, value in (("mean", statistics.mean(errors)), ("worst", max(errors)))
    ]


def interval_rows(calls: Sequence[MeasuredCall]) -> list[dict]:
    """How many calls lie in their interval, of all and of each kind; how wide intervals are; how far calls are off."""
    results = [coverage(f"all {len(calls)} calls", calls)]
    for name in dict.fromkeys(call.name for call in calls):
        results.append(coverage(name, [call for call in calls if call.name == name]))
    width = statistics.median(call.interval_s[1] / call.interval_s[0] for call in calls)
    spread = math.sqrt(statistics.fmean(math.log(call.measured_s / call.predicted_s) ** 2 for call in calls))
    return [
        *results,
        case("upper over lower end of an interval (median)", width, "x", baseline=None, ratio=None,
             target=WIDEST, holds=width <= WIDEST),
        case("spread of measured / predicted, of calls", spread, "of a logarithm", baseline=None, ratio=None,
             target=0.0, holds=True),
    ]  # fmt: skip


def coverage(name: str, calls: Sequence[MeasuredCall]) -> dict:
    """How many of the calls lie in their interval; an interval has nine tenths of the draws in it."""
    share = sum(call.lies_inside for call in calls) / len(calls)
    return case(
        f"in their interval: {name}",
        share,
        "of the calls",
        baseline=LEVEL,
        ratio=share / LEVEL,
        target=LEVEL,
        holds=share >= LEVEL,
    )


if __name__ == "__main__":
    main()
