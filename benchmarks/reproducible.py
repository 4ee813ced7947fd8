"""`reproducible="layout"`: the same bits under every plan, and what that costs.

Pairs: jobs drawn from seeds (PPO and GRPO; models of several kinds, dense and with experts; float32 and bfloat16; 1 to
4 workers), each of 6 steps under two plans. A pair counts if the digests of all weights and of all that its calls made,
and all statistics, are equal in both. Cost: the median, over pairs, of the seconds of a step with the option over those
without, under one plan, one run directly after the other; the first two steps of a run do not count. It is that of 1
and 2 workers, since more share this machine's two cores.
Real: 3 steps of GRPO of SmolLM2-135M-Instruct under seven plans, compared in the same way; the baseline is how many
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
from pathlib import Path
from typing import Any

from lib.common import ROOT, case, case_parser, finish
from lib.random_layouts import Drawn, draw
from platformdirs import user_cache_path

from realhf.data import sort_task
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.experiments import ready_file

sys.path.insert(0, str(ROOT))  # for the launcher of the tests, whose processes start in a second
sys.path.insert(0, str(ROOT / "scripts"))
import real_job

from tests.e2e.forked import quickly_finished
from tests.e2e.runs import FinishedRun

MEASURES = (
    "realhf/algorithms",
    "realhf/cpu",
    "realhf/engine",
    "realhf/models",
    "realhf/parallel",
    "csrc/kernels",
    "benchmarks/lib/random_layouts.py",
)
PAIRS, MOST_WORKERS = 50, 4
MOST_COST = 1.3
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
        costs[plan.num_devices].append(seconds(runs["layout"]) / seconds(runs["plan"]))
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
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return quickly_finished(
            folder / "run", Path(drawn.experiment), *drawn.words, *words, "--plan", folder / "plan.json"
        )


def results_of(run: FinishedRun) -> list[Any]:
    """By step all statistics; by call the digests of the weights that it used, and of the weights and optimizer states
    that it made; and those of all that calls made."""
    lines = [
        {name: value for name, value in line.items() if name not in _TIMES and not name.endswith("_seconds")}
        | {name: [call.get(key) for key in _DIGESTS] for name, call in line["calls"].items()}
        for line in run.metrics
    ]
    return [*lines, *map(json.loads, (run.path / "outputs.jsonl").read_text().splitlines())]


def seconds(run: FinishedRun) -> float:
    """A step's, without the first two, in which kernels and buffers are made."""
    return statistics.median(line["time_s"] for line in run.metrics[2:])


def real(folder: Path) -> Iterator[dict]:
    model = real_job.fetched_model(user_cache_path("realhf") / "models")
    train, _ = real_job.write_questions(folder / "real", real_job.SUMS)
    words = ["--model", str(model), "--data", str(train), *real_job.SUMS.words, "--reproducible", "layout"]
    words += ["--steps", "3", "--batch-size", "16", "--mini-batches", "1", "--grpo.samples-per-prompt", "4"]
    words += ["--grpo.max-new-tokens", "12", "--grpo.epochs", "1", "--actor.lr", "1e-5"]
    for dtype in ("float32", "bfloat16"):
        found, kl = [], 0.0
        for place, plan in enumerate(real_plans()):
            drawn = Drawn("", str(ready_file("grpo")), (*words, "--dtype", dtype), (plan, plan))
            made = run(folder / f"real-{dtype}-{place}", drawn, plan)
            found.append(results_of(made))
            kl = max(kl, abs(made.metrics[0]["ref_kl"]))
            print(f"{dtype}, plan {place}: {seconds(made):.1f} s a step", file=sys.stderr)
            shutil.rmtree(made.path)  # its checkpoint has gigabytes
        equal = sum(each == found[0] for each in found)
        yield equal_case(f"real model, {dtype}: plans with equal bits", equal, len(found))
        name = f"real model, {dtype}: KL before the first update"
        yield case(name, kl, "nats", baseline=None, ratio=None, target=0, holds=kl == 0)


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
