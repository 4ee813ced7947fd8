"""A table of what a run has learnt: its statistics over the first and the last steps, and their course between."""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from realhf.cli.output import number_text, table_of
from realhf.report.curves import Trends

BARS = "▁▂▃▄▅▆▇█"


def trends_table(trends: Trends | None) -> Table:
    """A row a statistic: its means over the first and the last steps, and its course between."""
    if trends is None or not trends.statistics:
        return Table()
    table = table_of("", "training", _steps_text(trends.first_steps))
    has_course = trends.first_steps != trends.last_steps
    if has_course:
        table.add_column(_steps_text(trends.last_steps), justify="right")
        table.add_column("over the run")
    for trend in trends.statistics:
        course = (number_text(trend.last), _bars(trend.parts)) if has_course else ()
        table.add_row(Text(trend.name), number_text(trend.first), *course)
    return table


def _steps_text(steps: tuple[int, int]) -> str:
    first, last = steps
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _bars(parts: Sequence[float | None]) -> str:
    # Halves, since the difference of two finite numbers may be none.
    halves = [part / 2 if part is not None and math.isfinite(part) else None for part in parts]
    known = [half for half in halves if half is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    is_flat = high - low <= 1e-6 * max(abs(low), abs(high))  # but for rounding
    top = len(BARS) - 1
    return "".join(
        " " if half is None else BARS[0 if is_flat else round((half - low) / (high - low) * top)] for half in halves
    )
