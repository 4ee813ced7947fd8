"""What planning and profiling are doing: shown on stderr, so that stdout keeps only the results."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console

from realhf.cli.durations import duration


class Phases:
    """A line for each phase that has ended, with how long it took; on a terminal a status shows the present one too.

    Called with a phase that begins or goes on, and what is known of it by now (`realhf.planning.watching.Watch`).

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console or Console(stderr=True), clock
        self._phase = self._detail = ""
        self._begun_s = clock()
        self._status = self._console.status("") if self._console.is_terminal else None

    def __enter__(self) -> "Phases":
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            self._console.print(f"{self._text()} ({took})", highlight=False, soft_wrap=True, markup=False)
        self._phase = self._detail = ""
