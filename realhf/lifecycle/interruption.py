"""Ctrl-C and SIGTERM while a run is watched."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):  # noqa: N818  (no error: somebody asked for it)
    """The run has ended early, with a checkpoint if it had made a step, because somebody asked for that; the text says
    who. It can be resumed."""


class Detached(KeyboardInterrupt):
    """This process no longer watches the run, which goes on."""


_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Inside its `with`, SIGINT and SIGTERM raise KeyboardInterrupt, and `check` does once one has come.

    Until the first `check` they are only noted: before it processes are started, or a job is submitted, and half of
    that must not be forgotten. Later, too, the exception alone could get lost, since Python drops exceptions raised in
    callbacks such as those around a fork. A signal that is ignored, as SIGINT in the background of a shell script,
    stays ignored.
    """

    def __init__(self) -> None:
        self._has_come = self._is_raised = False

    def __enter__(self) -> "Interruption":
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises KeyboardInterrupt if one of the signals has come."""
        self._is_raised = True
        if self._has_come:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Inside, who has interrupted cannot do it once more."""
        before = {number: signal.signal(number, signal.SIG_IGN) for number in _NUMBERS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
        if self._is_raised:
            raise KeyboardInterrupt
