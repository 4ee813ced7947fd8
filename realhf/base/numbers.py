"""Ranges of numbers from outside: command lines, experiments, files."""

import math
from collections.abc import Mapping
from typing import TypeVar

from realhf.base.errors import UserError

Number = TypeVar("Number", int, float)
Bounds = tuple[float, float]

# Within these bounds a plan can be made in minutes.
DEVICES: Bounds = (1, 4096)
STEPS_IN_FLIGHT: Bounds = (1, 1024)
STALENESS: Bounds = (0, 64)
TOKENS: Bounds = (1, 2**24)
CACHE_TOKENS: Bounds = (1, 2**40)  # a device's KV cache
SAMPLES: Bounds = (1, 2**20)
SECONDS: Bounds = (0, 1e9)
BYTES: Bounds = (0, 2**60)


def check_range(name: str, value: Number, low: float | None, high: float | None, unit: str = "") -> Number:
    """`value`, if it is finite and lies from `low` to `high` (None: no bound); `name` is the user's: `--memory-gb`, or
    `optimizer.lr`.

    Raises:
        UserError: the value is outside the range, or NaN.
    """
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    if not (least <= value <= most and abs(value) < math.inf):  # false for NaN
        if high is None:
            rule = "finite" if low is None else f"at least {low:,.12g}"
        else:
            rule = f"at most {high:,.12g}" if low is None else f"from {low:,.12g} to {high:,.12g}"
        raise UserError(f"{name} {value} is not {rule}{unit and ' '}{unit}; give a number in that range")
    return value


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
