"""Names of reward functions, as users give them: parsed, loaded, and checked against the columns of the data."""

import ast
import contextlib
import inspect
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from realhf.base.code_files import load_code_file
from realhf.base.errors import UserError
from realhf.rewards import ready
from realhf.rewards.confined import missing_protections
from realhf.rewards.signature import Function, Signature, recognise
from realhf.rewards.values import OF_ALL_FUNCTIONS

READY = "ready"

# A weight stands behind the last `=`, and no quote or bracket behind that: "ready:regex(pattern='a=b')" has none.
_FORM = re.compile(r"(?P<what>.+?:.+?)(?:=(?P<weight>[^=()'\"]*))?", re.DOTALL)
_EXPECTED = "give FILE.py:FUNCTION or ready:NAME(option=value), each with =WEIGHT behind it if it is not 1"

_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"(?<=\w|/)\?[^'\"]*")


@dataclass(frozen=True)
class RewardSource:
    """A reward function by its name: `FILE.py:FUNCTION`, `ready:NAME` or `ready:NAME(option=value, ...)`, and its
    weight (`rewards.py:correct=0.5`). A weight of 0 reports the function's rewards and adds nothing.

    Raises:
        UserError: the text names no function, or the weight is not finite.
    """

    module: str
    function: str
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "RewardSource":
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise UserError(f"reward {without_secrets(text)!r} names no function; {_EXPECTED}")
        what, weight = found["what"], found["weight"]
        # The colon before the function: the first of a ready one (its options may have others), else the last.
        module, _, function = what.partition(":") if what.startswith(f"{READY}:") else what.rpartition(":")
        if module != READY and (not module.endswith(".py") or not function.isidentifier()):
            raise UserError(f"reward {without_secrets(text)!r} names no function; {_EXPECTED}")
        return cls(module, function, 1.0 if weight is None else _weight(text, weight))

    @property
    def asks_a_server(self) -> bool:
        return self.module == READY and _call_of(self)[0] == "server"

    @property
    def text(self) -> str:
        """The text that it was parsed from, without the weight and without secrets."""
        return without_secrets(f"{self.module}:{self.function}")


@dataclass(frozen=True)
class Reward:
    """A loaded reward function. `name` is for statistics, `place` (`correct (rewards.py:12)`) for messages."""

    name: str
    function: Function
    signature: Signature
    weight: float
    place: str


def load_rewards(texts: Sequence[str], columns: Collection[str] | None = None) -> list[Reward]:
    """The functions that `texts` name, in their order.

    Args:
        columns: the data set's, with which parameters are compared; None: they are not known.

    Raises:
        UserError: a file is missing or cannot be imported, has no such function, or a function has parameters that
            neither the call nor the data set has values for; or as `RewardSource`.
    """
    if not texts:
        raise UserError(f"there is no reward function; {_EXPECTED}")
    rewards: list[Reward] = []
    for source in map(RewardSource.parse, texts):
        plain, function = _ready(source) if source.module == READY else (source.function, _of_file(source))
        taken = {*OF_ALL_FUNCTIONS, *(reward.name for reward in rewards)}
        name = next(free for free in chain([plain], (f"{plain}_{i}" for i in count(2))) if free not in taken)
        place = _place(function, source)
        signature = recognise(function, place)
        if columns is not None and (missing := signature.missing(columns)):
            raise UserError(
                f"reward {place} asks for {', '.join(map(repr, missing))}, and the data have no such column: they have "
                f"{', '.join(sorted(columns)) or 'none'}, and a call gives {', '.join(signature.given)}; rename the "
                "parameter, give it a default, or add the field to the data"
            )
        rewards.append(Reward(name, function, signature, source.weight, place))
    return rewards


def notes_of(texts: Sequence[str]) -> list[str]:
    """Notes for the user before a run with these functions: limits that this kernel cannot set."""
    sources = [RewardSource.parse(text) for text in texts]
    uses_sandbox = any(source.module == READY and _call_of(source)[0] == "unit_tests" for source in sources)
    return [f"{READY}:unit_tests: {lack}" for lack in missing_protections()] if uses_sandbox else []


def _weight(text: str, weight: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        shown = "" if "://" in text else f" {weight!r}"  # a query's last value may be a secret
        raise UserError(f"reward {without_secrets(text)!r}: the weight{shown} is no number; {_EXPECTED}") from None
    if not math.isfinite(value):
        raise UserError(f"reward {without_secrets(text)!r}: the weight {weight} is not finite; give a finite number")
    return value


def _of_file(source: RewardSource) -> Function:
    if not Path(source.module).is_file():
        path = "at an address" if "://" in source.module else Path(source.module).absolute()
        raise UserError(f"reward {source.text}: there is no file {path}; give the path of a Python file")
    try:
        module = load_code_file(source.module)
    except UserError as error:
        raise UserError(f"reward {source.text}: {error}; correct the file") from error
    found = getattr(module, source.function, None)
    if not callable(found):
        own = sorted(
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        )
        what = "has no function" if found is None else f"has {type(found).__name__} under the name"
        raise UserError(
            f"{source.module} {what} {source.function!r}; "
            + (f"it has the functions {', '.join(own)}" if own else "it has no functions")
        )
    if inspect.isclass(found):
        raise UserError(f"{source.text} is a class; make an object of it in the file, and name that")
    function: Function = found
    return function


def _ready(source: RewardSource) -> tuple[str, Function]:
    """The name of a ready function, and the function made with its options."""
    name, options = _call_of(source)
    maker = ready.READY.get(name)
    if maker is None:
        raise UserError(
            f"reward {source.text}: there is no ready reward {name!r}; choose one of {', '.join(ready.READY)}"
        )
    parameters = inspect.signature(maker).parameters
    if unknown := sorted(options.keys() - parameters.keys()):
        raise UserError(
            f"reward {source.text}: {name} has no option {unknown[0]!r}; it has {', '.join(parameters) or 'none'}"
        )
    if lacking := [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]:
        raise UserError(
            f"reward {source.text}: {name} needs {', '.join(lacking)}; write {READY}:{name}({lacking[0]}=...)"
        )
    try:
        return name, maker(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {source.text}: {error}; correct its options") from None


def without_secrets(text: str) -> str:
    """The text with the users, passwords and queries of its addresses left out."""
    return _QUERY.sub("?...", _USER.sub("...@", text))


def _call_of(source: RewardSource) -> tuple[str, dict[str, Any]]:
    """`regex(pattern="a")` as its name and its options, which are literals."""
    wrong = UserError(f"reward {source.text} cannot be read; write {READY}:NAME(option=value, ...) with plain values")
    try:
        expression = ast.parse(source.function.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two where it is nested deeply
        raise wrong from None
    match expression:
        case ast.Name(id=name):
            return name, {}
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if all(k.arg for k in keywords):
            with contextlib.suppress(ValueError):  # it is no plain value
                return name, {str(k.arg): ast.literal_eval(k.value) for k in keywords}
    raise wrong


def _place(function: Function, source: RewardSource) -> str:
    if source.module == READY:
        return source.text
    code = getattr(inspect.unwrap(function), "__code__", None)
    line = f":{code.co_firstlineno}" if code is not None else ""
    return f"{source.function} ({Path(source.module).name}{line})"
