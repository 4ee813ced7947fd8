"""`reproducible="layout"`: the same bits under every plan, and what that costs.

Pairs: jobs drawn from seeds (PPO and GRPO; models of several kinds, dense and with experts; float32 and bfloat16; 1 to
4 workers), each of 6 steps under two plans; the digests of all weights and all statistics are equal in both, or the
pair does not count. Cost: the median seconds of a step with the option over those without, under one plan, in turn.
Prediction: a model of 4 M parameters is profiled with the option and without, on 1 and on 2 workers; the planner's step
under the plan that it finds is within 15 % of the measured median, and so is what it says that the option costs of what
that costs (target 1.3).
Real: 5 steps of GRPO of SmolLM2-135M-Instruct under six plans; the baseline is how many plans there are.
`--quick` takes three pairs and their cost. Command:
python benchmarks/reproducible.py --json benchmarks/results/reproducible.json
"""

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from lib.common import ROOT, case, case_parser, finish, realhf
from lib.random_layouts import Drawn, draw
from platformdirs import user_cache_path

from realhf.data import sort_task
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan

sys.path.insert(0, str(ROOT / "scripts"))
import real_job

MEASURES = ("realhf/algorithms", "realhf/cpu", "realhf/engine", "realhf/models", "realhf/parallel", "csrc/kernels")
MEASURES += ("realhf/planning/model", "realhf/profiling")  # of predictions
PAIRS, MOST_WORKERS = 50, 4
MOST_COST = 1.3
MOST_OFF = 0.15  # of a prediction
_DIGESTS = ("weights", "new_weights", "new_states")
_TIMES = {"time_s", "tokens_per_s", "peak_bytes", "calls", "plan", "num_workers"}


def main() -> None:
    parser = case_parser(__doc__)
    arguments = parser.parse_args()
    wanted = arguments.case
    results: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = sort_task.ensure(folder / "data")
        if not wanted or wanted in "pairs of plans, cost":
            results += pairs(folder, data, 3 if arguments.quick else PAIRS)
        if not arguments.quick and (not wanted or wanted.startswith("prediction")):
            results += prediction(folder, data)
        if not arguments.quick and (not wanted or wanted.startswith("real")):
            results += real(folder)
    finish("reproducible", results, arguments.json, is_part=bool(wanted))


def pairs(folder: Path, data: Path, count: int) -> Iterator[dict]:
    equal, costs = 0, defaultdict[int, list[float]](list)
    for seed in range(count):
        drawn = draw(seed, data, MOST_WORKERS)
        runs = [run(folder / f"{seed}-{place}", drawn, plan) for place, plan in enumerate(drawn.plans)]
        equal += results_of(runs[0]) == results_of(runs[1])
        # In turn with a run without the option; the first steps are left out.
        plan = drawn.plans[0]
        plain = run(folder / f"{seed}-plain", drawn, plan, "--reproducible", "plan")
        costs[min(plan.num_devices, 2)].append(seconds(runs[0]) / seconds(plain))
        print(f"{drawn.name}: {equal} of {seed + 1} equal, {costs}", file=sys.stderr, flush=True)
    yield equal_case("pairs of plans with equal bits", equal, count)
    for workers, of_workers in sorted(costs.items()):
        cost = statistics.median(of_workers)
        what = f"step of small models, {'1 worker' if workers == 1 else 'several workers'}, with over without"
        yield case(what, cost, "x", baseline=1.0, ratio=1 / cost, target=1 / MOST_COST, holds=cost <= MOST_COST)


def run(folder: Path, drawn: Drawn, plan: ExecutionPlan, *words: str) -> list[dict[str, Any]]:
    """The lines of the metrics of a job under a plan."""
    folder.mkdir()
    save_plan(plan, folder / "plan.json")
    realhf(
        "run",
        drawn.experiment,
        *drawn.words,
        *words,
        "--plan",
        str(folder / "plan.json"),
        "--run-dir",
        str(folder / "run"),
    )
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def results_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By step all statistics, and by call the digests of the weights that it used, and of the weights and optimizer
    states that it made."""
    return [
        {name: value for name, value in line.items() if name not in _TIMES and not name.endswith("_seconds")}
        | {name: [call.get(key) for key in _DIGESTS] for name, call in line["calls"].items()}
        for line in lines
    ]


def seconds(lines: Sequence[dict[str, Any]]) -> float:
    return statistics.median(line["time_s"] for line in lines[2:])


def prediction(folder: Path, data: Path) -> Iterator[dict]:
    sizes = {"hidden-size": 256, "intermediate-size": 688, "num-layers": 4, "num-heads": 4, "num-kv-heads": 4}
    words = [f"--architecture.{name}={number}" for name, number in (sizes | {"vocab-size": 2048}).items()]
    words += ["--data", str(data / "prompts.jsonl"), "--tokenizer", str(data / "tokenizer.json")]
    words += ["--reward", f"{ROOT / 'benchmarks/lib/letters_reward.py'}:copied", "--batch-size", "32"]
    words += ["--mini-batches", "2", "--grpo.max-new-tokens", "64", "--grpo.eos-token", "-1", "--ignore-runs"]
    for dtype, workers in product(("float32", "bfloat16"), (1, 2)):
        at = folder / f"prediction-{dtype}-{workers}"
        at.mkdir()
        job = ["grpo", *words[:-1], "--dtype", dtype, "--num-workers", str(workers)]
        for option in ("layout", "plan"):
            realhf("profile", *job, "--reproducible", option, "--force", "--max-tokens", "2048")
        plan, output = str(at / "plan.json"), at / "found.json"
        realhf("plan", *job, words[-1], "--reproducible", "layout", "--output", plan, "--json", str(output))
        found = json.loads(output.read_text())
        predicted_s = found["plans"][0]["step_s"]
        [plain_s] = [one["without_s"] for one in found["worth"] if one["feature"] == "reproducible='layout'"]
        measured = {}
        for option in ("layout", "plan"):
            run_dir = at / option
            more = ["--reproducible", option, "--plan", plan, "--steps", "12", "--run-dir", str(run_dir)]
            realhf("run", *job, words[-1], *more)
            measured[option] = seconds([json.loads(line) for line in (run_dir / "metrics.jsonl").open()])
        print(f"{at.name}: {measured}, predicted {predicted_s} and {plain_s}", file=sys.stderr, flush=True)
        name, cost = f"prediction, {dtype}, workers: {workers}", measured["layout"] / measured["plan"]
        yield within(f"{name}: a step with the option", measured["layout"], predicted_s, "s a step")
        yield within(f"{name}: its predicted cost", predicted_s / plain_s, cost, "x")
        holds = cost <= MOST_COST
        yield case(f"{name}: its cost", cost, "x", baseline=1.0, ratio=1 / cost, target=1 / MOST_COST, holds=holds)


def within(name: str, value: float, baseline: float, unit: str) -> dict:
    """Whether the two differ by at most MOST_OFF."""
    holds = abs(value / baseline - 1) <= MOST_OFF
    return case(name, value, unit, baseline=baseline, ratio=value / baseline, target=1.0, holds=holds)


def real(folder: Path) -> Iterator[dict]:
    model = real_job.fetched_model(user_cache_path("realhf") / "models")
    train, _ = real_job.write_questions(folder / "real", real_job.SUMS)
    for dtype in ("float32", "bfloat16"):
        found = []
        for place, plan in enumerate(real_plans()):
            at = folder / f"real-{dtype}-{place}"
            at.mkdir()
            save_plan(plan, at / "plan.json")
            realhf(
                *("run", "grpo", "--model", str(model), "--data", str(train), *real_job.SUMS.words, "--dtype", dtype),
                *("--steps", "5", "--batch-size", "16", "--mini-batches", "1", "--grpo.samples-per-prompt", "4"),
                *(
                    "--grpo.max-new-tokens",
                    "12",
                    "--actor.lr",
                    "1e-5",
                    "--grpo.epochs",
                    "1",
                    "--reproducible",
                    "layout",
                ),
                *("--plan", str(at / "plan.json"), "--run-dir", str(at / "run")),
            )
            found.append([json.loads(line) for line in (at / "run/metrics.jsonl").read_text().splitlines()])
            print(f"{dtype}, plan {place}: {seconds(found[-1]):.1f} s a step", file=sys.stderr, flush=True)
        equal, kl = sum(results_of(each) == results_of(found[0]) for each in found), abs(found[0][0]["ref_kl"])
        yield equal_case(f"real model, {dtype}: plans with equal bits", equal, len(found))
        name = f"real model, {dtype}: KL before the first update"
        yield case(name, kl, "nats", baseline=None, ratio=None, target=0, holds=kl == 0)


def equal_case(name: str, equal: int, count: int) -> dict:
    return case(name, equal, "runs", baseline=count, ratio=None, target=count, holds=equal == count)


def real_plans() -> list[ExecutionPlan]:
    """Six plans of 1 to 3 workers: every kind of parallelism, alone and between calls. dp x micro-batches of the
    training is 4."""

    def at(count: int, micro_batches: int = 1, **degrees: int) -> CallPlan:
        return CallPlan(devices=(0, count), micro_batches=micro_batches, **degrees)

    one, dp, pp, tp = at(1), at(2, dp=2), at(2, pp=2), at(3, tp=3)
    drawn = [
        (one, one, at(1, 4)),
        (dp, dp, at(2, 2, dp=2)),
        (pp, one, at(2, 4, pp=2)),
        (tp, tp, at(3, 4, tp=3)),
        (dp, tp, at(3, 4, pp=3)),
        (tp, pp, at(2, 2, dp=2)),
    ]
    return [
        ExecutionPlan(
            num_devices=max(call.devices[1] for call in calls),
            calls=dict(zip(("actor_generate", "reference_inference", "actor_train_step"), calls, strict=True)),
            max_steps_in_flight=1,
        )
        for calls in drawn
    ]


if __name__ == "__main__":
    main()
