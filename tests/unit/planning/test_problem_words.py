"""What files of planning problems say, in the planner's words and in version 1."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from realhf.planning.problem import version_1
from realhf.planning.problem.file import PlannedFile, PlannedTransfer, _complaints, load_problem, problem_bytes
from realhf.planning.problem.tables import CallTable, OptionRow, TransferTable
from realhf.planning.problem.version_1 import FileCall, FileOption, FileTransfer, ProblemFile
from tests.unit.planning.test_problem_tables import moving, problem_of, row

# --- files of the planner's words


def test_a_transfer_as_rows_of_times() -> None:
    """Of one row as well; that a problem may say more of it is not the file's."""
    for seconds, columns in (([1.0, 2.0, 3.0], 3), ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), ([4.0], 1)):
        rows = list(range(len(seconds) // columns))
        table = moving(seconds, rows=rows, columns=list(range(columns)), num_columns=columns)
        file = PlannedTransfer.of(table)
        assert file.times_s == [seconds[start : start + columns] for start in range(0, len(seconds), columns)]
        assert file.table() == table
        assert (file.name, file.source, file.target, file.on, file.parents) == ("move", "a", "b", ["b"], [("a", 0)])


def planned(**fields: Any) -> PlannedFile:
    rows = {"a": row((0, 1), 1.0), "b": row((0, 1), 2.0)}
    return PlannedFile.of(problem_of(rows, {"b": [("move", 0)]}, transfers=[moving([3.0], **fields)]))


def test_a_problem_comes_back_from_its_file(tmp_path: Path) -> None:
    rows = {"a": row((0, 1), 1.0), "b": row((0, 1), 2.0)}
    problem = problem_of(rows, {"b": [("move", 0)]}, transfers=[moving([3.0])])
    assert PlannedFile.of(problem).problem() == problem
    assert problem.unit_us == 1_000_000, "a second"
    path = tmp_path / "problem.json"
    path.write_bytes(problem_bytes(PlannedFile.of(problem)))
    assert load_problem(path) == problem
    path.write_bytes(problem_bytes(file_of()))
    assert load_problem(path) == file_of().problem()


@pytest.mark.parametrize(
    ("changes", "complaints"),
    [
        ({}, []),
        ({"times_s": [[]]}, ["transfer 'move': the rows of times_s must be equally long, and not empty",
                             "transfer 'move': columns names 0, but times_s has 0 columns"]),
        ({"times_s": [[1.0], [1.0, 2.0]], "rows": [1]},
         ["transfer 'move': the rows of times_s must be equally long, and not empty"]),
        ({"rows": [0, 0]}, ["transfer 'move': rows has 2 entries; it needs one for each of 'a''s 1 options"]),
        ({"columns": []}, ["transfer 'move': columns has 0 entries; it needs one for each of 'b''s 1 options"]),
        ({"rows": [1]}, ["transfer 'move': rows names 1, but times_s has 1 rows"]),
        ({"columns": [2]}, ["transfer 'move': columns names 2, but times_s has 1 columns"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_transfer(changes: dict[str, Any], complaints: list[str]) -> None:
    file = planned()
    [move] = file.transfers
    broken = structs.replace(file, transfers=[structs.replace(move, **changes)])
    assert list(broken.complaints()) == complaints


def test_a_home_is_a_call_of_the_file() -> None:
    file = planned()
    first, second = file.calls
    broken = structs.replace(file, calls=[first, structs.replace(second, home="nobody")])
    assert list(broken.complaints()) == ["'b': home is 'nobody', which is no call of the file"]


def test_complaints_of_nodes_and_their_names() -> None:
    file = planned(on=["a", "x"], source="y", target="z")
    first, second = file.calls
    places = [f"transfer 'move': '{field}' is '{name}', which is no call of the file"
              for field, name in (("from", "y"), ("to", "z"), ("on", "x"))]  # fmt: skip
    assert list(_complaints(file)) == places
    twice = structs.replace(planned(), calls=[first, structs.replace(second, name="a", parents=[])])
    assert next(_complaints(twice)) == "two nodes have the name 'a'; names of calls and transfers must differ"
    lost = structs.replace(planned(), calls=[structs.replace(first, parents=[("x", 1)]), second])
    assert list(_complaints(lost)) == ["'a': parents names 'x', which is no call and no transfer of the file"]
    circle = structs.replace(planned(), calls=[structs.replace(first, parents=[("b", 0)]), second])
    assert list(_complaints(circle)) == [
        "the nodes of a step wait for one another in a circle; parents must not form a cycle with 0 steps back"
    ]
    back = structs.replace(planned(), calls=[structs.replace(first, parents=[("b", 1)]), second])
    assert list(_complaints(back)) == []


# --- files of version 1


def file_of(**fields: Any) -> ProblemFile:
    options = [
        FileOption(devices=(0, 1), strategy=name, time_us=5, static_bytes=3, peak_bytes=10) for name in ("p", "q")
    ]
    calls = [FileCall(name=name, model="m", trains=False, parents=[], options=options) for name in ("a", "b")]
    given: dict[str, Any] = {
        "format": "planning-problem/1", "num_devices": 2, "devices_per_node": 2, "device_memory_bytes": 50, "steps": 3,
        "calls": calls, "tables": {"t": {"p>q": 7, "q>p": 8}},
        "transfers": [FileTransfer(name="move", source="a", target="b", on="b", table="t", parents=[("a", 0)])],
    }  # fmt: skip
    return ProblemFile(**given | fields)


def test_the_tables_of_a_file() -> None:
    """In its whole microseconds; pairs that cannot differ need no entry."""
    problem = file_of().problem()
    assert (problem.unit_us, problem.steps, problem.max_steps_in_flight) == (1.0, 3, 3)
    assert (problem.num_devices, problem.devices_per_node, problem.device_memory_bytes) == (2, 2, 50)
    first, _ = problem.calls
    assert (first.name, first.home, first.model, first.trains, first.spared) == ("a", "a", "m", False, [])
    assert first.options[0] == OptionRow(
        devices=(0, 1), strategy="p", micro_batches=1, time_s=5, static_bytes=3, dynamic_bytes=7, copy_bytes=0
    )
    assert problem.transfers == [
        TransferTable(name="move", source="a", target="b", on=["b"], parents=[("a", 0)], rows=[0, 1], columns=[0, 1],
                      num_columns=2, seconds=[0, 7, 8, 0], free_if_unmoved=True)
    ]  # fmt: skip
    assert list(file_of().complaints()) == []
    assert list(_complaints(file_of())) == []


def test_what_is_wrong_with_a_file() -> None:
    """Of missing pairs the first one that can occur is named."""
    lacking = file_of(tables={"t": {}})
    text = "table 't' lacks the pair 'p>q', which transfer 'move' can need"
    assert list(lacking.complaints()) == [text]
    moved = [FileOption(devices=(1, 1), strategy="p", time_us=5, static_bytes=10, peak_bytes=10)]
    first, second = file_of().calls
    calls = [first, structs.replace(second, options=moved)]
    assert list(file_of(calls=calls, tables={"t": {"q>p": 8}}).complaints()) == [text.replace("p>q", "p>p")]
    smaller = structs.replace(moved[0], static_bytes=11)
    broken = file_of(calls=[first, structs.replace(second, options=[moved[0], smaller])])
    assert next(broken.complaints()) == "'b': options[1]: static_bytes=11 is above peak_bytes=10"


def test_problems_of_a_size_that_can_be_simulated() -> None:
    """8,192 calls and transfers x steps; one device more than there are is too many."""
    assert list(_complaints(file_of(steps=8192 // 3))) == []
    [complaint] = _complaints(file_of(steps=8192 // 3 + 1))
    assert complaint == "steps=2731 of 3 calls and transfers are more than 8,192 in all; lower steps"
    first, second = file_of().calls
    wide = [structs.replace(option, devices=(1, 1)) for option in second.options]
    assert list(_complaints(file_of(calls=[first, structs.replace(second, options=wide)]))) == []
    wider = [wide[0], structs.replace(wide[1], devices=(1, 2))]
    assert list(_complaints(file_of(calls=[first, structs.replace(second, options=wider)]))) == [
        "'b': options[1]: devices [1, 2] reach beyond num_devices=2"
    ]


def test_microseconds_of_moves_between_options() -> None:
    rows = [row((place, 1), 1.0, name) for place, name in enumerate("xy")]
    calls = [CallTable(name=name, model="m", trains=False, home="a", parents=[], options=rows) for name in "ab"]
    table = moving([1e-6, 2e-6, 3e-6, 4.4e-6, 5e-6, 6e-6], rows=[1, 0], columns=[2, 0], num_columns=3)
    found = version_1._moves(table, calls[0], calls[1], version_1.label_with_devices)
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
    version_1._bound_steps_in_flight(parents, in_flight, steps)
    assert parents == {"a": first, "b": [("a", 0)], "c": [("b", 0)], "d": [("b", 0)]}


def simple(options: Sequence[OptionRow], **fields: Any) -> list[FileOption]:
    problem = problem_of({"a": options[0]}, **fields)
    table = structs.replace(problem.calls[0], options=list(options))
    return version_1._simple_options(problem, table, lambda row: row.strategy)


def test_options_in_the_simpler_words() -> None:
    """A copy and what it takes to send count anyway; communicators with each call. What is alike is one."""
    one = row((0, 2), 1.25e-6, static_bytes=10.4, dynamic_bytes=5.0, copy_bytes=7.0)
    linked = structs.replace(one, communicators=(0, 1, 5))
    words: dict[str, Any] = {"devices": (0, 2), "strategy": "a", "time_us": 1}
    assert simple([one, one], sending_bytes=4.0, communicator_bytes=3.0) == [
        FileOption(**words, static_bytes=10, peak_bytes=26)
    ]
    assert simple([linked], sending_bytes=4.0, communicator_bytes=3.0) == [
        FileOption(**words, static_bytes=19, peak_bytes=35)
    ]
    exact = row((0, 1), 0.0, static_bytes=60.0, dynamic_bytes=40.0)
    larger = structs.replace(exact, copy_bytes=0.5)
    assert [each.peak_bytes for each in simple([larger, exact])] == [100]


def test_calls_read_what_others_make_also_by_way_of_a_rule() -> None:
    def edges(of: str) -> list[Any]:
        kinds = {
            "reader": [("rule", "data"), ("maker", "data"), ("other", "version")],
            "rule": [("first", "data")],
        }
        return [SimpleNamespace(parent=parent, kind=kind) for parent, kind in kinds.get(of, [])]

    graph: Any = SimpleNamespace(parents=edges, beside={"rule": None})
    assert list(version_1._producers(graph, "reader")) == ["first", "maker"]
