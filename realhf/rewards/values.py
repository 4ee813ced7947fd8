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


def as_reward(value: Any, style: Style = "texts", tokens: int = 1) -> float | list[float] | None:
    """The number that a function returned for a response, or a list of numbers, one for each of its `tokens`. None: the
    sample has no reward from this function.

    A number is a float, an int, a bool, a scalar of NumPy or torch; under verl also a dict with `score`. Numbers of
    tokens are a list, a tuple, or an array [tokens]; an array of one element is a number.

    Raises:
        BadValueError: it is none of these, or not finite, or there are not as many numbers as tokens.
    """
    if isinstance(value, dict) and style == "verl":
        if "score" not in value:
            raise BadValueError(f"it returned {shown(value)}, a dict without 'score'; return one with it, or a number")
        value = value["score"]
    if value is None:
        return None
    if _is_array(value) and math.prod(value.shape) != 1:
        value = value.tolist()
    if isinstance(value, list | tuple):
        return _of_tokens(value, tokens)
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
    values = values.tolist() if _is_array(values) else values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise BadValueError(f"it returned {shown(values)} for a batch of {count}; return a list of {count} rewards")
    if len(values) != count:
        raise BadValueError(f"it returned {len(values)} rewards for a batch of {count}; return one a sample")
    return list(values)


def _is_array(value: Any) -> bool:
    """Whether it is an array of one dimension of an array library."""
    return hasattr(value, "tolist") and getattr(value, "ndim", None) == 1


def _of_tokens(values: Sequence[Any], tokens: int) -> list[float]:
    if len(values) != tokens:
        raise BadValueError(
            f"it returned {len(values)} numbers for a response of {tokens} tokens; return one for each token (as many "
            "as `response_length` says, with the end token), or one number for the whole response"
        )
    numbers = []
    for place, value in enumerate(values):
        try:
            number = as_number(value)
        except BadValueError:
            number = math.nan
        if not math.isfinite(number):
            raise BadValueError(f"it returned {shown(value)} for token {place}; return a finite number for each token")
        numbers.append(number)
    return numbers


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
