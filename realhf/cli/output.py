"""How commands show what they do and what came of it: phases, lines, tables, files."""

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from realhf.base.durations import duration
from realhf.base.errors import UserError
from realhf.base.files import write_atomically
from realhf.base.shown import visible

STANDARD_OUTPUT = Path("-")  # where a file is to be named


class Output(Console):
    """A console that shows texts as they are: what they contain neither breaks nor colours a line, is no markup, and
    acts on no terminal."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All that is printed comes through here, the cells of tables too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def say(self, *lines: str) -> None:
        for line in lines:
            self.print(line, highlight=False, soft_wrap=True)

    def write(self, path: Path, content: bytes) -> None:
        """Writes a file and says so; or to standard output, for "-". Raises UserError if it cannot be written."""
        if path == STANDARD_OUTPUT:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
            return
        try:
            write_atomically(path, content)
        except OSError as error:
            raise UserError(f"{path}: cannot write ({error.strerror}); give a file in a folder that exists") from None
        self.say(f"written to {path}")

    def write_json(self, path: Path, content: Any) -> None:
        self.write(path, json.dumps(content, indent=2).encode() + b"\n")


def output_beside(path: Path | None) -> Output:
    """An output to standard error if `path` is "-", since the file takes standard output."""
    return Output(stderr=path == STANDARD_OUTPUT)


def wide_output() -> Output:
    """An output whose tables are as wide as the terminal; 110 columns where there is none."""
    return Output(width=None if sys.stdout.isatty() else 110)


def table_of(title: str, *columns: str, rows: Iterable[Iterable[str | Text]] = (), words: int = 1) -> Table:
    """A table, without a title if that is "". The first `words` columns have words and begin at the left, the others
    numbers."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def number_text(value: Any) -> str:
    """A number in four digits, a large one in all those before the point; "-" for any other value."""
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


class Phases:
    """A line on stderr for each phase of planning or profiling that has ended, with how long it took; on a terminal a
    status shows the present phase too. stdout keeps only the results.

    Called with a phase that begins or goes on, and its progress so far (`realhf.planning.request.Watch`).
    `clock`: seconds that never go back.
    """

    def __init__(self, console: Output | None = None, clock: Callable[[], float] = time.monotonic):
        self.console, self._clock = console or Output(stderr=True), clock
        self._phase = self._detail = ""
        self._begun_s = clock()
        self._status = self.console.status("") if self.console.is_terminal else None

    def __enter__(self) -> "Phases":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._status:
            self._status.stop()
        if error is None:
            self._end()

    def __call__(self, phase: str, detail: str) -> None:
        if phase != self._phase:
            self._end()
            self._phase, self._begun_s = phase, self._clock()
        self._detail = detail
        if self._status:
            self._status.update(self._text())

    def _text(self) -> str:
        return f"{self._phase}: {self._detail}" if self._detail else self._phase

    def _end(self) -> None:
        if self._phase:
            took = duration(self._clock() - self._begun_s)
            self.console.say(f"{self._text()} ({took})")
        self._phase = self._detail = ""
