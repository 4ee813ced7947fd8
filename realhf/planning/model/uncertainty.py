"""How sure a description of hardware is of its constants.

The arithmetic is in `realhf.planning.model.gaussian`: numpy takes long to import, and a search needs none of it.
"""

import msgspec

from realhf.base.errors import UserError
from realhf.base.numbers import check_range

SPREAD = (0.0, 10.0)  # limits for a logarithm
# Where nobody says how sure a description is: a constant within a factor 1.6, a call's time within 1.4, in 90 %
# of the draws.
UNSTATED, UNSTATED_ERROR = 0.3, 0.2


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
        errors = {"call_error": self.call_error, "profiled_error": self.profiled_error}
        for name, value in (self.spread | errors).items():
            check_range(f"uncertainty: {name}", value, *SPREAD)
        if self.correlation and [len(row) for row in self.correlation] != list(range(1, len(self.spread))):
            raise UserError(
                f"uncertainty: correlation has rows of {[len(row) for row in self.correlation]} numbers; it needs "
                f"1 to {len(self.spread) - 1}, for {len(self.spread)} constants"
            )


def place_of(name: str) -> tuple[str, str]:
    """The field of a constant in a description, and the key in it or ""."""
    field, _, key = name.rstrip("]").partition("[")
    return field, key
