"""The planner's problems in the words of version 1."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib import simple_problems
from lib.simple_problems import simple_problem
from msgspec import structs

from realhf.base.errors import UserError
from realhf.dataflow.graph import TRAIN_STEP, DataflowGraph
from realhf.planning import _search, predict
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.file import FileOption, PlannedFile, load_problem, problem_bytes
from realhf.planning.problem.native import native_problem
from realhf.planning.problem.tables import CallTable, OptionRow, Problem
from realhf.planning.task import PlanningTask
from tests.unit.planning import graphs
from tests.unit.planning.evaluate_plan import evaluate
from tests.unit.planning.graphs import call_options
from tests.unit.planning.problem_files import named, random_plan
from tests.unit.planning.test_beside import Rule, all_on, task
from tests.unit.planning.test_problem_dump import planned
from tests.unit.planning.test_problem_tables import moving, problem_of, row


def simple(problem: Problem, graph: DataflowGraph) -> _search.Problem:
    """The engine's problem of a file of version 1."""
    return native_problem(simple_problem(problem, graph).problem())


@given(st.integers(0, 2), st.integers(1, 5), st.integers(0, 10**9))
@settings(max_examples=10, deadline=None)
def test_the_simpler_file_means_what_the_format_says(staleness: int, in_flight: int, seed: int) -> None:
    file = simple_problem(*planned(staleness, in_flight))
    content, rng = json.loads(problem_bytes(file)), random.Random(seed)
    found = native_problem(file.problem())
    for _ in range(5):
        plan = random_plan(content, rng)
        expected = evaluate(content, named(content, plan))
        got = found.evaluate(plan)
        assert got["step_time"] == expected["us_per_step"]
        assert (got["peak_bytes"], got["feasible"]) == (expected["peak_bytes"], expected["feasible"])


def test_the_simpler_file_is_exact_where_nothing_moves() -> None:
    graph = DataflowGraph([graphs.call("model", graphs.TINY, TRAIN_STEP, "prompts")], ["prompts"])
    cluster = graphs.cpu_cluster(4)
    task = PlanningTask(graph=graph, max_steps_in_flight=2, **graphs.settings(graph, cluster))
    problem = build_problem(task, {c.name: call_options(c, task.batch_size, cluster) for c in graph.calls.values()})
    exact, rounded = native_problem(problem), simple(problem, graph)
    assert len(problem.calls[0].options) > 10
    for option in range(len(problem.calls[0].options)):
        assert rounded.evaluate([option])["step_time"] == pytest.approx(
            exact.evaluate([option])["step_time"] * 1e6, abs=1
        )
        assert rounded.evaluate([option])["peak_bytes"] == pytest.approx(exact.evaluate([option])["peak_bytes"], abs=1)


def test_the_simpler_file_knows_staleness_and_the_bound_on_steps() -> None:
    content = json.loads(problem_bytes(simple_problem(*planned(staleness=2, in_flight=3))))
    parents = {call["name"]: call["parents"] for call in content["calls"]}
    assert ["actor: actor_train_step to actor_generate, on the devices of actor_train_step", 3] in parents[
        "actor_generate"
    ]
    assert parents["actor_generate"][-2:] == [["actor_train_step", 3], ["critic_train_step", 3]]
    assert all(steps_back == 1 for name, steps_back in parents["critic_inference"] if name.startswith("critic:"))
    # A bound of as many steps as are unrolled says nothing.
    problem, graph = planned(in_flight=4)
    content = json.loads(problem_bytes(simple_problem(msgspec.structs.replace(problem, steps=4), graph)))
    assert all(name.startswith("actor:") for name, _ in content["calls"][0]["parents"])


def test_what_version_1_cannot_say_is_refused() -> None:
    problem, graph = planned(memory=10_000)
    with pytest.raises(UserError, match=r"actor_generate: no option fits into 0\.00 GiB a device; give more"):
        simple_problem(problem, graph)
    twice = graphs.call("actor", graphs.TINY, TRAIN_STEP, "prompts")
    graph = DataflowGraph([twice, replace(twice, name="again", input_data=["seq"])], ["prompts", "seq"])
    cluster = graphs.cpu_cluster(2)
    task = PlanningTask(graph=graph, max_steps_in_flight=2, **graphs.settings(graph, cluster))
    problem = build_problem(task, {c.name: call_options(c, task.batch_size, cluster) for c in graph.calls.values()})
    with pytest.raises(UserError, match="again: planning-problem/1 cannot say that two calls train actor in one"):
        simple_problem(problem, graph)
    assert PlannedFile.of(problem).calls[1].home == "actor_train_step"


def test_microseconds_of_moves_between_options() -> None:
    rows = [row((place, 1), 1.0, name) for place, name in enumerate("xy")]
    calls = [CallTable(name=name, model="m", trains=False, home="a", parents=[], options=rows) for name in "ab"]
    table = moving([1e-6, 2e-6, 3e-6, 4.4e-6, 5e-6, 6e-6], rows=[1, 0], columns=[2, 0], num_columns=3)
    found = simple_problems._moves(table, calls[0], calls[1], simple_problems.label_with_devices)
    assert found == {
        "x on 0+1>x on 0+1": 6, "x on 0+1>y on 1+1": 4, "y on 1+1>x on 0+1": 3, "y on 1+1>y on 1+1": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("in_flight", "steps", "first"),
    [(1, 3, [("c", 1), ("d", 1)]), (2, 3, [("c", 1), ("c", 2), ("d", 2)]), (3, 3, [("c", 1)]), (4, 3, [("c", 1)])],
)
def test_the_first_calls_of_a_step_wait_for_the_last_ones_of_an_earlier_step(
    in_flight: int, steps: int, first: Any
) -> None:
    parents: dict[str, Any] = {"a": [("c", 1)], "b": [("a", 0)], "c": [("b", 0)], "d": [("b", 0)]}
    simple_problems._bound_steps_in_flight(parents, in_flight, steps)
    assert parents == {"a": first, "b": [("a", 0)], "c": [("b", 0)], "d": [("b", 0)]}


def simple_options(options: Sequence[OptionRow], **fields: Any) -> list[FileOption]:
    problem = problem_of({"a": options[0]}, **fields)
    table = structs.replace(problem.calls[0], options=list(options))
    return simple_problems._simple_options(problem, table, lambda row: row.strategy)


def test_options_in_the_simpler_words() -> None:
    """A copy and what it takes to send count anyway; communicators with each call. What is alike is one."""
    one = row((0, 2), 1.25e-6, static_bytes=10.4, dynamic_bytes=5.0, copy_bytes=7.0)
    linked = structs.replace(one, communicators=(0, 1, 5))
    words: dict[str, Any] = {"devices": (0, 2), "strategy": "a", "time_us": 1}
    assert simple_options([one, one], sending_bytes=4.0, communicator_bytes=3.0) == [
        FileOption(**words, static_bytes=10, peak_bytes=26)
    ]
    assert simple_options([linked], sending_bytes=4.0, communicator_bytes=3.0) == [
        FileOption(**words, static_bytes=19, peak_bytes=35)
    ]
    exact = row((0, 1), 0.0, static_bytes=60.0, dynamic_bytes=40.0)
    larger = structs.replace(exact, copy_bytes=0.5)
    assert [each.peak_bytes for each in simple_options([larger, exact])] == [100]


def test_calls_read_what_others_make_also_by_way_of_a_rule() -> None:
    def edges(of: str) -> list[Any]:
        kinds = {
            "reader": [("rule", "data"), ("maker", "data"), ("other", "version")],
            "rule": [("first", "data")],
        }
        return [SimpleNamespace(parent=parent, kind=kind) for parent, kind in kinds.get(of, [])]

    graph: Any = SimpleNamespace(parents=edges, beside={"rule": None})
    assert list(simple_problems._producers(graph, "reader")) == ["first", "maker"]


def test_what_runs_beside_the_devices_is_left_out(tmp_path: Path) -> None:
    of_rule = task(Rule(seconds_per_sample=0.01))
    problem = predict.problem_of(of_rule, all_on((0, 1)))
    path = tmp_path / "problem.json"
    path.write_bytes(problem_bytes(simple_problem(problem, of_rule.graph)))
    simple = load_problem(path)
    training = next(call for call in simple.calls if call.name == "actor_train_step")
    assert ("actor_generate", 0) in training.parents, "by way of the rule"
    assert not [node.name for node in simple.nodes if node.name == "judge"]
