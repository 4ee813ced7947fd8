"""Planning at size: seconds until the option tables are built and until `realhf plan` has its answer.

PPO of a 70B actor and a 7B critic on H100 nodes of 8, all legal options, the default budget of the search. The
comparison adds the presets and the best alternative of every call. `--quick` leaves out the largest cluster.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from lib.common import case, finish, parse_arguments
from lib.search_instances import planning_task

from realhf.planning.explain.comparison import best_alternatives
from realhf.planning.options import call_options
from realhf.planning.presets import evaluate_presets
from realhf.planning.problem.builder import build_problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import SearchResult, search_plan
from realhf.planning.task import PlanningTask

DEVICES = (64, 128, 1024)
TABLES_AT, TABLES_TARGET_S = 128, 5.0
ANSWER_TARGET_S = 60.0
GAP_TARGET = 0.03


def main() -> None:
    arguments = parse_arguments(__doc__)
    results = [
        row
        for devices in (DEVICES[:-1] if arguments.quick else DEVICES)
        for row in cases(devices, planning_task(devices // 8))
    ]
    finish("planner", results, arguments.json)


def cases(devices: int, task: PlanningTask) -> Iterator[dict[str, Any]]:
    if devices <= TABLES_AT:  # above, the search leaves out what cannot fit before it builds them
        options = {call.name: call_options(call, task.batch_size, task.cluster) for call in task.graph.calls.values()}
        built = seconds_of(lambda: build_problem(task, options))
        count = sum(len(rows) for rows in options.values())
        yield at_most(f"{devices} devices: tables of {count:,} options built", built, "s", TABLES_TARGET_S)
    found: list[SearchResult] = []
    searched = seconds_of(lambda: found.append(search_plan(task, SearchBudget(), seed=1)))
    [result] = found
    yield at_most(f"{devices} devices: searched, {result.evaluations:,} evaluations", searched, "s", ANSWER_TARGET_S)
    yield at_most(f"{devices} devices: gap of the certificate", result.certificate.gap, "part", GAP_TARGET)
    compared = seconds_of(lambda: (evaluate_presets(task), best_alternatives(task, result.plan)))
    yield at_most(f"{devices} devices: presets and alternatives", compared, "s", ANSWER_TARGET_S)


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def at_most(name: str, value: float, unit: str, target: float) -> dict[str, Any]:
    """A case where less is better; the target is the baseline."""
    return case(
        name, value, unit, baseline=target, ratio=target / max(value, 1e-12), target=target, holds=value <= target
    )


if __name__ == "__main__":
    main()
