"""Views on the workers: the columns that a call reads, with its tensor functions evaluated."""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from realhf.algorithms.statistics import add_stats
from realhf.api.script.columns import Columns
from realhf.api.script.config import Report
from realhf.api.script.functions import describe_function, load_function
from realhf.api.script.views import Application, ColumnOf, View
from realhf.engine.batch import Batch
from realhf.engine.interface import Context, Stats
from realhf.engine.returned import InterfaceError, check_column, check_stats

Data = dict[str, list[Tensor]]


class Evaluation:
    """The views of one call on its batch; each tensor function runs once.

    `stats` are the statistics of the functions with the numbers `reports`; None: of all.
    """

    def __init__(self, batch: Batch, context: Context, reports: Collection[Report] | None):
        self._batch, self._context, self._reports = batch, context, reports
        self._made: dict[int, Data] = {}
        self.stats: Stats = {}

    def columns(self, view: View) -> Columns:
        """The columns of a view, by the names that code sees."""
        return Columns(self._batch.ids, self.data(view))

    def batch(self, view: View) -> Batch:
        """The same as a batch."""
        return Batch(self._batch.ids, self.data(view), self._batch.together)

    def data(self, view: View) -> Data:
        if view.function is None:
            return self._inputs(view.columns)
        if id(view.function) not in self._made:
            self._made[id(view.function)] = self._evaluate(view.function, view.columns)
        return self._made[id(view.function)]

    def _inputs(self, columns: Iterable[tuple[str, str]]) -> Data:
        return {name: self._batch.data[key] for name, key in columns} or self._batch.data

    def _evaluate(self, applied: Application, named: Sequence[tuple[str, str]]) -> Data:
        """The columns of all arguments, by the names of `named`, and those that the function makes."""
        function = load_function(applied.function)
        arguments = [self._argument(value) for value in applied.arguments]
        keywords = {name: self._argument(value) for name, value in applied.keywords}
        if "context" in inspect.signature(function).parameters:
            keywords["context"] = self._context
        columns, stats = split_stats(function(*arguments, **keywords))
        what = f"the tensor function {describe_function(applied.function)}"
        if not isinstance(columns, Mapping):
            raise InterfaceError(
                f"{what} returned a {type(columns).__name__}, must be a dict of columns, or such a dict and statistics"
            )
        for name, values in columns.items():
            check_column(f"{what}: column {name!r}", values, self._batch.ids, finite=True)
        if self._reports is None or applied.number in self._reports:
            self.stats = add_stats([self.stats, check_stats(stats)])
        data: Data = {}
        for view in applied.views:
            read = [pair for pair in named or view.columns if pair[1] in view.keys]
            data |= self._inputs(read) if view.function is None else self.data(view)
        return {**data, **{name: list(values) for name, values in columns.items()}}

    def _argument(self, value: Any) -> Any:
        match value:
            case View():
                return self.columns(value)
            case ColumnOf(view=view, name=name):
                return getattr(self.columns(view), name)
        return value


def split_stats(result: Any) -> tuple[Any, Stats]:
    """What a tensor function or a loss returned: with statistics, or alone."""
    if isinstance(result, tuple) and len(result) == 2:
        return result[0], result[1]
    return result, {}
