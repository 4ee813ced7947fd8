"""The sets of held-out rows that `--eval-data` names, each with the name that its statistics begin with."""

import re
from collections.abc import Sequence
from pathlib import Path

from realhf.base.errors import UserError
from realhf.dataflow.splits import SET_NAME


def held_out_sets(given: Sequence[str]) -> dict[str, str]:
    """By name the path of each set, from `NAME=PATH` or `PATH`.

    An only set without a name has the name "". Among several it is called by its path: `data/test.jsonl` is `test`, and
    `reasoning-gym:gcd:size=50` is `gcd`. A path with `=` in it has a slash or a colon before that (`./a=b.jsonl`).

    Raises:
        UserError: a path or a name is missing, two sets have one name, or a path could be both forms.
    """
    sets: dict[str, str] = {}
    for text in given:
        named = re.fullmatch(rf"({SET_NAME})=(.*)", text, re.DOTALL)
        name, path = named.groups() if named else ("" if len(given) == 1 else _own_name(text), text)
        if named and Path(text).exists():
            raise UserError(
                f"--eval-data {text} would be the set {name!r} of {path}, and there is a file of the whole name; give "
                f"./{text}, or rename the file"
            )
        if not path:
            raise UserError(f"--eval-data {text!r} names no file; give FILE, or NAME=FILE")
        if name in sets:
            raise UserError(
                f"--eval-data: two sets are called {name!r}, {sets[name]} and {path}; name each of them: "
                f"--eval-data NAME={path}"
            )
        sets[name] = path
    return sets


def _own_name(path: str) -> str:
    """Raises UserError where it would have other characters than a name."""
    name = path.split(":")[1] if ":" in path else Path(path).stem
    if not re.fullmatch(SET_NAME, name):
        raise UserError(
            f"--eval-data {path}: of several sets each has a name of letters, digits, - and _, and {name!r} is none; "
            f"name it: --eval-data NAME={path}"
        )
    return name
