"""The C++ search of plans, and its tables."""

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Annotated, Any, NamedTuple

from msgspec.structs import asdict

from realhf.base.options import Option, Options
from realhf.geometry.layout import Layout
from realhf.geometry.shards import Placement
from realhf.planning import _search
from realhf.planning.model.reallocation import Reallocation
from realhf.planning.model.sizes import model_sizes
from realhf.planning.problem.tables import CallTable, Problem, TransferTable
from realhf.planning.request import SEEDS, SearchBudget, Watch, unwatched

_UPDATES_EVERY_S = 0.5
THREADS = (1, 1024)
NativeProblem = _search.Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchRequest(Options):
    """A search of a problem on `threads` threads (None: one for every core), from no worse than any of the choices
    `starts`. Without `proves` there is no more than a rough bound. `single_moves`: Metropolis-Hastings that changes
    one call at a time and nothing else. A budget with seconds goes on for so long, whatever its evaluations.

    Raises:
        UserError: a number is out of its range.
    """

    budget: SearchBudget
    seed: Annotated[int, Option("seed of all random numbers", range=SEEDS)] = 0
    threads: Annotated[int | None, Option("threads of the search (default: one for every core)", range=THREADS)] = None
    single_moves: bool = False
    proves: bool = True
    starts: Sequence[Sequence[int]] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The solution of a problem: the chosen option of every call; times of steps are in the problem's unit.

    `lower_bound_s` bounds the `step_s` of every feasible choice from below (infinite if there is
    none), and `proven` says that this choice is optimal. The search evaluated `full_evaluations` plans to the end and
    rejected others early; `all_evaluations` counts those for its starts and its proof too.
    """

    choice: list[int]
    step_s: float
    peak_bytes: float
    feasible: bool
    cost: float
    lower_bound_s: float
    proven: bool
    trace: Sequence[tuple[float, float]]
    full_evaluations: int
    early_rejections: int
    all_evaluations: int
    seconds: float

    @property
    def evaluations(self) -> int:
        return self.full_evaluations + self.early_rejections


class Event(NamedTuple):
    """Node `node` of step `step` ran from `start_s` to `end_s`; its place in `Problem.nodes`. It waited for the events
    `waits_for`, by their place among all: its parents, and what its devices did before."""

    node: int
    step: int
    start_s: float
    end_s: float
    waits_for: list[int]


class DeviceNeed(NamedTuple):
    """Bytes on a device: its communicators, each once; with them all that stays there whatever runs; the peak."""

    communicator_bytes: float
    static_bytes: float
    peak_bytes: float


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def native_problem(problem: Problem) -> _search.Problem:
    """The problem in the searcher's memory.

    Raises:
        ValueError: the tables do not fit together.
    """
    number = problem.numbers()

    def numbers(names: Iterable[str]) -> list[int]:
        return [number[name] for name in names]

    def table(node: CallTable | TransferTable, **fields: Any) -> dict[str, Any]:
        parents = [(number[parent], steps_back) for parent, steps_back in node.parents]
        return asdict(node) | {"parents": parents} | fields

    calls = [table(call, home=number[call.home]) for call in problem.calls]
    transfers = [
        table(move, source=number[move.source], target=number[move.target], on=numbers(move.on))
        for move in problem.transfers
    ]
    kept = [(number[each.source], numbers(each.takers), numbers(each.beside), each.size_bytes) for each in problem.kept]
    return _search.Problem(asdict(problem) | {"calls": calls, "transfers": transfers, "kept": kept})


def simulate(
    native: _search.Problem, choice: Sequence[int], steps: int, order: Sequence[tuple[int, int]] = ()
) -> list[Event]:
    """Algorithm 1 of the ReaL paper over `steps` steps: nodes in the order in which they become ready; ties: the
    earlier step, then the node's number. Returns the events in that order.

    `order` lists all (node, step) of some nodes, every parent before its children: those that share a device then run
    in that order. Other transfers remain free to run as soon as they are ready.

    Raises:
        ValueError: the order breaks an edge.
    """
    return [Event(*event) for event in native.trace(choice, steps, order)]


def device_needs(native: _search.Problem, choice: Sequence[int]) -> list[DeviceNeed]:
    """What each device needs: static bytes of all calls placed on it, plus the largest dynamic need of one of them;
    communicators, and what it takes to send copies.

    A call whose layout is not that of its home holds a copy of its parameters while it runs (`CallTable.spared`), and
    keeps nothing: the copy is freed, unless others take theirs from it (`Problem.kept`).
    """
    return [DeviceNeed(*need) for need in native.device_needs(choice)]


def search_problem(native: _search.Problem, request: SearchRequest, watch: Watch = unwatched) -> Found:
    """Searches a problem; the same seed and evaluations give the same choice on any number of threads. An interruption
    ends the search."""
    start = time.perf_counter()
    progress, evaluations, seconds = _search.Progress(), request.budget.evaluations or 0, request.budget.seconds

    phase = f"searching for {seconds:g} s" if seconds else f"searching, {evaluations:,} plans"
    watch(phase, "")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            native.solve,
            seed=request.seed,
            evaluations=0 if seconds else evaluations,
            seconds=seconds or 0.0,
            threads=request.threads or num_cores(),
            single_moves=request.single_moves,
            proves=request.proves,
            starts=request.starts,
            progress=progress,
        )
        try:
            while not wait([future], timeout=_UPDATES_EVERY_S).done:
                watch(phase, _text(progress.cost, progress.evaluations))
            solution = future.result()
        finally:
            progress.stop()
    found = Found(**solution, seconds=time.perf_counter() - start)
    watch(phase, _text(found.step_s if found.feasible else math.inf, found.evaluations))
    return found


def _text(best_s: float, evaluations: int) -> str:
    best = f"best {best_s:.3g} s a step" if math.isfinite(best_s) else "none that fits"
    return f"{best} after {evaluations:,} plans"


def reallocation_table(
    move: Reallocation, sources: Sequence[Placement], targets: Sequence[Layout]
) -> list[float] | _search.Table:
    """As `Reallocation.table`, computed in C++, which keeps each number once; a problem made of it shares them.

    Layouts with micro data-parallel groups, which only given plans have, are left to Python: C++ does not know them.
    """
    layouts = (*(source.layout for source in sources), *targets)
    if any(layout.strategy.micro_dp != (1, 1) for layout in layouts):
        return move.table(sources, targets)
    sizes, links = model_sizes(move.model), move.links
    return _search.reallocation_table(
        dataclasses.asdict(sizes),
        [_layout_row(source.layout, source.divided) for source in sources],
        [_layout_row(target) for target in targets],
        within_node=(links.intra_node_latency_s, move.item / links.intra_node_bandwidth),
        across_nodes=(links.inter_node_latency_s, move.item / links.send_bandwidth),
        devices_per_node=move.cluster.devices_per_node,
        most_sent=sizes.total if move.forwarding else 2**63 - 1,
        threads=num_cores(),
    )


def _layout_row(layout: Layout, divided: int = 1) -> tuple[int, int, int, int, int, int, int]:
    mesh, strategy = layout.mesh, layout.strategy
    return (mesh.first, mesh.size, strategy.dp, strategy.tp, strategy.pp, strategy.chunks, divided)
