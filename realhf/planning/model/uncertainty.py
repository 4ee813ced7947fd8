"""How sure a description of hardware is of its constants, and its constants by name.

The arithmetic is in `realhf.planning.model.gaussian`: numpy takes long to import, and a search needs none of it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from realhf.base.errors import UserError
from realhf.base.numbers import check_range

if TYPE_CHECKING:
    from realhf.planning.model.hardware import Hardware

SPREAD = (0.0, 10.0)  # of a logarithm
# Where nobody says how sure a description is: a constant within a factor 1.6, a call's time within 1.4, in 90 %
# of the draws.
UNSTATED, UNSTATED_ERROR = 0.3, 0.2
KINDS = ("_bandwidth", "_s")  # of a description's fields: rates and delays
# Constants that a description may leave out, and those that then stand for them.
OPTIONAL = {"train_launch_s": "layer_launch_s", "inter_node_send_bandwidth": "inter_node_bandwidth"}


class Uncertainty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logarithms of constants are normal about the stated ones; so is what a call's time is off besides.

    spread: the standard deviations by the name of the constant (a field of `Hardware`, or `matmul_flops[DTYPE]`); 0.1
        is 10 %. correlation: between them, in their order, the rows of the strict lower triangle;
        empty: none.
    call_error: the standard deviation of the logarithm of measured / predicted seconds of a call where all constants
        are right. profiled_error: the same where the model was profiled, run-to-run noise of the machine included.

    Raises:
        UserError: a spread below 0, or a correlation that is not one.
    """

    spread: dict[str, float]
    correlation: tuple[tuple[float, ...], ...] = ()
    call_error: float = UNSTATED_ERROR
    profiled_error: float = UNSTATED_ERROR

    def __post_init__(self) -> None:
        for name, value in {
            **self.spread,
            "call_error": self.call_error,
            "profiled_error": self.profiled_error,
        }.items():
            check_range(f"uncertainty: {name}", value, *SPREAD)
        if self.correlation and [len(row) for row in self.correlation] != list(range(1, len(self.spread))):
            raise UserError(
                f"uncertainty: correlation has rows of {[len(row) for row in self.correlation]} numbers; it needs "
                f"1 to {len(self.spread) - 1}, for {len(self.spread)} constants"
            )


def place_of(name: str) -> tuple[str, str]:
    """The field of a constant, and the key in it or ""."""
    field, _, key = name.rstrip("]").partition("[")
    return field, key


def is_constant(hardware: "Hardware", name: str) -> bool:
    """Whether the description has such a constant."""
    field, key = place_of(name)
    values = getattr(hardware, field, None)
    if field in hardware.__struct_fields__ and not key:
        return field.endswith(KINDS)
    return isinstance(values, dict) and key in values


def constant(hardware: "Hardware", name: str) -> float:
    """The value of a constant of a description; of an optional one, of what is taken in its place."""
    field, key = place_of(name)
    value = getattr(hardware, field)
    if key:
        return float(value[key])
    return float(getattr(hardware, OPTIONAL[field]) if value is None else value)


def with_constants(hardware: "Hardware", values: Mapping[str, float]) -> "Hardware":
    """The description with other constants."""
    fields: dict[str, object] = {}
    for name, value in values.items():
        field, key = place_of(name)
        fields[field] = {**getattr(hardware, field), **fields.get(field, {}), key: value} if key else value  # type: ignore[dict-item]
    return msgspec.structs.replace(hardware, **fields)


def uncertainty_of(hardware: "Hardware") -> Uncertainty:
    """What the description says, or what is assumed where it says nothing; constants that are 0 stay so."""
    if hardware.uncertainty is not None:
        return hardware.uncertainty
    names = [f"matmul_flops[{dtype}]" for dtype in hardware.matmul_flops]
    names += [field for field in hardware.__struct_fields__ if field.endswith(KINDS) and getattr(hardware, field)]
    return Uncertainty(spread=dict.fromkeys(names, UNSTATED))
