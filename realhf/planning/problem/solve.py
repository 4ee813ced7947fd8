"""A planning problem from a file is solved: what `realhf search` asks, and its answer."""

import os
import time
from dataclasses import dataclass, field
from typing import Any

from realhf.base.numbers import check_range
from realhf.planning.problem.native import native_problem
from realhf.planning.problem.tables import Problem
from realhf.planning.request import SEEDS, SearchBudget

DEFAULT_SECONDS = 10.0
THREADS = (1, 1024)


@dataclass(frozen=True, kw_only=True)
class SolveRequest:
    """A search within `budget` (by default `DEFAULT_SECONDS`) on `threads` threads (None: one for every core).

    `single_moves`: Metropolis-Hastings that changes one call at a time and nothing else, without a proof.

    Raises:
        UserError: a number is out of its range.
    """

    budget: SearchBudget = field(default_factory=SearchBudget)
    seed: int = 0
    threads: int | None = None
    single_moves: bool = False

    def __post_init__(self) -> None:
        check_range("--seed", self.seed, *SEEDS)
        if self.threads is not None:
            check_range("--threads", self.threads, *THREADS)


def solve(problem: Problem, request: SolveRequest) -> dict[str, Any]:
    """The best plan found and a bound on all plans: what `realhf search --json` writes.

    `lower_bound_us` is None if it is proven that no plan fits into memory, which `proven` then stands for.
    """
    native, unit_us, budget = native_problem(problem), problem.unit_us, request.budget
    start = time.perf_counter()
    solution = native.solve(
        seed=request.seed,
        evaluations=budget.evaluations or 0,
        seconds=0.0 if budget.evaluations else budget.seconds or DEFAULT_SECONDS,
        threads=request.threads or len(os.sched_getaffinity(0)),
        single_moves=request.single_moves,
        proves=not request.single_moves,
    )
    elapsed = time.perf_counter() - start
    evaluation = solution["evaluation"]
    nothing_fits = solution["proven"] and not evaluation["feasible"]
    return {
        "plan": dict(zip([call.name for call in problem.calls], solution["plan"], strict=True)),
        "us_per_step": evaluation["step_time"] * unit_us,
        "peak_bytes": int(evaluation["peak_bytes"]),
        "feasible": evaluation["feasible"],
        "lower_bound_us": None if nothing_fits else solution["lower_bound"] * unit_us,
        "proven": solution["proven"],
        "evaluations": solution["evaluations"],
        "evaluations_per_s": solution["evaluations"] / max(elapsed, 1e-9),
        "full_evaluations": solution["search_full"],
        "early_rejections": solution["search_rejected"],
        "seconds": elapsed,
        "seed": request.seed,
        "trace": [(at_s, cost * unit_us) for at_s, cost in solution["trace"]],
    }
