"""What files of planning problems say, in the planner's words and in version 1."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from realhf.planning.problem.file import (
    FileCall,
    FileOption,
    FileTransfer,
    PlannedFile,
    PlannedTransfer,
    ProblemFile,
    _complaints,
    load_problem,
    problem_bytes,
)
from realhf.planning.problem.tables import OptionRow, TransferTable
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
