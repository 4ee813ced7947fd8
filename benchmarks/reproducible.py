"""`reproducible="layout"`: the same bits under every plan, and what that costs.

Pairs: jobs drawn from seeds (PPO and GRPO; models of several kinds, dense and with experts; float32 and bfloat16; 1 to
4 workers), each of 6 steps under two plans. A pair counts if the digests of all weights and of all that its calls made,
and all statistics, are equal in both. Cost: the median, over pairs, of the seconds of a step with the option over those
without, under one plan, one run directly after the other; the first two steps of a run do not count. It is that of 1
and 2 workers, since more share this machine's two cores.
Prediction: a model of 4 M parameters is profiled with the option and without, on 1 and on 2 workers; the planner's step
under the plan that it finds is within 15 % of the measured median, and so is what it says that the option costs of what
that costs (target 1.3).
Experts: the same sequences under seven generations and trainings of a model of 4 layers with 2 of 8 experts a token;
how many choices of a token in a layer differ between generation and training. The baseline is without the option.
Real: 5 steps of GRPO of SmolLM2-135M-Instruct under seven plans, compared in the same way; the baseline is how many
plans there are.
`--quick` takes three pairs and their cost. Command:
python benchmarks/reproducible.py --json benchmarks/results/reproducible.json
"""

import contextlib
import io
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from lib import routing
from lib.common import ROOT, case, case_parser, finish, realhf
from lib.random_layouts import Drawn, draw
from platformdirs import user_cache_path

from realhf.data import sort_task
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.experiments import ready_file

sys.path.insert(0, str(ROOT))  # for ranks and runs of the tests, which start in a second
sys.path.insert(0, str(ROOT / "scripts"))
import real_job

from tests.distributed.pool import run_distributed
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import FinishedRun

MEASURES = (
    "realhf/algorithms",
    "realhf/cpu",
    "realhf/engine",
    "realhf/models",
    "realhf/parallel",
    "realhf/planning/model",
    "realhf/profiling",
    "csrc/kernels",
    "benchmarks/lib/random_layouts.py",
)
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
        if not wanted or wanted.startswith("experts"):
            results += experts()
        if not arguments.quick and (not wanted or wanted.startswith("real")):
            results += real(folder)
    finish("reproducible", results, arguments.json, is_part=bool(wanted))


def pairs(folder: Path, data: Path, count: int) -> Iterator[dict]:
    equal, costs = 0, defaultdict[int, list[float]](list)
    for seed in range(count):
        drawn = draw(seed, data, MOST_WORKERS)
        plan, other = drawn.plans
        kinds = ("layout", "plan") if seed % 2 else ("plan", "layout")
        runs = {kind: run(folder / f"{seed}-{kind}", drawn, plan, "--reproducible", kind) for kind in kinds}
        equal += results_of(runs["layout"]) == results_of(run(folder / f"{seed}-other", drawn, other))
        costs[plan.num_devices].append(seconds(runs["layout"].path) / seconds(runs["plan"].path))
        print(
            f"{drawn.name}: {equal} of {seed + 1} equal, {costs[plan.num_devices][-1]:.2f} x on {plan.num_devices}",
            file=sys.stderr,
        )
    yield equal_case("pairs of plans with equal bits", equal, count)
    yield cost_case("step of small models, with over without", costs[1] + costs[2], MOST_COST)
    several = [cost for workers, found in costs.items() if workers > 1 for cost in found]
    for name, found in (("1 worker", costs[1]), (f"2 to {MOST_WORKERS} workers", several)):
        if found:
            yield cost_case(f"step of small models, {name}", found)


def cost_case(name: str, costs: list[float], most: float | None = None) -> dict:
    """The median of the costs; `most`: what it may be, None: for information."""
    cost = statistics.median(costs)
    target = 1 / most if most else 0
    return case(name, cost, "x", baseline=1.0, ratio=1 / cost, target=target, holds=most is None or cost <= most)


def run(folder: Path, drawn: Drawn, plan: ExecutionPlan, *words: str) -> FinishedRun:
    """A job under a plan."""
    folder.mkdir()
    save_plan(plan, folder / "plan.json")
    own = (*drawn.words, *words, "--plan", folder / "plan.json")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return quickly_finished(folder / "run", Path(drawn.experiment), *own)
        except AssertionError:
            sys.exit(f"{drawn.name} failed:\n{said.getvalue()}")


def results_of(run: FinishedRun) -> list[Any]:
    """By step all statistics; by call the digests of the weights that it used, and of the weights and optimizer states
    that it made; and those of all that calls made."""
    lines = [
        {name: value for name, value in line.items() if name not in _TIMES and not name.endswith("_seconds")}
        | {name: [call.get(key) for key in _DIGESTS] for name, call in line["calls"].items()}
        for line in run.metrics
    ]
    return [*lines, *map(json.loads, (run.path / "outputs.jsonl").read_text().splitlines())]


def seconds(run: Path) -> float:
    """A step's, without the first two, in which kernels and buffers are made."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["time_s"] for line in lines[2:])


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
            measured[option] = seconds(run_dir)
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
    words = ["--model", str(model), "--data", str(train), *real_job.SUMS.words, "--reproducible", "layout"]
    words += ["--steps", "5", "--batch-size", "16", "--mini-batches", "1", "--grpo.samples-per-prompt", "4"]
    words += ["--grpo.max-new-tokens", "12", "--grpo.epochs", "1", "--actor.lr", "1e-5"]
    for dtype in ("float32", "bfloat16"):
        found, kl = [], 0.0
        for place, plan in enumerate(real_plans()):
            drawn = Drawn("", str(ready_file("grpo")), (*words, "--dtype", dtype), (plan, plan))
            made = run(folder / f"real-{dtype}-{place}", drawn, plan)
            found.append(results_of(made))
            kl = max(kl, abs(made.metrics[0]["ref_kl"]))
            print(f"{dtype}, plan {place}: {seconds(made.path):.1f} s a step", file=sys.stderr)
            shutil.rmtree(made.path)  # its checkpoint has gigabytes
        equal = sum(each == found[0] for each in found)
        yield equal_case(f"real model, {dtype}: plans with equal bits", equal, len(found))
        name = f"real model, {dtype}: KL before the first update"
        yield case(name, kl, "nats", baseline=None, ratio=None, target=0, holds=kl == 0)


def experts() -> Iterator[dict]:
    for dtype in ("float32", "bfloat16"):
        (differ, count), (without, _) = (
            routing.differing(run_distributed(routing.choices, routing.RANKS, dtype, reproducible)[0])
            for reproducible in ("layout", "plan")
        )
        name = f"experts, {dtype}: of {count:,} choices, those that differ in training"
        yield case(name, differ, "choices", baseline=without, ratio=None, target=0, holds=differ == 0)


def equal_case(name: str, equal: int, count: int) -> dict:
    return case(name, equal, "runs", baseline=count, ratio=None, target=count, holds=equal == count)


def real_plans() -> list[ExecutionPlan]:
    """Seven plans of 1 to 4 workers: every kind of parallelism, alone and between calls. dp x micro-batches of the
    training is 4."""

    def at(count: int, micro_batches: int = 1, **degrees: int) -> CallPlan:
        return CallPlan(devices=(0, count), micro_batches=micro_batches, **degrees)

    one, dp, pp, tp = at(1), at(2, dp=2), at(2, pp=2), at(3, tp=3)
    deep = at(4, pp=4)  # stages of 8, 8, 7 and 7 of the 30 layers, which 2 and 3 divide evenly
    drawn = [
        (one, one, at(1, 4)),
        (dp, dp, at(2, 2, dp=2)),
        (pp, one, at(2, 4, pp=2)),
        (tp, tp, at(3, 4, tp=3)),
        (dp, tp, at(3, 4, pp=3)),
        (tp, pp, at(2, 2, dp=2)),
        (deep, deep, at(4, 4, pp=4)),
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
