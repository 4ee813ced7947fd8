"""The rows that calls work on: those of training, or of a set on which a run is evaluated."""

from typing import Annotated

from msgspec import Meta

# The names of evaluation sets; `--eval-data NAME=FILE` and statistics, `NAME/STATISTIC`, begin with one.
SET_NAME = r"[A-Za-z0-9_-]+"
# "train", "evaluation", or where evaluation sets have names "evaluation/NAME".
Split = Annotated[str, Meta(pattern=rf"^(train|evaluation(/{SET_NAME})?)\Z")]


def set_name(split: Split) -> str:
    """The name of an evaluation set; "" where it has none."""
    return split.partition("/")[2]


def statistic_name(split: Split, statistic: str) -> str:
    """The name of a statistic of an evaluation: `NAME/STATISTIC`, or as it is where the set has no name."""
    return f"{name}/{statistic}" if (name := set_name(split)) else statistic
