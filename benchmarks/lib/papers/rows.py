"""A row of the papers' page: one figure of ours."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """`value` is ours, None where there is no plan.

    `figure` and `case` name the published value (`lib.papers.published`). Rows of one case with a `column` each stand
    side by side on the page.
    """

    figure: str
    case: str
    value: float | None
    unit: str
    column: str = ""


def side_by_side(figure: str, case: str, columns: Mapping[str, float | None], unit: str) -> Iterator[Row]:
    """The rows of one case, by the names of their columns."""
    for column, value in columns.items():
        yield Row(figure=figure, case=case, column=column, value=value, unit=unit)
