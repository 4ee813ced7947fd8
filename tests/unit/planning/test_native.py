"""What the search in C++ is asked for, and what is made of its answer."""

import math
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.architecture.model import DTYPE_BYTES
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.shards import Placement
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.reallocation import Reallocation
from realhf.planning.problem import native
from realhf.planning.problem.native import SearchRequest, num_cores, reallocation_table, search_problem
from realhf.planning.request import SearchBudget
from tests.unit.planning.graphs import TINY, cpu_cluster

SOLUTION: dict[str, Any] = {
    "choice": [1, 2], "step_s": 1.23456, "peak_bytes": 7.0, "feasible": True, "cost": 9.0, "lower_bound_s": 0.25,
    "proven": True, "trace": [(0.1, 2.0), (0.2, 1.0)], "full_evaluations": 1000, "early_rejections": 234,
    "all_evaluations": 5000,
}  # fmt: skip


class Progress:
    """Of a search that has not found a plan yet, and then one."""

    def __init__(self) -> None:
        self.cost, self.evaluations, self.stopped = math.inf, 10, False

    def stop(self) -> None:
        self.stopped = True


def searched(
    monkeypatch: pytest.MonkeyPatch, request: SearchRequest, solution: Any = SOLUTION, waits: int = 0
) -> tuple[native.Found, dict[str, Any], list[tuple[str, str]]]:
    """The answer, what the engine was asked for, and what was said on the way; the search goes on for so many looks."""
    asked: dict[str, Any] = {}
    said: list[tuple[str, str]] = []
    looks = iter(range(waits))

    def solve(**words: Any) -> Any:
        asked.update(words)
        return solution

    def wait(futures: Sequence[Any], timeout: float) -> Any:
        assert timeout > 0
        asked["progress"].cost, number = 2.0, next(looks, None)
        return SimpleNamespace(done=number is None)

    if waits:
        monkeypatch.setattr(native, "wait", wait)
    monkeypatch.setattr(native._search, "Progress", Progress)
    clock = iter((10.0, 13.0))
    monkeypatch.setattr(native, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    problem: Any = SimpleNamespace(solve=solve)
    found = search_problem(problem, request, lambda *words: said.append(words))
    assert asked.pop("progress").stopped
    return found, asked, said


def test_the_answer_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    request = SearchRequest(
        budget=SearchBudget(evaluations=5000), seed=3, threads=2, single_moves=True, proves=False, starts=[[0, 1]]
    )
    found, asked, said = searched(monkeypatch, request)
    assert asked == {
        "seed": 3, "evaluations": 5000, "seconds": 0.0, "threads": 2, "single_moves": True, "proves": False,
        "starts": [[0, 1]],
    }  # fmt: skip
    assert vars(found) == SOLUTION | {"seconds": 3.0}
    assert found.evaluations == 1234
    phase = "searching, 5,000 plans"
    assert said == [(phase, ""), (phase, "best 1.23 s a step after 1,234 plans")]


def test_seconds_go_before_a_number_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all cores that the process may use; what is known is said on the way."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 6} if process == 0 else set())
    assert num_cores() == 3
    request = SearchRequest(budget=SearchBudget(evaluations=5000, seconds=2.5))
    nothing = SOLUTION | {"feasible": False}
    _, asked, said = searched(monkeypatch, request, nothing, waits=1)
    assert (asked["evaluations"], asked["seconds"], asked["threads"]) == (0, 2.5, 3)
    assert (asked["seed"], asked["single_moves"], asked["proves"], asked["starts"]) == (0, False, True, ())
    details = ["", "best 2 s a step after 10 plans", "none that fits after 1,234 plans"]
    assert said == [("searching for 2.5 s", detail) for detail in details]


def test_a_search_that_is_interrupted_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress()
    monkeypatch.setattr(native._search, "Progress", lambda: progress)

    def solve(**_: Any) -> Any:
        raise KeyboardInterrupt

    problem: Any = SimpleNamespace(solve=solve)
    with pytest.raises(KeyboardInterrupt):
        search_problem(problem, SearchRequest(budget=SearchBudget(evaluations=1)))
    assert progress.stopped


CLUSTER = cpu_cluster(2, num_nodes=2)
LINKS = load_hardware("h100")


def layout(first: int, strategy: ParallelStrategy) -> Layout:
    return Layout(DeviceMesh(first, strategy.size), strategy)


@pytest.mark.parametrize("forwarding", [True, False])
def test_seconds_of_moves_within_and_across_nodes(forwarding: bool) -> None:
    """As the plain computation has them; so are those of grouped layouts, which the engine does not know."""
    move = Reallocation(TINY, DTYPE_BYTES["float32"], CLUSTER, LINKS, forwarding)
    plain = [layout(0, ParallelStrategy(tp=2)), layout(1, ParallelStrategy()), layout(0, ParallelStrategy(2, 1, 2, 2)),
             layout(2, ParallelStrategy(dp=2))]  # fmt: skip
    sources = [Placement(plain[0]), Placement(plain[3], "fsdp"), Placement(plain[1])]
    found = list(reallocation_table(move, sources, plain))
    assert found == pytest.approx(move.table(sources, plain))
    assert len(set(found)) > 4
    grouped = layout(0, ParallelStrategy(dp=4, micro_dp=(2, 1)))
    assert reallocation_table(move, sources, [*plain, grouped]) == move.table(sources, [*plain, grouped])
    assert reallocation_table(move, [Placement(grouped)], plain) == move.table([Placement(grouped)], plain)
