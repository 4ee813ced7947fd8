"""What the goldens compare, and what they do not."""

import json
from typing import Any

import pytest

from tests.golden import contents
from tests.golden.commands import script_lines, table_rows
from tests.golden.contents import LONGEST, compact, differences, lines_of, numbers_in, renamed

LONG = [float(i) / 7 for i in range(LONGEST + 1)]
OPTIONS = [{"devices": [i, 1], "strategy": f"dp{i}", "time_s": i / 3} for i in range(LONGEST + 1)]


def paths(recorded: Any, now: Any) -> list[str]:
    return [found.path for found in differences(recorded, now)]


def test_numbers_differ_by_more_than_rounding() -> None:
    assert paths({"a": [1, 2.0]}, {"a": [1.0, 2]}) == []
    assert paths({"a": [1, 2.0]}, {"a": [1, 2.0 + 1e-15]}) == []
    assert paths({"a": [1, 2.0]}, {"a": [1, 2.0 + 1e-11]}) == ["a[1]"]
    assert [str(found) for found in differences({"a": 1}, {"a": 2})] == ["a: 1 -> 2"]


@pytest.mark.parametrize(
    ("recorded", "now"),
    [
        ({"a": 1}, {}),
        ({}, {"a": 1}),
        ([1], [1, 2]),
        (1, True),
        (0.0, None),
        ("dp2", "dp4"),
        ({"a": 1}, [1]),
        (0.0, 1e-300),
        (1.0, float("nan")),
    ],
)
def test_structures_and_texts_differ(recorded: Any, now: Any) -> None:
    assert differences(recorded, now)


def changed(values: list[float], at: int, by: float) -> list[float]:
    return [value + by if i == at else value for i, value in enumerate(values)]


@pytest.mark.parametrize("now", [changed(LONG, LONGEST // 2, 1e-9), LONG[::-1], [*LONG, 1.0], [*LONG[:-1], 5]])
def test_digests_see_any_number_and_the_order(now: list[float]) -> None:
    recorded = compact({"times_s": LONG, "matrix": [LONG, LONG]})
    assert recorded["times_s"]["numbers"] == len(LONG)
    assert differences(recorded, compact({"times_s": now, "matrix": [LONG, LONG]}))
    assert differences(recorded, compact({"times_s": LONG, "matrix": [LONG, now]}))
    assert not differences(recorded, json.loads(lines_of(recorded)))


def test_long_tables_become_columns() -> None:
    recorded = compact(OPTIONS)
    assert list(recorded["columns"]) == ["devices", "strategy", "time_s"]
    for field, value in (("time_s", 0.1), ("strategy", "tp8"), ("devices", [3, 2])):
        found = differences(recorded, compact([*OPTIONS[:-1], OPTIONS[-1] | {field: value}]))
        assert found
        assert all(one.path.startswith(f"columns.{field}") for one in found)
    names = {f"{i}>{i + 1}": i for i in range(LONGEST + 1)}
    assert differences(compact(names), compact(names | {"3>4": 9}))
    assert not differences(compact(names), compact(dict(reversed(names.items()))))


def test_prose_and_clocks_are_left_out() -> None:
    before = {"problem": "does not fit", "limits": "the busiest device for 39%", "trace": [[0.1, 7.0]], "seconds": 1}
    after = {"problem": "is too large", "limits": "39% on one device", "trace": [[0.2, 7.0]], "seconds": 2}
    assert not differences(compact(before), compact(after))
    for key, value in (("problem", ""), ("limits", "38%"), ("trace", [[0.1, 8.0]])):
        assert paths(compact(before), compact(before | {key: value})) != []


def test_renamed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "RENAMED_KEYS", {"spared": "freed"})
    recorded = renamed({"calls": [{"spared": 1}]})
    assert not differences(recorded, {"calls": [{"freed": 1}]})
    assert paths(recorded, {"calls": [{"freed": 2}]}) == ["calls[0].freed"]
    assert paths(recorded, {"calls": [{"spared": 1}]}) == ["calls[0].freed", "calls[0].spared"]


def test_what_is_printed() -> None:
    assert numbers_in("0-7 dp2 8,625 -1.5e-3 +3.6% (a 4)") == [0, 7, 2, 8625, -0.0015, 3.6, 4]
    assert table_rows("1 x 8 h100\nplan\n\n call  zero1 \n ─────\n a     1.50\n b  2\n3 plans\n") == [[1.5], [2]]
    text = "#!/bin/bash\n#SBATCH --nodes=2\n# why\nexport HOME=/home/me\n\nsrun a  # why\n  # why\n"
    assert script_lines(text) == ["#!/bin/bash", "#SBATCH --nodes=2", "srun a"]
