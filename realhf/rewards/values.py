"""The values that a reward function may return, and the numbers that they stand for."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

from realhf.rewards.signature import Style

# Statistics are called reward_NAME; these are not of one function.
OF_ALL_FUNCTIONS = ("total", "failures", "seconds", "mean", "std")
_LONGEST_SHOWN = 80


class BadValueError(Exception):
    """A function returned something else than a reward; the text has the value and the rule."""


def as_reward(value: Any, style: Style = "texts") -> float | None:
    """The number that a function returned for a sample; None: the sample has no reward from this function.

    A number is a float, an int, a bool, a scalar of NumPy or torch; under verl also a dict with `score`.

    Raises:
        BadValueError: it is none of these, or not finite.
    """
    if isinstance(value, dict) and style == "verl":
        if "score" not in value:
            raise BadValueError(f"it returned {shown(value)}, a dict without 'score'; return one with it, or a number")
        value = value["score"]
    if value is None:
        return None
    number = as_number(value)
    if not math.isfinite(number):
        raise BadValueError(f"it returned {number}; return a finite number, or None for no reward")
    return number


def as_rewards(values: Any, count: int, style: Style) -> list[Any]:
    """The values that a function returned for `count` samples, each still to be looked at.

    Raises:
        BadValueError: it is no list of as many.
    """
    if inspect.iscoroutine(values):
        as_number(values)
    is_array = hasattr(values, "tolist") and getattr(values, "ndim", None) == 1
    values = values.tolist() if is_array else values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise BadValueError(f"it returned {shown(values)} for a batch of {count}; return a list of {count} rewards")
    if len(values) != count:
        raise BadValueError(f"it returned {len(values)} rewards for a batch of {count}; return one a sample")
    return list(values)


def shown(value: Any) -> str:
    """`value` in a few words; never raises."""
    try:
        text = repr(value)
    except Exception as error:  # an object of the user's
        text = f"(its repr raises {type(error).__name__})"
    text = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    return f"{text} ({type(value).__name__})"


def as_number(value: Any) -> float:
    """The number that `value` is, finite or not. Raises BadValueError if it is none."""
    if inspect.iscoroutine(value):
        value.close()  # else Python warns of it later, in another place
        raise BadValueError("it returned a coroutine; declare it with `async def`")
    number = value
    # A scalar of an array library, told by what all of them have; an array of one element counts as one.
    if callable(getattr(value, "item", None)) and math.prod(getattr(value, "shape", (0,))) == 1:
        number = value.item()
    if not isinstance(number, int | float):
        raise BadValueError(f"it returned {shown(value)}; return a float, an int, a bool, or None for no reward")
    try:
        return float(number)
    except OverflowError:
        raise BadValueError("it returned an integer beyond all floats; return a finite number") from None
