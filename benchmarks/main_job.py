"""PPO on this machine: the searched plan against plans by rule, and each against its prediction.

The baseline is the best plan by rule that `realhf plan --compare` shows, by prediction; the heuristic (all calls alike
on all devices) runs too. The plans run in turn, several times each, in one invocation, so that what else the machine
does falls on all. `--quick` takes fewer steps.
"""

import statistics
import tempfile
from pathlib import Path

from lib.common import case, finish, parse_arguments, realhf
from lib.pages import RUNS

from realhf.api import ExecutionPlan, save_plan
from realhf.api.resolved import ResolvedExperiment
from realhf.planning.here import CPU
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.planner import search_for, task_of
from realhf.planning.presets import evaluate_presets
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
WARM_UP_STEPS = 2
PREDICTION_TARGET = 0.20  # largest error of the predicted step that counts as good
SAME_SPEED = 0.95  # where the search can do no better than a rule, the times of equal plans differ by this much


def main() -> None:
    arguments = parse_arguments(__doc__)
    rounds, steps = (1, 6) if arguments.quick else (3, 16)
    realhf("profile", EXPERIMENT, "--force", "--num-workers", str(NUM_WORKERS))
    plans = make_plans()
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for name, plan in plans.items():
                seconds[name] += step_seconds(Path(folder) / f"{name}-{turn}", plan, steps)
    finish("main_job", compare(plans, {n: statistics.median(s) for n, s in seconds.items()}), arguments.json)


def make_plans() -> dict[str, ExecutionPlan]:
    """The searched plan, and by their names the heuristic one and the one predicted to be the best of all by rule."""
    hardware = load_hardware(CPU)
    cluster = Cluster(devices_per_node=NUM_WORKERS, hardware=hardware)
    experiment = ResolvedExperiment(load_experiment_class(EXPERIMENT)())
    task = task_of(experiment, cluster, PlanRequest(offload=()))
    assert task.costs.profiled, "the profile was just made"
    rules = {
        result.name: result.prediction for result in evaluate_presets(task) if result.prediction and not result.problem
    }
    best = min(rules, key=lambda name: rules[name].step_s)
    return {"searched": search_for(task).plan, **{name: rules[name].plan for name in (best, "heuristic")}}


def step_seconds(run_dir: Path, plan: ExecutionPlan, steps: int) -> list[float]:
    """Measured seconds of every step after the first few."""
    plan_file = run_dir.with_suffix(".json")
    save_plan(plan, plan_file)
    words = ["run", EXPERIMENT, "--plan", str(plan_file), "--steps", str(steps), "--no-evaluate"]
    realhf(*words, "--num-workers", str(plan.num_devices), "--run-dir", str(run_dir))
    return [line["time_s"] for line in read_lines(run_dir / "metrics.jsonl", step_line).values][WARM_UP_STEPS:]


def compare(plans: dict[str, ExecutionPlan], measured: dict[str, float]) -> list[dict]:
    """The searched plan's time against each plan's by rule, the best one first, and each one's prediction against its
    time."""
    cases = []
    for name in [name for name in plans if name != "searched"]:
        ratio = measured[name] / measured["searched"]
        cases.append(
            case(
                f"step, searched plan against {name}",
                measured["searched"],
                "s",
                baseline=measured[name],
                ratio=ratio,
                target=SAME_SPEED,
                holds=ratio >= SAME_SPEED,
            )
        )
    for name, plan in plans.items():
        predicted = plan.predicted_step_s or 0.0
        error = abs(predicted / measured[name] - 1)
        cases.append(
            case(
                f"predicted step, {name} plan, against the measured one",
                predicted,
                "s",
                baseline=measured[name],
                ratio=predicted / measured[name],
                target=PREDICTION_TARGET,
                holds=error <= PREDICTION_TARGET,
            )
        )
    return cases


if __name__ == "__main__":
    main()
