"""Planning at size: how soon `realhf plan` has its answer, how good that is proven to be, and whether it keeps to time.

- The tables of PPO of a 70B actor and a 7B critic, all ways to run every call, on H100 nodes of 8.
- 70B actors with critics of 7B and 70B at 128 and 1,024 devices: the answer in 60 s, preparation included, and its
  proven gap; and the most memory that such an answer takes at 1,024 devices, in a process of its own.
- Problems of others (`tests/data/planning_problems`) at 8 and 16 devices: seconds until the optimum is proven.
- Budgets of 0.2 to 5 s on clusters of 8 to 128 devices: by how much the worst answer is late.

`--quick` leaves out 1,024 devices and large budgets.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from lib.common import case, finish, parse_arguments
from lib.search_instances import LLAMA_7B, LLAMA_34B, LLAMA_70B, planning_task

from realhf.architecture.model import DecoderConfig
from realhf.planning.explain.comparison import describe, explain
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.file import load_problem
from realhf.planning.problem.native import SearchRequest, native_problem, search_problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import SearchResult, search_plan, without_collection, worthwhile_options
from realhf.planning.task import PlanningTask

MEASURES = (
    "realhf/planning",
    "realhf/geometry",
    "csrc/search",
    "benchmarks/lib/search_instances.py",
    "tests/data/planning_problems",
)
P = ParamSpec("P")
T = TypeVar("T")

TABLES_TARGETS_S = {128: 2.0, 1024: 10.0}
ANSWER_S, ANSWER_TARGET_S, GAP_TARGET = 55.0, 60.0, 0.03
PROOF_TARGET_S, LATE_TARGET_S, MEMORY_TARGET_GB, MEMORY_BUDGET_S = 1.0, 2.0, 1.0, 20.0
PROBLEMS = Path(__file__).resolve().parent.parent / "tests" / "data" / "planning_problems"
BUDGETS_S = (0.2, 1.0, 5.0)


def main() -> None:
    arguments = parse_arguments(__doc__)
    results = [*proofs(), *lateness(BUDGETS_S[:1] if arguments.quick else BUDGETS_S)]
    for devices in (128,) if arguments.quick else (128, 1024):
        results += tables(devices)
        results += answers(devices, 10.0 if arguments.quick else ANSWER_S)
        results += memory(devices, 5.0 if arguments.quick else MEMORY_BUDGET_S)
    finish("planner", results, arguments.json)


def proofs() -> Iterator[dict[str, Any]]:
    optima = json.loads((PROBLEMS / "optima.json").read_text())
    for path in sorted(path for path in PROBLEMS.glob("*.json") if path.stem in optima):
        problem = load_problem(path)
        native = native_problem(problem)
        for threads in (1, 2):
            request = SearchRequest(budget=SearchBudget(seconds=30), seed=1, threads=threads)
            seconds, found = timed(search_problem, native, request)
            if not found.proven or found.step_s != optima[path.stem]["best_us_per_step"]:
                raise AssertionError(f"{path}: {found.step_s} us a step is not the optimum that is known")
            name = f"{path.stem}, {problem.num_devices} devices, {threads} threads: optimum proven"
            yield at_most(name, seconds, "s", PROOF_TARGET_S)


def lateness(budgets_s: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """The worst of several clusters, for each budget."""
    settings = ((1, LLAMA_7B), (2, LLAMA_7B), (4, LLAMA_34B), (8, LLAMA_70B), (16, LLAMA_70B))
    for budget_s in budgets_s:
        late = max(timed(explained, planning_task(*setting), budget_s)[0] - budget_s for setting in settings)
        name = f"budget of {budget_s:g} s: the latest of {len(settings)} answers"
        yield at_most(name, late, "s late", LATE_TARGET_S)


def explained(task: PlanningTask, budget_s: float) -> SearchResult:
    """A plan with its intervals, and with its rationale, as users get it."""
    found = search_plan(replace(task, seed=1), SearchBudget(seconds=budget_s))
    explain(describe(task, found))
    return found


def built(task: PlanningTask) -> int:
    """The number of options in the tables of a search."""
    with without_collection():
        problem = build_problem(task, worthwhile_options(task), groups=True)
        native_problem(problem)
    return sum(len(call.options) for call in problem.calls)


def tables(devices: int) -> Iterator[dict[str, Any]]:
    seconds, count = timed(built, planning_task(devices // 8))
    yield at_most(f"{devices} devices: tables of {count:,} options", seconds, "s", TABLES_TARGETS_S[devices])


def answers(devices: int, budget_s: float) -> Iterator[dict[str, Any]]:
    for critic, name in ((LLAMA_7B, "7B"), (LLAMA_70B, "70B")):
        seconds, found = timed(explained, planning_task(devices // 8, critic=critic), budget_s)
        which = f"70B + {name} on {devices} devices"
        yield at_most(f"{which}: answer", seconds, "s", ANSWER_TARGET_S)
        yield at_most(f"{which}: proven gap", found.certificate.gap, "part", GAP_TARGET)


def memory(devices: int, budget_s: float) -> Iterator[dict[str, Any]]:
    for critic, name in ((LLAMA_7B, "7B"), (LLAMA_70B, "70B")):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            peak_gb = pool.submit(peak_of_answer, devices, critic, budget_s).result()
        yield at_most(f"70B + {name} on {devices} devices: peak memory", peak_gb, "GB", MEMORY_TARGET_GB)


def peak_of_answer(devices: int, critic: DecoderConfig, budget_s: float) -> float:
    """GB that this process has had at most, after an answer."""
    explained(planning_task(devices // 8, critic=critic), budget_s)
    [peak_kib] = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(peak_kib) * 1024 / 1e9


def timed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[float, T]:
    """Seconds that the work took, and what it returned."""
    start = time.perf_counter()
    result = work(*args, **kwargs)
    return time.perf_counter() - start, result


def at_most(name: str, value: float, unit: str, target: float) -> dict[str, Any]:
    """A case where less is better; the target is the baseline."""
    return case(
        name, value, unit, baseline=target, ratio=target / max(value, 1e-12), target=target, holds=value <= target
    )


if __name__ == "__main__":
    main()
