"""Clocks of a run's processes: one for when something happened, one for silence."""

import time

_SET_AT_S = time.time() - time.monotonic()


def now_s() -> float:
    """Seconds since the epoch, by the host's clock as it was set when this process began.

    A clock that is set while the process runs changes neither durations nor the order of times.
    """
    return _SET_AT_S + time.monotonic()


class ListeningClock:
    """Counts the seconds in which this process ran.

    A busy machine may hold this process up for minutes. Messages that arrive meanwhile wait to be read, so their
    senders were not silent. Call `tick` every `tick_s` seconds; a longer pause counts as two ticks.
    """

    def __init__(self, tick_s: float) -> None:
        self._longest_s = 2 * tick_s
        self._ticked_s = time.monotonic()
        self._awake_s = 0.0

    def now(self) -> float:
        """Seconds that the process ran since the clock was made."""
        return self._awake_s + min(time.monotonic() - self._ticked_s, self._longest_s)

    def tick(self) -> None:
        """Notes that the process runs."""
        self._awake_s = self.now()
        self._ticked_s = time.monotonic()
