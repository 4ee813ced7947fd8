"""What of an outcome is recorded, and how two records are compared: all numbers and the structure, but no prose."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Keys that were renamed since the goldens were recorded: the recorded name and the one of today.
RENAMED_KEYS: dict[str, str] = {}

# Values that a clock gave; of a search's trace the first number of each point.
CLOCKED_KEYS = {"seconds", "evaluations_per_s", "search_s"}
TRACES = {"trace", "search_trace"}

# Texts for people. Of the former their numbers are recorded, of the latter only whether there is a text.
COUNTING_KEYS = {"certificate", "limits", "sharded"}
PROSE_KEYS = {"problem", "description", "origin"}

# Longer lists and objects are recorded as digests.
LONGEST = 16
NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:e[-+]?\d+)?")
LINE_LENGTH = 100
RELATIVE = 1e-12


@dataclass(frozen=True)
class Difference:
    """At `path` the golden has `recorded`, and the code of today gives `now`; a missing value is `ABSENT`."""

    path: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.recorded} -> {self.now}"


ABSENT = "(absent)"


def compact(value: Any, key: str = "") -> Any:
    """A JSON value without prose and clocks, its long lists as digests."""
    if isinstance(value, dict) and len(value) > LONGEST:
        names = sorted(value)
        return {"names": compact(names), "values": compact([value[name] for name in names])}
    if isinstance(value, dict):
        inner = {name: key if key in COUNTING_KEYS else name for name in value if name not in CLOCKED_KEYS}
        return {name: compact(value[name], inner[name]) for name in inner}
    if isinstance(value, str):
        return _of_text(value, key)
    if not isinstance(value, list):
        return value
    if key in TRACES:
        return compact([point[1] for point in value])
    if len(value) > LONGEST and all(isinstance(row, dict) for row in value):
        return compact(_columns(value))
    leaves = list(_leaves(value))
    if len(leaves) <= LONGEST or any(isinstance(leaf, dict) for leaf in leaves):
        return [compact(item, key) for item in value]
    if all(isinstance(leaf, int | float) for leaf in leaves):
        return digest(leaves)
    text = "\n".join(map(str, leaves))
    return {"leaves": len(leaves), "first": leaves[:3], "sha256": hashlib.sha256(text.encode()).hexdigest()[:16]}


def digest(numbers: list[float]) -> dict[str, float]:
    """Sums that a change of any number or of the order changes."""
    golden = (math.sqrt(5) - 1) / 2
    return {
        "numbers": len(numbers),
        "sum": math.fsum(numbers),
        "weighted": math.fsum(x * (i * golden % 1) for i, x in enumerate(numbers)),
    }


def lines_of(value: Any, indent: str = "") -> str:
    """JSON in lines of up to about 100 characters, as few as there can be: short, and easy to compare by eye."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(line) + len(indent) <= LINE_LENGTH:
        return line
    inner = indent + " "
    rows = [lines_of(item, inner) for item in _items(value)]
    if isinstance(value, dict):
        rows = [f"{json.dumps(name)}: {row}" for name, row in zip(value, rows, strict=True)]
    left, right = "{}" if isinstance(value, dict) else "[]"
    return left + ",".join(f"\n{inner}{row}" for row in rows) + f"\n{indent}{right}"


def numbers_in(text: str) -> list[float]:
    """The numbers of a text, in their order."""
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


def renamed(value: Any) -> Any:
    """A recorded value under the names of today."""
    if isinstance(value, dict):
        return {RENAMED_KEYS.get(name, name): renamed(item) for name, item in value.items()}
    return [renamed(item) for item in value] if isinstance(value, list) else value


def differences(
    recorded: Any, now: Any, relative: float = RELATIVE, absolute: float = 0.0, path: str = ""
) -> list[Difference]:
    """Where `now` is not what was recorded: another structure, another text, or a number further off than `relative`
    times the larger of the two and than `absolute`."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        names = list(dict.fromkeys([*recorded, *now]))
        pairs = [(f"{path}.{name}", recorded.get(name, ABSENT), now.get(name, ABSENT)) for name in names]
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(recorded, now, strict=True))]
    else:
        return [] if _same(recorded, now, relative, absolute) else [Difference(path.lstrip("."), recorded, now)]
    return [found for inner, a, b in pairs for found in differences(a, b, relative, absolute, inner)]


def _same(a: Any, b: Any, relative: float, absolute: float) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=relative, abs_tol=absolute)
    return bool(a == b)


def _of_text(text: str, key: str) -> Any:
    if key in COUNTING_KEYS:
        return numbers_in(text)
    return bool(text) if key in PROSE_KEYS else text


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {"rows": len(rows), "columns": {name: [row.get(name, ABSENT) for row in rows] for name in names}}


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
