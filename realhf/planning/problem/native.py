"""The C++ search and its tables; the only importer of its module."""

import dataclasses
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from msgspec.structs import asdict

from realhf.geometry.layout import Layout
from realhf.planning import _search
from realhf.planning.model.reallocation import Reallocation
from realhf.planning.model.sizes import model_sizes
from realhf.planning.problem.tables import CallTable, Problem, TransferTable
from realhf.planning.watching import Watch, unwatched

UPDATES_EVERY_S = 0.5
NativeProblem = _search.Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The solution of a problem: the chosen option of every call.

    `lower_bound_s` bounds the `step_s` of every feasible choice from below (infinite if there is
    none), and `proven` says that this choice is optimal.
    """

    choice: list[int]
    step_s: float
    peak_bytes: float
    feasible: bool
    cost: float
    lower_bound_s: float
    proven: bool
    trace: tuple[tuple[float, float], ...]
    evaluations: int
    seconds: float


def native_problem(problem: Problem) -> _search.Problem:
    """The problem in the searcher's memory.

    Raises:
        ValueError: the tables do not fit together.
    """
    number = problem.numbers()

    def table(node: CallTable | TransferTable, **fields: Any) -> dict[str, Any]:
        parents = [(number[parent], steps_back) for parent, steps_back in node.parents]
        return asdict(node) | {"parents": parents} | fields

    calls = [table(call, home=number[call.home]) for call in problem.calls]
    transfers = [
        table(move, source=number[move.source], target=number[move.target], on=tuple(number[call] for call in move.on))
        for move in problem.transfers
    ]
    return _search.Problem(asdict(problem) | {"calls": calls, "transfers": transfers})


def search_problem(
    native: _search.Problem,
    *,
    seed: int,
    evaluations: int,
    seconds: float | None = None,
    starts: Sequence[Sequence[int]] = (),
    proves: bool = True,
    watch: Watch = unwatched,
) -> Found:
    """Searches a problem on all cores; the same seed and evaluations give the same choice on any number of them.

    With `seconds`, for so long at most, whatever the number of evaluations. What is found is no worse than any of the
    choices `starts`. Without `proves` there is no more than a rough bound. An interruption ends the search.
    """
    start = time.perf_counter()
    progress = _search.Progress()

    def solve() -> "_search.Solution":
        return native.solve(
            seed=seed,
            evaluations=0 if seconds else evaluations,
            seconds=seconds or 0.0,
            threads=len(os.sched_getaffinity(0)),
            single_moves=False,
            proves=proves,
            starts=starts,
            progress=progress,
        )

    phase = f"searching for {seconds:g} s" if seconds else f"searching, {evaluations:,} plans"
    watch(phase, "")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(solve)
        try:
            while not wait([future], timeout=UPDATES_EVERY_S).done:
                watch(phase, _text(progress.cost, progress.evaluations))
            solution = future.result()
        finally:
            progress.stop()
    evaluation, evaluations = solution["evaluation"], solution["search_full"] + solution["search_rejected"]
    watch(phase, _text(evaluation["step_time"] if evaluation["feasible"] else math.inf, evaluations))
    return Found(
        choice=solution["plan"],
        step_s=evaluation["step_time"],
        peak_bytes=evaluation["peak_bytes"],
        feasible=evaluation["feasible"],
        cost=evaluation["cost"],
        lower_bound_s=solution["lower_bound"],
        proven=solution["proven"],
        trace=tuple(solution["trace"]),
        evaluations=evaluations,
        seconds=time.perf_counter() - start,
    )


def _text(best_s: float, evaluations: int) -> str:
    best = f"best {best_s:.3g} s a step" if math.isfinite(best_s) else "none that fits"
    return f"{best} after {evaluations:,} plans"


def reallocation_table(move: Reallocation, sources: Sequence[Layout], targets: Sequence[Layout]) -> Sequence[float]:
    """As `Reallocation.table`, computed in C++; a buffer of doubles in its memory.

    Layouts with model chunks or micro data-parallel groups, which only given plans have, are left to Python: C++ does
    not know them.
    """
    if any(layout.strategy.chunks > 1 or layout.strategy.micro_dp != (1, 1) for layout in (*sources, *targets)):
        return move.table(sources, targets)
    links = move.links
    table = _search.reallocation_table(
        dataclasses.asdict(model_sizes(move.model)),
        [_layout_row(s) for s in sources],
        [_layout_row(t) for t in targets],
        within_node=(links.intra_node_latency_s, move.item / links.intra_node_bandwidth),
        across_nodes=(links.inter_node_latency_s, move.item / links.inter_node_bandwidth),
        devices_per_node=move.cluster.devices_per_node,
        forwarding=move.forwarding,
    )
    return memoryview(table).cast("B").cast("d")  # its bytes are doubles


def _layout_row(layout: Layout) -> tuple[int, int, int, int, int]:
    strategy = layout.strategy
    return (layout.mesh.first, layout.mesh.size, strategy.dp, strategy.tp, strategy.pp)
