"""Ranges of the numbers that come from outside: command lines, experiments, files."""

from typing import TypeVar

from realhf.api.errors import UserError

Number = TypeVar("Number", int, float)


def check_range(name: str, value: Number, low: float, high: float, unit: str = "") -> Number:
    """`value`, if it lies from `low` to `high`.

    `name` is what the user wrote: an option (`--memory-gb`) or a field (`optimizer.lr`).

    Raises:
        UserError: it is below or above, or not a number at all.
    """
    if not low <= value <= high:  # false for NaN
        raise UserError(
            f"{name} {value} is not from {low:,.12g} to {high:,.12g}{unit and ' '}{unit}; give a number in that range"
        )
    return value
