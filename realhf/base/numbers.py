"""Ranges of numbers from outside: command lines, experiments, files."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from realhf.base.errors import UserError

Number = TypeVar("Number", int, float)
Bounds = tuple[float, float]

# Within these bounds a plan can be made in minutes.
DEVICES: Bounds = (1, 4096)
STEPS_IN_FLIGHT: Bounds = (1, 1024)
STALENESS: Bounds = (0, 64)
TOKENS: Bounds = (1, 2**24)
SAMPLES: Bounds = (1, 2**20)
SECONDS: Bounds = (0, 1e9)
BYTES: Bounds = (0, 2**60)


def check_range(name: str, value: Number, low: float, high: float, unit: str = "") -> Number:
    """`value`, if it lies from `low` to `high`; `name` is the user's: `--memory-gb`, or `optimizer.lr`.

    Raises:
        UserError: the value is outside the range, or NaN.
    """
    if not low <= value <= high:  # false for NaN
        raise UserError(
            f"{name} {value} is not from {low:,.12g} to {high:,.12g}{unit and ' '}{unit}; give a number in that range"
        )
    return value


class Range(NamedTuple):
    """See `check_range`."""

    name: str
    low: float
    high: float
    unit: str = ""


def check_ranges(values: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
    """Checks every value that has a range and is not None. Raises as `check_range` does."""
    for key, (name, low, high, unit) in ranges.items():
        if values.get(key) is not None:
            check_range(name, values[key], low, high, unit)


def check_fields(where: str, values: object, ranges: Mapping[str, Bounds]) -> None:
    """Checks each field of `values` that `ranges` names: a number, or a tuple or dict of numbers; None is skipped.

    Raises:
        UserError: as `check_range`; the name is `where` and the field.
    """
    for field, (low, high) in ranges.items():
        value = getattr(values, field)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else (value,)
        for number in inner:
            if number is not None:
                check_range(f"{where}{field}", number, low, high)
