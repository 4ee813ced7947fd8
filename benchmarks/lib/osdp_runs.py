"""Runs whose plans have modes of operators: PPO under a limit of memory, with the modes that its search chose, and a
training by tensor and data parallelism; each beside other modes in the same plan, the runs in turns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from lib.common import case, realhf
from lib.paired import paired_ratio

from realhf.architecture.compute import DataParallel
from realhf.dataflow.plan import CallPlan, ExecutionPlan, load_plan, save_plan
from realhf.lifecycle.request import experiment_of
from realhf.planning.clusters import clusters_of
from realhf.planning.planner import task_of
from realhf.planning.request import DevicesRequest, Measured, PlanRequest
from realhf.rundir.lines import read_lines, step_line

ALL_SHARDED: DataParallel = (("*", "sharded"),)
ROUNDS, STEPS, WARM_UP_STEPS = 3, 14, 3
# The critic's three layers have one head: data parallelism divides them, or a lame pipeline. As ZeRO-1 they do not fit.
CRITIC = {"num-layers": 3, "num-heads": 1, "num-kv-heads": 1, "hidden-size": 640, "intermediate-size": 1728}
PPO_WORDS = ("--batch-size", "8", "--mini-batches", "1", "--ppo.max-new-tokens", "16", "--no-evaluate")
PPO_MEMORY_GB = 0.24
# A model whose weights take longer to exchange than its few tokens to compute, so that modes matter.
TRAINING = "benchmarks/jobs/features_job.py"
TRAINED = {"num-layers": 2, "num-heads": 8, "num-kv-heads": 8, "hidden-size": 512, "intermediate-size": 1536}
TRAINING_WORDS = ("--batch-size", "4", "--tokens", "64")
SAVED_PART = 0.5  # of what sharding everything would save


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is run under several plans; `call` is timed."""

    experiment: str
    words: tuple[str, ...]
    workers: int
    call: str


def run_cases(folder: Path) -> Iterator[dict[str, Any]]:
    """PPO with the chosen modes beside all sharded; tensor and data parallelism with ZeRO-1, mixed and sharded."""
    yield from _ppo_cases(folder)
    yield from _parallel_cases(folder)


def _ppo_cases(folder: Path) -> Iterator[dict[str, Any]]:
    actor, plan_file = folder / "actor", folder / "plan.json"
    realhf("run", "experiments/sft.py", "--num-workers", "1", "--steps", "1", "--no-evaluate", "--run-dir", str(actor))
    words = ("--model", str(actor), *PPO_WORDS, *_architecture(CRITIC))
    job = Job(experiment="experiments/ppo.py", words=words, workers=2, call="critic_train_step")
    limit = ("--memory-gb", str(PPO_MEMORY_GB), "--num-workers", str(job.workers))
    realhf("plan", job.experiment, *words, *limit, "--ignore-runs", "--output", str(plan_file))
    chosen = load_plan(plan_file)
    modes = chosen.calls[job.call].compute.data_parallel
    found = _seconds(job, {"chosen": chosen, "all sharded": _with_modes(chosen, job.call, ALL_SHARDED)}, folder)
    for of, what in (("step", "a step"), (job.call, job.call)):
        ratio = paired_ratio(found["chosen"][of], found["all sharded"][of])
        is_mix = isinstance(modes, tuple) and modes != ALL_SHARDED
        yield _beside(f"PPO, {PPO_MEMORY_GB:g} GiB: {what}, modes that the search chose beside all sharded", ratio,
                      found["chosen"][of], found["all sharded"][of], holds=is_mix and ratio.high < 1)  # fmt: skip


def _parallel_cases(folder: Path) -> Iterator[dict[str, Any]]:
    """Reported: of each way the median step beside that of ZeRO-1, which is 3D parallelism without OSDP."""
    words = (*TRAINING_WORDS, *_architecture(TRAINED))
    job = Job(experiment=TRAINING, words=words, workers=4, call="actor_train_step")
    plan = ExecutionPlan(num_devices=job.workers, calls={job.call: CallPlan(devices=(0, job.workers), dp=2, tp=2)})
    [cluster] = clusters_of(DevicesRequest(num_workers=job.workers, place="here"), None, None).values()
    request = PlanRequest(offload=(), measured=Measured(ignores_runs=True))
    task = task_of(experiment_of(job.experiment, list(words)), cluster, request)
    model, strategy = task.call_models[job.call], plan.calls[job.call].strategy
    zero1_bytes = model.static_bytes(strategy)
    sharded = model.under(msgspec.structs.replace(plan.calls[job.call].compute, data_parallel="fsdp"))
    room_bytes = zero1_bytes - SAVED_PART * (zero1_bytes - sharded.static_bytes(strategy))
    mix = model.mix(strategy, 1, int(room_bytes))
    assert mix is not None, f"no modes fit into {room_bytes:.0f} bytes"
    ways: dict[str, DataParallel] = {"ZeRO-1": "zero1", "OSDP": mix, "all sharded": ALL_SHARDED}
    found = _seconds(job, {name: _with_modes(plan, job.call, modes) for name, modes in ways.items()}, folder)
    for name in list(ways)[1:]:
        ratio = paired_ratio(found[name]["step"], found["ZeRO-1"]["step"])
        yield _beside(f"dp2 tp2 (3D): a step with {name} beside ZeRO-1", ratio, found[name]["step"],
                      found["ZeRO-1"]["step"], holds=True)  # fmt: skip


def _architecture(sizes: Mapping[str, int]) -> list[str]:
    return [word for name, size in sizes.items() for word in (f"--architecture.{name}", str(size))]


def _with_modes(plan: ExecutionPlan, name: str, modes: DataParallel) -> ExecutionPlan:
    call = plan.calls[name]
    compute = msgspec.structs.replace(call.compute, data_parallel=modes)
    return msgspec.structs.replace(plan, calls={**plan.calls, name: msgspec.structs.replace(call, compute=compute)})


def _seconds(job: Job, plans: Mapping[str, ExecutionPlan], folder: Path) -> dict[str, dict[str, list[float]]]:
    """By plan: the seconds of steps and of the job's call, in runs that take turns."""
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], job.call: []} for name in plans}
    for number in range(ROUNDS):
        for name, plan in plans.items():
            run_dir = folder / f"{job.call}-{name.replace(' ', '-')}-{number}"
            save_plan(plan, run_dir.with_suffix(".json"))
            words = ("--plan", str(run_dir.with_suffix(".json")), "--num-workers", str(job.workers), "--ignore-runs")
            realhf("run", job.experiment, *job.words, *words, "--steps", str(STEPS), "--run-dir", str(run_dir))
            steps = read_lines(run_dir / "metrics.jsonl", step_line).values[WARM_UP_STEPS - 1 :]
            ends = [max(call["end"] for call in step["calls"].values()) for step in steps]
            found[name]["step"] += [end - start for start, end in pairwise(ends)]
            times = [step["calls"][job.call] for step in steps[1:]]
            found[name][job.call] += [call["end"] - call["start"] for call in times]
            assert _modes_in(run_dir, job.call) == json.loads(msgspec.json.encode(plan.calls[job.call].compute))
    return found


def _modes_in(run_dir: Path, call: str) -> Any:
    """How a run computed a call, as its directory has it."""
    return json.loads((run_dir / "plan.json").read_text())["calls"][call].get("compute", {})


def _beside(
    name: str, ratio: Any, seconds: Sequence[float], baseline: Sequence[float], *, holds: bool
) -> dict[str, Any]:
    value, other = (sorted(each)[len(each) // 2] for each in (seconds, baseline))
    made = case(f"{name}: {ratio}", value, "s", baseline=other, ratio=1 / ratio.value, target=1.0, holds=holds)
    return made | {"interval": [ratio.low, ratio.high]}
