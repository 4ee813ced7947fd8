"""What the planner solves, written as a problem file: every plan costs the same, broken files are refused."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.file import PlannedFile, load_problem, problem_bytes
from realhf.planning.problem.native import SearchRequest, native_problem, search_problem
from realhf.planning.problem.tables import Problem
from realhf.planning.request import SearchBudget
from realhf.planning.task import PlanningTask, with_staleness
from tests.unit.planning import graphs
from tests.unit.planning.graphs import call_options
from tests.unit.planning.problem_files import random_plan
from tests.unit.planning.simulation import device_needs, makespan_s, simulate


def planned(staleness: int = 0, in_flight: int = 2, memory: int = 2**32) -> tuple[Problem, DataflowGraph]:
    """PPO on two nodes of two devices."""
    graph = with_staleness(graphs.ppo(), staleness)
    cluster = graphs.cpu_cluster(2, num_nodes=2, memory=memory)
    task = PlanningTask(graph=graph, max_steps_in_flight=in_flight, **graphs.settings(graph, cluster))
    return build_problem(task, {c.name: call_options(c, task.batch_size, cluster) for c in graph.calls.values()}), graph


@given(st.integers(0, 2), st.integers(1, 5), st.integers(0, 10**9))
@settings(max_examples=20, deadline=None)
def test_every_plan_costs_what_the_planner_says(staleness: int, in_flight: int, seed: int) -> None:
    problem, _ = planned(staleness, in_flight)
    file = msgspec.json.decode(problem_bytes(PlannedFile.of(problem)), type=PlannedFile)
    planner, found, rng = native_problem(problem), native_problem(file.problem()), random.Random(seed)
    for _ in range(20):
        plan = random_plan(msgspec.to_builtins(file), rng)
        assert found.evaluate(plan) == planner.evaluate(plan)  # to the last bit
    # Once more against the meaning of the planner's tables, which knows no file and no engine.
    seconds = makespan_s(simulate(problem, plan, problem.steps)) / problem.steps
    assert found.evaluate(plan)["step_time"] == pytest.approx(seconds, abs=1e-6)
    assert found.evaluate(plan)["peak_bytes"] == max(need.peak_bytes for need in device_needs(problem, plan))


@pytest.mark.slow
def test_a_solved_file_is_the_planners_plan(tmp_path: Path) -> None:
    problem, _ = planned(staleness=1, in_flight=3)
    (tmp_path / "problem.json").write_bytes(problem_bytes(PlannedFile.of(problem)))
    read = load_problem(tmp_path / "problem.json")
    request = SearchRequest(budget=SearchBudget(evaluations=5000), seed=3, threads=2)
    solved = search_problem(native_problem(read), request)
    planner = search_problem(native_problem(problem), replace(request, threads=None))
    assert solved.choice == planner.choice
    assert read.unit_us == problem.unit_us
    assert solved.step_s == pytest.approx(planner.step_s, rel=1e-12)
    assert solved.lower_bound_s == pytest.approx(planner.lower_bound_s, rel=1e-12)
    assert solved.trace[-1][1] >= solved.step_s * (1 - 1e-9)


def set_to(value: Any, *path: str | int) -> Callable[[Any], None]:
    def apply(inner: Any) -> None:
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (set_to(0, "max_steps_in_flight"), r"at `\$.max_steps_in_flight`"),
        (set_to(-1.0, "calls", 0, "options", 0, "time_s"), r"at `\$.calls\[0\].options\[0\].time_s`"),
        (set_to("nobody", "calls", 0, "home"), "'actor_generate': home is 'nobody'"),
        (set_to([3, 2], "calls", 0, "options", 1, "devices"), r"options\[1\]: devices \[3, 2\] reach beyond num_dev"),
        (set_to([["nobody", 1]], "calls", 0, "parents"), "parents names 'nobody'"),
        (set_to("reward_inference", "calls", 0, "name"), "two nodes have the name 'reward_inference'"),
        (set_to("nobody", "transfers", 0, "to"), "'to' is 'nobody'"),
        (set_to(["nobody"], "transfers", 0, "on"), "'on' is 'nobody'"),
        (set_to(["a", "b", "c"], "transfers", 0, "on"), r"at `\$.transfers\[0\].on`"),
        (set_to([[1.0], [1.0, 2.0]], "transfers", 0, "times_s"), "times_s must be equally long"),
        (set_to([0], "transfers", 0, "rows"), "rows has 1 entries; it needs one for each of"),
        (set_to(99, "transfers", 0, "columns", 0), "columns names 99, but times_s has"),
        (set_to([["actor_train_step", 0]], "calls", 0, "parents"), "in a circle"),
    ],
)
def test_broken_files_are_refused(broken: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    content = json.loads(problem_bytes(PlannedFile.of(planned()[0])))
    broken(content)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as error:
        load_problem(path)
    assert str(path) in str(error.value)
