"""Whether features that a search chooses win where they are chosen: twelve settings on this machine, two simulated.

In each setting the search, with everything open, chooses a feature: recomputation, sharding, modes of operators
beside ZeRO-1 and full sharding of all, chunks of a pipeline, sequence parallelism, a KV cache with less room than all
sequences need, rollouts by older weights, several steps in flight; models in host memory in the simulated ones, since
the workers of one machine share the host's memory. The plan before is that of the same search without the feature. Both
are run, where they fit into the limit on a device's memory: a setting holds if the plan before is slower by a tenth or
more as predicted, or does not fit; the chosen plan's measured step lies in its 90 % interval; and the plan before is
slower as measured, too. With a smaller KV cache sequences are also preempted as predicted, within a factor of 1.5, and
the step is within 15 % of its prediction. The models are profiled first, except for `--quick`.

A row's value is the chosen plan's measured step and its baseline that of the plan before (none: it does not fit).
Command: python benchmarks/features.py --json benchmarks/results/features.json
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from jobs.rl_step_job import ensure_data
from lib.common import argument_parser, case, finish, realhf
from lib.pages import RUNS

from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.dataflow.plan import CallCompute, ExecutionPlan, load_plan, save_plan
from realhf.lifecycle.request import experiment_of
from realhf.planning import options
from realhf.planning.clusters import clusters_of
from realhf.planning.explain.comparison import describe
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.hardware import GIB
from realhf.planning.planner import search_for, task_of
from realhf.planning.predict import preemptions
from realhf.planning.request import DevicesRequest, Measured, PlanRequest, SearchBudget
from realhf.planning.task import PlanningTask
from realhf.planning.what_if import WhatIf
from realhf.rundir.lines import read_lines, step_line

MEASURES = (
    *RUNS,
    "realhf/algorithms/reward",
    "experiments/ppo.py",
    "benchmarks/jobs/features_job.py",
    "benchmarks/jobs/features_rollouts_job.py",
    "benchmarks/jobs/deep_critic_job.py",
    "benchmarks/jobs/kv_cache_job.py",
)
NUM_WORKERS = 2
BUDGET = SearchBudget(evaluations=12_000)
MARGIN = 1.1  # by which the plan before is slower, as predicted
WARM_UP_STEPS, WINDOW = 2, 3  # a step is the median of the means of so many steps
STEPS, QUICK_STEPS = 14, 6
MOST_OFF, MOST_TIMES = 0.15, 1.5  # of the step's prediction and of that of preemptions, with a smaller KV cache
MOST_STALENESS = 2


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models of settings, as an experiment and its words."""

    job: str
    words: tuple[str, ...] = ()


def _shape(layers: int, hidden: int, intermediate: int, heads: int, vocabulary: int) -> tuple[str, ...]:
    sizes = {
        "num-layers": layers, "hidden-size": hidden, "intermediate-size": intermediate, "num-heads": heads,
        "num-kv-heads": heads, "vocab-size": vocabulary,
    }  # fmt: skip
    return tuple(word for name, size in sizes.items() for word in (f"--architecture.{name}", str(size)))


TRAINING = "benchmarks/jobs/features_job.py"
# Three heads cannot be divided over two devices, seven layers only unevenly: data parallelism or a lame pipeline.
ODD = Models(job=TRAINING, words=_shape(7, 288, 768, 3, 32))
# One layer with one head is divided by data parallelism alone, and gathered whole where all of it is sharded.
WIDE = Models(job=TRAINING, words=_shape(1, 768, 2048, 1, 32))
# The model of the rollouts, trained alone.
EVEN = Models(job=TRAINING, words=_shape(4, 256, 688, 4, 2048))
ROLLOUTS = Models(job="benchmarks/jobs/features_rollouts_job.py")
# Each of two ranks has 27 samples, which have no equal micro-batches, and trains on one of them at a time.
RESPONSES = Models(
    job="benchmarks/jobs/kv_cache_job.py",
    words=(
        *("--data", "runs/rl-step-data/prompts.jsonl", "--tokenizer", "runs/rl-step-data/tokenizer.json"),
        *_shape(8, 128, 256, 4, 2048),
    ),
)
# Mini-batches of one sample and three heads: each training has one device. A deep critic trains as long as the actor
# takes to train and to generate, which two devices do not speed up.
DEEP_CRITIC = Models(
    job="benchmarks/jobs/deep_critic_job.py",
    words=(
        *("--critic-layers", "8", "--mini-batches", "4", "--ppo.eos-token", "-1"),
        *("--architecture.num-heads", "3", "--architecture.num-kv-heads", "3"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """`without` is the task in which a search cannot choose it; `is_in`: whether a plan has it. `chunks`: those that
    such a search looks at."""

    without: Callable[[PlanningTask], PlanningTask]
    is_in: Callable[[ExecutionPlan], bool]
    chunks: tuple[int, ...] = options.CHUNKS


def _closed(*fields: str) -> Callable[[PlanningTask], PlanningTask]:
    """The task whose plans leave these fields of the models' computation as they are set up."""

    def close(task: PlanningTask) -> PlanningTask:
        still_open = {
            model: tuple(field for field in choices if field not in fields)
            for model, choices in task.open_choices.items()
        }
        return replace(task, open_choices=still_open)

    return close


def _computes(has: Callable[[CallCompute], bool]) -> Callable[[ExecutionPlan], bool]:
    return lambda plan: any(has(call.compute) for call in plan.calls.values())


def _without_offload(task: PlanningTask) -> PlanningTask:
    return replace(_closed("offload_states")(task), may_offload=False)


FEATURES: Mapping[str, Feature] = {
    "recomputation": Feature(
        without=_closed("recomputation"),
        is_in=_computes(lambda compute: compute.recomputation in ("selective", "full")),
    ),
    "sharding": Feature(
        without=_closed("data_parallel"), is_in=_computes(lambda compute: compute.data_parallel not in (None, "zero1"))
    ),
    "modes of operators": Feature(
        without=lambda task: replace(task, mixed=frozenset()),
        is_in=_computes(lambda compute: isinstance(compute.data_parallel, tuple)),
    ),
    "sequence parallelism": Feature(
        without=_closed("sequence_parallel"), is_in=_computes(lambda compute: bool(compute.sequence_parallel))
    ),
    "chunks": Feature(
        without=replace,  # a task that has not yet looked at options with chunks
        is_in=lambda plan: any(call.chunks > 1 for call in plan.calls.values()),
        chunks=(),
    ),
    "KV cache": Feature(
        without=lambda task: replace(task, mixed=frozenset()),
        is_in=_computes(lambda compute: bool(compute.kv_cache_tokens)),
    ),
    "staleness": Feature(without=lambda task: replace(task, more_stale=()), is_in=lambda plan: plan.staleness > 0),
    "steps in flight": Feature(
        without=lambda task: replace(task, max_steps_in_flight=1), is_in=lambda plan: plan.max_steps_in_flight > 1
    ),
    "offload": Feature(
        without=_without_offload,
        is_in=lambda plan: bool(plan.offload) or any(call.compute.offload_states for call in plan.calls.values()),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`words` are added to those of the models. `memory_gib`: limit of a device's memory. `cluster`: simulated on this
    one, with these architectures of actor and critic."""

    feature: str
    models: Models
    words: str
    memory_gib: float | None = None
    cluster: str | None = None
    architectures: tuple[str, str] = ("", "")

    @property
    def all_words(self) -> list[str]:
        return [*self.models.words, *self.words.split()]

    def __str__(self) -> str:
        words = " ".join(word.removeprefix("--") for word in self.words.split())
        where = f", {self.memory_gib:g} GiB a device" if self.memory_gib else ""
        what = f" {'/'.join(self.architectures)} on {self.cluster}, simulated" if self.cluster else ""
        return f"{self.feature}:{what} {words}{where}"

    def experiment(self) -> ResolvedExperiment:
        return experiment_of(self.models.job, self.all_words)

    def task(self, memory_gib: float | None) -> PlanningTask:
        """With everything open."""
        experiment, measured = self.experiment(), Measured(ignores_runs=True)
        if self.cluster:
            [cluster] = clusters_of(DevicesRequest(), self.cluster, None).values()
            actor, critic = self.architectures
            types = {"actor": actor, "reference": actor, "reward": critic, "critic": critic}
            return task_of(experiment, cluster, PlanRequest(measured=measured), WhatIf(model_types=types))
        devices = DevicesRequest(num_workers=NUM_WORKERS, memory_gb=memory_gib, place="here")
        [cluster] = clusters_of(devices, None, None).values()
        staleness_up_to = MOST_STALENESS if self.feature == "staleness" else 0
        return task_of(experiment, cluster, PlanRequest(measured=measured, staleness_up_to=staleness_up_to))


def _of_training(feature: str, models: Models, size: str, memory_gib: float, *more: str) -> Setting:
    """`size`: rows x tokens."""
    rows, tokens = size.split("x")
    words = " ".join(["--batch-size", rows, "--tokens", tokens, *more])
    return Setting(feature=feature, models=models, words=words, memory_gib=memory_gib)


PPO = Models(job="experiments/ppo.py", words=("--mini-batches", "8"))
RECOMPUTING = _of_training("recomputation", ODD, "2x512", 0.135)
IN_PARTS = _of_training("sequence parallelism", EVEN, "1x512", 0.064)
SIMULATED = (
    Setting(feature="offload", models=PPO, words="--batch-size 768", cluster="h100-1x4",
            architectures=("llama3-7b", "llama3-7b")),
    Setting(feature="offload", models=PPO, words="--batch-size 512", cluster="h100-1x8",
            architectures=("llama3-13b", "llama3-7b")),
)  # fmt: skip
MEASURED = (
    RECOMPUTING,
    _of_training("recomputation", ODD, "8x64", 0.104),
    _of_training("sharding", ODD, "2x256", 0.0998),
    _of_training("sharding", ODD, "8x64", 0.093),
    _of_training("modes of operators", WIDE, "2x256", 0.105),
    _of_training("chunks", ODD, "2x256", 0.1035, "--compute.data-parallel", "zero1"),
    _of_training("sequence parallelism", EVEN, "1x768", 0.075),
    IN_PARTS,
    Setting(feature="KV cache", models=RESPONSES, words="--rollout.max-new-tokens 96", memory_gib=0.07),
    Setting(feature="staleness", models=ROLLOUTS, words="--batch-size 8 --rollout.max-new-tokens 64"),
    Setting(feature="staleness", models=ROLLOUTS, words="--batch-size 8 --rollout.max-new-tokens 128"),
    Setting(feature="steps in flight", models=DEEP_CRITIC, words="--batch-size 4 --ppo.max-new-tokens 128"),
)  # fmt: skip
PROFILED = (ODD, WIDE, ROLLOUTS, DEEP_CRITIC, RESPONSES)
QUICK = (RECOMPUTING, IN_PARTS, SIMULATED[0])


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and its prediction. `fits` into the setting's memory; where none fits, it is the one for more memory."""

    plan: ExecutionPlan
    step_s: float
    peak_gib: float
    fits: bool = True
    preemptions: Mapping[str, float] = field(default_factory=dict)

    @property
    def interval_s(self) -> tuple[float, float]:
        assert self.plan.intervals
        return self.plan.intervals.step_s


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--case", default="", metavar="FEATURE", help="settings of this feature alone")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else (*MEASURED, *SIMULATED)
    settings = tuple(setting for setting in settings if arguments.case in setting.feature)
    steps = QUICK_STEPS if arguments.quick else STEPS
    ensure_data(Path("runs/rl-step-data"))
    jobs = {setting.models.words if setting.models is not EVEN else ROLLOUTS.words for setting in settings}
    for models in () if arguments.quick else PROFILED:
        if models.words in jobs:
            words = ("--force", "--num-workers", str(NUM_WORKERS), "--max-tokens", "1024")
            realhf("profile", models.job, *words, *models.words)
    with tempfile.TemporaryDirectory() as folder:
        results = [row(setting, Path(folder) / str(i), steps) for i, setting in enumerate(settings)]
    finish("features", results, arguments.json)


def row(setting: Setting, folder: Path, steps: int) -> dict[str, Any]:
    """Plans and, unless it is simulated, runs a setting; what was found."""
    chosen, before = plans(setting)
    measured, measured_before = chosen.step_s, before.step_s
    if not setting.cluster:
        measured = run_s(setting, chosen, folder / "chosen", steps)
        measured_before = run_s(setting, before, folder / "before", steps) if before.fits else 0.0
    made = judged(setting, chosen, before, (measured, measured_before if before.fits else 0.0))
    if setting.feature != "KV cache":
        return made
    [predicted] = chosen.preemptions.values()
    lines = read_lines(folder / "chosen" / "metrics.jsonl", step_line).values
    preempted = statistics.median(line["calls"]["actor_generate"]["preemptions"] for line in lines)
    says = {
        "preempted": predicted / MOST_TIMES <= preempted <= predicted * MOST_TIMES,
        "near": abs(measured / chosen.step_s - 1) <= MOST_OFF,
    }
    holds = made["holds"] and all(says.values())
    return made | says | {"holds": holds, "preemptions": preempted, "predicted_preemptions": predicted}


def judged(setting: Setting, chosen: Planned, before: Planned, seconds: tuple[float, float]) -> dict[str, Any]:
    """The row of a setting whose plans take these seconds a step, the chosen one and the one before."""
    measured, measured_before = seconds
    least, most = chosen.interval_s
    says = {
        "chosen": FEATURES[setting.feature].is_in(chosen.plan) and not FEATURES[setting.feature].is_in(before.plan),
        "predicted": not before.fits or before.step_s >= MARGIN * chosen.step_s,
        "inside": least <= measured <= most,
        "measured": not before.fits or measured_before > measured,
    }
    made = case(
        str(setting),
        measured,
        "s a step",
        baseline=measured_before or None,
        ratio=measured_before / measured,
        target=1.0,
        holds=all(says.values()),
    )
    return made | says | {
        "simulated": setting.cluster is not None,
        "predicted_s": chosen.step_s,
        "interval_s": chosen.interval_s,
        "peak_gib": chosen.peak_gib,
        "before_fits": before.fits,
        "before_predicted_s": before.step_s,
        "before_peak_gib": before.peak_gib,
        "memory_gib": setting.memory_gib,
    }  # fmt: skip


def plans(setting: Setting) -> tuple[Planned, Planned]:
    """The plan that a search with everything open chooses, and the one before. Raises UserError if none fits."""
    feature = FEATURES[setting.feature]
    task = setting.task(setting.memory_gib)
    chosen = found(setting, task)
    with mock.patch.object(options, "CHUNKS", feature.chunks):  # no field of an experiment leaves out chunks alone
        try:
            before = found(setting, feature.without(task))
        except UserError:
            roomy = replace(task, cluster=_roomy(task), more_stale=())
            before = replace(found(setting, feature.without(roomy)), fits=False)
            assert before.peak_gib * GIB > task.cluster.device_memory_bytes
    return chosen, before


def _roomy(task: PlanningTask) -> Cluster:
    """The task's cluster with eight times the memory."""
    cluster = task.cluster
    memory = 8 * cluster.device_memory_bytes
    return replace(cluster, hardware=msgspec.structs.replace(cluster.hardware, device_memory_bytes=memory))


def found(setting: Setting, task: PlanningTask) -> Planned:
    """The best plan found, with its interval. Raises UserError if none fits."""
    result = search_for(task, BUDGET)
    prediction = describe(task, result).analysis.prediction
    return Planned(
        plan=prediction.plan,
        step_s=prediction.step_s,
        peak_gib=max(prediction.device_bytes) / GIB,
        fits=prediction.fits,
        preemptions=preemptions(task.of(prediction.plan), prediction.plan),
    )


def run_s(setting: Setting, planned: Planned, run_dir: Path, steps: int) -> float:
    """Measured seconds of a step under a plan."""
    run_dir.parent.mkdir(exist_ok=True)
    plan_file = run_dir.with_suffix(".json")
    save_plan(planned.plan, plan_file)
    words = ["--plan", str(plan_file), "--steps", str(steps), "--run-dir", str(run_dir), "--ignore-runs"]
    words += ["--memory-gb", str(setting.memory_gib)] if setting.memory_gib else []
    realhf("run", setting.models.job, "--num-workers", str(NUM_WORKERS), *words, *setting.all_words)
    assert load_plan(run_dir / "plan.json").staleness == planned.plan.staleness
    return step_seconds(read_lines(run_dir / "metrics.jsonl", step_line).values)


def step_seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    """Of the steps after the first few. Steps may overlap, and take turns in being long: so what counts is the time
    from end to end, of several steps together."""
    ends = [max(call["end"] for call in line["calls"].values()) for line in lines]
    seconds = [end - start for start, end in pairwise(ends)][WARM_UP_STEPS - 1 :]
    windows = [seconds[first : first + WINDOW] for first in range(len(seconds) - WINDOW + 1)] or [seconds]
    return statistics.median(statistics.mean(window) for window in windows)


if __name__ == "__main__":
    main()
