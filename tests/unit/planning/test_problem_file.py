"""Planning problems as files: the engine's costs are those of the format's meaning; broken files are refused."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.base.errors import UserError
from realhf.planning.problem.file import ProblemFile, load_problem, problem_bytes
from tests.unit.planning.evaluate_plan import Problem, evaluate
from tests.unit.planning.problem_files import (
    FOLDER,
    NAMES,
    named,
    native,
    random_plan,
    random_problem,
    reference_problem,
)


def assert_same_costs(problem: Problem, num_plans: int, seed: int) -> None:
    rng = random.Random(seed)
    engine = native(problem)
    for _ in range(num_plans):
        plan = random_plan(problem, rng)
        expected = evaluate(problem, named(problem, plan))
        found = engine.evaluate(plan)
        assert found["step_time"] == expected["us_per_step"]  # to the microsecond, and beyond
        assert (found["peak_bytes"], found["feasible"]) == (expected["peak_bytes"], expected["feasible"])


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_the_reference_evaluators(name: str) -> None:
    assert_same_costs(reference_problem(name), 500, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_costs_of_ten_thousand_plans_are_the_reference_evaluators(name: str) -> None:
    assert_same_costs(reference_problem(name), 10_000, seed=2)


@given(st.integers(0, 10**9))
@settings(max_examples=200, deadline=None)
def test_costs_of_any_graph_are_the_reference_evaluators(seed: int) -> None:
    assert_same_costs(random_problem(seed), 5, seed)


def test_a_written_problem_reads_back(tmp_path: Path) -> None:
    path = FOLDER / "n1_steps3.json"
    file = msgspec.json.decode(path.read_bytes(), type=ProblemFile)
    (tmp_path / "copy.json").write_bytes(problem_bytes(file))
    assert load_problem(tmp_path / "copy.json") == load_problem(path)


def change(path: str, value: Any) -> Callable[[Problem], None]:
    """Sets problem[a][b]... for the path "a.b", or deletes it where the value is `...`."""

    def apply(problem: Problem) -> None:
        *parts, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        inner: Any = problem
        for part in parts:
            inner = inner[part]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value

    return apply


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (change("format", "planning-problem/9"), r"Invalid enum value .* at `\$.format`"),
        (change("steps", 0), r"at `\$.steps`"),
        (change("device_memory_bytes", -1), r"at `\$.device_memory_bytes`"),
        (change("num_devices", ...), "missing required field `num_devices`"),
        (change("num_devices", "8"), r"at `\$.num_devices`"),
        (change("calls/0/options/0/time_us", 1.5), r"at `\$.calls\[0\].options\[0\].time_us`"),
        (change("calls/0/options/0/time_us", -1), r"at `\$.calls\[0\].options\[0\].time_us`"),
        (change("calls/0/options/0/devices", [2**20 + 1, 1]), r"at `\$.calls\[0\].options\[0\].devices\[0\]`"),
        (change("calls/0/options/0/devices", [0, 0]), r"at `\$.calls\[0\].options\[0\].devices\[1\]`"),
        (change("calls/0/options/0/devices", [4, 5]), r"'actor_gen': options\[0\]: devices \[4, 5\] reach beyond"),
        (change("calls/0/options/0/static_bytes", 10**12), "'actor_gen'.*static_bytes=1000000000000 is above"),
        (change("calls/0/options", []), r"at `\$.calls\[0\].options`"),
        (change("calls/0/parents", [["actor_train", 1]] * 1025), r"at `\$.calls\[0\].parents`"),
        (change("calls/0/parents", [["nobody", 1]]), "'actor_gen': parents names 'nobody'"),
        (change("calls/0/parents", [["actor_train", -1]]), r"at `\$.calls\[0\].parents\[0\]\[1\]`"),
        (change("calls/0/parents", [["actor_train", 0]]), "in a circle"),
        (change("calls/1/name", "actor_gen"), "two nodes have the name 'actor_gen'"),
        (change("transfers/0/on", "nobody"), "'on' is 'nobody'"),
        (change("transfers/0/table", "nothing"), "table is 'nothing'"),
        (change("tables/actor/pp2tp2dp2>pp1tp8dp1", ...), "lacks the pair 'pp2tp2dp2>pp1tp8dp1'"),
    ],
)
def test_broken_files_are_refused(broken: Callable[[Problem], None], message: str, tmp_path: Path) -> None:
    problem = copy.deepcopy(reference_problem("n1_steps3"))
    broken(problem)
    path = tmp_path / "broken.json"
    path.write_bytes(msgspec.json.encode(problem))
    with pytest.raises(UserError, match=message) as error:
        load_problem(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_files_that_hold_no_problem_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(UserError, match="planning-problem/1"):
        load_problem(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: cannot be read"):
        load_problem(tmp_path / "none.json")
