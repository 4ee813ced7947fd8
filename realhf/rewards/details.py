"""How a sample came to its reward, for people."""

import msgspec

Scalar = bool | int | float | str | None


class RewardDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What people are shown beside a sample's reward, by name.

    rewards: the value of each function, None where it gave none.
    columns: the texts of the columns that functions ask for, such as the right answer.
    notes: the values that functions log for the sample (`log_extra`).
    """

    rewards: dict[str, float | None] = {}
    columns: dict[str, str] = {}
    notes: dict[str, Scalar] = {}


NO_DETAILS = RewardDetails()
"""The default of messages and files, which leave it out."""
