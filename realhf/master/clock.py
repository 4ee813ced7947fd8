"""A clock for silence: it counts the time in which this process could hear."""

import time


class ListeningClock:
    """Seconds in which this process ran.

    A busy machine may hold a process up for minutes, and a stopped one for longer; what arrives meanwhile waits to be
    read, so nobody was silent. `tick` is to be called every `tick_s`; of a longer pause only twice that counts.
    """

    def __init__(self, tick_s: float) -> None:
        self._longest_s = 2 * tick_s
        self._ticked_s = time.monotonic()
        self._awake_s = 0.0

    def now(self) -> float:
        """Seconds awake since the clock was made."""
        return self._awake_s + min(time.monotonic() - self._ticked_s, self._longest_s)

    def tick(self) -> None:
        """Notes that the process is awake."""
        self._awake_s = self.now()
        self._ticked_s = time.monotonic()
