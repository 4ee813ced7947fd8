"""Every ready experiment computes the same under every plan, and after a resume in the middle.

By default each algorithm on one worker and under one plan that mixes layouts on four; the rest of the grid is slow.
"""

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.data import sort_task
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.dataflow.plan_checks import check_plan
from realhf.experiments import ready_experiments, ready_file
from realhf.lifecycle.request import experiment_of
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ROOT, SMALL, FinishedRun, initial_parameters

pytestmark = pytest.mark.distributed

SEED, STEPS, LONG, RESUMED_AT = 3, 2, 4, 2
BATCH = 32
MEASURED = {"calls", "time_s", "tokens_per_s", "peak_bytes", "plan", "num_workers"}
REWARDS = ROOT / "tests/e2e/algorithm_rewards.py"
COPIED = ("--reward", f"{REWARDS}:copied")
DROPPED = ("--reward", f"{REWARDS}:copied_unless_short", "--reward.on-error", "drop")
COST = ("--cost", f"{REWARDS}:repeats")


@dataclass(frozen=True)
class Job:
    """A ready experiment, the file of the sorting task that it reads, further options, and the models it trains."""

    experiment: str
    data: str
    words: tuple[str, ...]
    models: tuple[str, ...] = ("actor",)


def of(name: str, **options: object) -> tuple[str, ...]:
    """Options of the hyperparameters `name`; True is a flag."""
    words: list[str] = []
    for option, value in {"max_new_tokens": sort_task.MAX_NEW_TOKENS, **options}.items():
        words += [f"--{name}.{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    return tuple(words)


def rollouts_of(experiment: str, *words: str, models: tuple[str, ...] = ("actor",)) -> Job:
    return Job(experiment, "prompts.jsonl", words, models)


TWO_MODELS, THREE_MODELS = ("actor", "critic"), ("actor", "critic", "cost_critic")
ADAPTIVE: dict[str, object] = {"kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 100}
TEACHER = ("--teacher", "{teacher}")
PTX, JUDGED = ("--examples.data", "{examples}"), ("--reward.model", "{judge}")
# Of each algorithm the options that keep state, leave out samples, or make more than one pass.
JOBS = {
    "sft": Job("sft", "sft.jsonl", ()),
    "reward": Job("reward", "preferences.jsonl", ("--loss.epochs", "2"), ("judge",)),
    "dpo": Job("dpo", "preferences.jsonl", ("--dpo.sft-coef", "0.1")),
    "distill": rollouts_of("distill", *TEACHER, *of("distill", beta=0.5, epochs=2)),
    "ppo": rollouts_of("ppo", *JUDGED, *of("ppo", normalise_values=True, entropy_coef=0.01), models=TWO_MODELS),
    "ppo-ptx": rollouts_of("ppo-ptx", *PTX, *COPIED, *of("ppo", **ADAPTIVE, epochs=2), models=TWO_MODELS),
    "grpo": rollouts_of("grpo", *DROPPED, *of("grpo", samples_per_prompt=4, epochs=2)),
    "rloo": rollouts_of("rloo", *COPIED, *of("rloo", normalise_advantages=True)),
    "remax": rollouts_of("remax", *COPIED, *of("remax")),
    "reinforce++": rollouts_of("reinforce++", *DROPPED, *of("reinforce")),
    "safe-rlhf": rollouts_of(
        "safe-rlhf", *COPIED, *COST, *of("safe", **ADAPTIVE, multiplier_lr=0.5), models=THREE_MODELS
    ),
}
# More of the options; in the slow part alone.
VARIANTS = {
    "ppo, ended by divergence": rollouts_of(
        "ppo", *DROPPED, *of("ppo", epochs=4, max_kl=1e-3, samples_per_prompt=2, mask_truncated=True), models=TWO_MODELS
    ),
    "dapo": rollouts_of(
        "grpo",
        *COPIED,
        *of("grpo", samples_per_prompt=4, clip_high=0.28, mask_truncated=True, drop_uniform_groups=True),
        *("--grpo.groups-per-step", "3"),
    ),
    "gspo": rollouts_of("grpo", *COPIED, *of("grpo", samples_per_prompt=2, loss_type="grpo", ratio="sequence")),
    "dr. grpo": rollouts_of("grpo", *COPIED, *of("grpo", loss_type="dr_grpo", scale_rewards="none", beta=0)),
    "reinforce++-baseline": rollouts_of(
        "reinforce++", *COPIED, *of("reinforce", samples_per_prompt=4, baseline="group")
    ),
    "rloo, dropped": rollouts_of("rloo", *DROPPED, *of("rloo", epochs=2)),
    "remax, dropped": rollouts_of("remax", *DROPPED, *of("remax", epochs=2)),
    "safe-rlhf, dropped": rollouts_of("safe-rlhf", *DROPPED, *COST, *of("safe", epochs=2), models=THREE_MODELS),
    "distill, few tokens": rollouts_of("distill", *TEACHER, *of("distill", beta=0, teacher_top_k=3)),
    "ppo, rewards of tokens": rollouts_of(
        "ppo", "--reward", f"{REWARDS}:copied_letters", *COPIED, *of("ppo", mask_truncated=True), models=TWO_MODELS
    ),
    "reinforce++, a model's rewards of tokens": rollouts_of(
        "reinforce++", *JUDGED, "--reward.per-token", *of("reinforce", epochs=2)
    ),
    "ipo": Job("dpo", "preferences.jsonl", ("--dpo.loss-type", "ipo")),
}
ALL_JOBS = JOBS | VARIANTS


def at(first: int, micro_batches: int = 1, **degrees: int) -> CallPlan:
    """A layout from device `first` on."""
    count = degrees.get("dp", 1) * degrees.get("tp", 1) * degrees.get("pp", 1)
    return CallPlan(devices=(first, count), micro_batches=micro_batches, **degrees)


@dataclass(frozen=True)
class Pattern:
    """A rule for the plans of all graphs: layouts by the kind of a call. The first model of a kind has the first one;
    after the last one they begin again."""

    train: tuple[CallPlan, ...]
    generate: tuple[CallPlan, ...]
    infer: tuple[CallPlan, ...]
    words: tuple[str, ...] = ()

    def plan(self, graph: DataflowGraph) -> ExecutionPlan:
        layouts = {TRAIN_STEP: self.train, GENERATE: self.generate, INFERENCE: self.infer}
        places = dict.fromkeys(layouts, 0)
        calls = {}
        for name, call in graph.model_calls.items():
            kind = call.interface_type
            calls[name] = layouts[kind][places[kind] % len(layouts[kind])]
            places[kind] += 1
        workers = max(sum(layout.devices) for of_kind in layouts.values() for layout in of_kind)
        plan = ExecutionPlan(num_devices=workers, calls=calls)
        check_plan(plan, graph, BATCH)
        return plan


def alike(layout: CallPlan, *words: str) -> Pattern:
    return Pattern((layout,), (layout,), (layout,), words)


ONE = alike(at(0))
MIXED = "four, mixed"
PATTERNS = {
    # Models apart and together; dp, tp and pp; every model moves between its calls.
    MIXED: Pattern(
        train=(at(0, dp=2, pp=2, micro_batches=2), at(2, tp=2), at(0, pp=2)),
        generate=(at(0, dp=2, tp=2), at(0, dp=4)),
        infer=(at(0, tp=2, pp=2), at(2, dp=2), at(1, tp=2), at(3)),
    ),
    "two, mixed": Pattern(
        train=(at(0, tp=2), at(0, dp=2, micro_batches=2), at(1)),
        generate=(at(0, dp=2), at(0, pp=2)),
        infer=(at(0, pp=2), at(1), at(0, tp=2)),
    ),
    "dp4": alike(at(0, dp=4)),
    "pp4": alike(at(0, pp=4, micro_batches=4)),
}


class Runs:
    """Runs the jobs, each of those that others read from once."""

    def __init__(self, folder: Path, *words: str, one: Pattern = ONE):
        self._folder, self.data = folder, sort_task.ensure(folder / "data")
        self._words, self._one = words or ("--dtype", "float64"), one
        self.reference = cache(self._reference)  # on one worker

    def run(self, folder: Path, name: str, pattern: Pattern, *words: str) -> FinishedRun:
        job, folder = ALL_JOBS[name], folder.resolve()
        own = self.options(name)
        folder.mkdir(parents=True, exist_ok=True)
        save_plan(pattern.plan(graph_of(job, own)), folder / "plan.json")
        recorded = ("--call-timeout-s", "60", *(("--record", "seq") if is_drawn(job) else ()))
        return quickly_finished(
            folder / "run", ready(job), *own, *recorded, *pattern.words, *words, "--plan", folder / "plan.json"
        )

    def models(self, name: str) -> dict[str, Any]:
        job = ALL_JOBS[name]
        return {model: graph_of(job, self.options(name)).models[model] for model in job.models}

    def _reference(self, name: str, steps: int = STEPS) -> FinishedRun:
        folder = self._folder / f"{name.replace(' ', '-')}-{steps}"
        return self.run(folder, name, self._one, "--steps", str(steps), "--checkpoint-every", "1")

    def options(self, name: str) -> tuple[str, ...]:
        """The words of its command, but for the plan."""
        job = ALL_JOBS[name]
        words = (*SMALL, "--seed", str(SEED), *self._words, "--mini-batches", "2")
        words = (*words, "--data", str(self.data / job.data), "--tokenizer", str(self.data / "tokenizer.json"))
        for model in job.models:
            words = (*words, f"--{model}.lr", "2e-3", f"--{model}.warmup-steps", "0")
        files = {"{examples}": str(self.data / "sft.jsonl")}
        for word, name in (("{judge}", "reward"), ("{teacher}", "sft")):
            if word in job.words:
                files[word] = str(self.reference(name).path)
        return (*words, *(files.get(word, word) for word in job.words))


def ready(job: Job) -> Path:
    return Path(ready_file(job.experiment))


def graph_of(job: Job, words: tuple[str, ...]) -> DataflowGraph:
    return experiment_of(str(ready(job)), words).graph


def is_drawn(job: Job) -> bool:
    return job.data == "prompts.jsonl"


def statistics(run: FinishedRun) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if name not in MEASURED and not name.endswith("_seconds")}
        for line in run.metrics
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("algorithms"))


# With rules of the reward, pairs, groups and two models: the others with the slow tests.
QUICK = ("sft", "dpo", "ppo", "grpo", "distill")
# Every job under the mixed plan, and some under the others.
OTHERS = [("ppo", "two, mixed"), ("distill", "two, mixed"), ("remax", "dp4"), ("grpo", "pp4")]
GRID = [*((name, MIXED) for name in ALL_JOBS), *OTHERS]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        pytest.param(name, pattern, marks=() if pattern == MIXED and name in QUICK else pytest.mark.slow)
        for name, pattern in GRID
    ],
)
def test_a_plan_computes_what_one_worker_does(name: str, pattern: str, runs: Runs, tmp_path: Path) -> None:
    one = runs.reference(name)
    run = runs.run(tmp_path, name, PATTERNS[pattern], "--steps", str(STEPS))
    for step in range(STEPS if is_drawn(ALL_JOBS[name]) else 0):
        check_rollouts(run, one, step)
    for line, expected in zip(statistics(run), statistics(one), strict=True):
        assert line == pytest.approx(expected, rel=1e-7, abs=1e-11)
    for model, config in runs.models(name).items():
        start = initial_parameters(config, SEED)
        expected_update = one.parameters(model, config) - start
        assert expected_update.norm() > 1e-2, "the steps must have changed something"
        assert (run.parameters(model, config) - start - expected_update).norm() < 1e-7 * expected_update.norm(), model


def check_rollouts(run: FinishedRun, one: FinishedRun, step: int) -> None:
    got, expected = run.recorded(step, "seq"), one.recorded(step, "seq")
    assert got.keys() == expected.keys() == set(range(BATCH))
    differing = [i for i in expected if not torch.equal(expected[i], got[i])]
    assert not differing, f"step {step}: samples {differing} differ"


# Of those that keep numbers from step to step beside parameters and optimizer states.
KEEPING = ("ppo-ptx", "dapo", "safe-rlhf")


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPING)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, runs: Runs, tmp_path: Path) -> None:
    """From the checkpoint in the middle, as a crash before the next one would have left it."""
    words = ("--steps", str(LONG), "--checkpoint-every", "1")
    whole = runs.run(tmp_path / "whole", name, PATTERNS[MIXED], *words)
    shutil.copytree(whole.path, tmp_path / "again", symlinks=True)
    for step in range(RESUMED_AT + 1, LONG + 1):
        shutil.rmtree(tmp_path / "again/checkpoints" / f"step-{step}")
    for rollouts in (tmp_path / "again/rollouts").glob("step-[23]"):
        shutil.rmtree(rollouts)
    resumed = quickly_finished(tmp_path / "again", ready(ALL_JOBS[name]), "--resume")
    assert statistics(resumed) == statistics(whole)
    for step in range(RESUMED_AT, LONG if is_drawn(ALL_JOBS[name]) else 0):
        check_rollouts(resumed, whole, step)
    for model, config in runs.models(name).items():
        assert torch.equal(resumed.parameters(model, config), whole.parameters(model, config)), model


def test_all_ready_experiments_are_here() -> None:
    assert set(JOBS) == {one.name for one in ready_experiments()}
