"""The clocks of the workers' hosts, by the master's own."""

import socket
from collections import deque
from collections.abc import Callable

import msgspec

from realhf.transport.clock import now_s
from realhf.transport.messages import Span

# Clocks under NTP differ by less, and a busy machine may delay a heartbeat by less.
TOLERATED_S = 0.25
_HEARTBEATS = 30


class WorkerClocks:
    """Converts times by workers' clocks to the master's clock.

    A heartbeat names the time at which it was sent, and arrives a little later: of the last ones, the difference of the
    fastest is the difference of the clocks. Smaller ones than TOLERATED_S are left alone. Workers on the master's host
    have its clock, however late a busy host hands over their first heartbeats.
    """

    def __init__(self, now: Callable[[], float] = now_s) -> None:
        self._now, self._host = now, socket.gethostname()
        self._differences: dict[int, deque[float]] = {}
        self._here: set[int] = set()

    def met(self, worker: int, host: str) -> None:
        """Notes the name of a worker's host."""
        if host == self._host:
            self._here.add(worker)

    def heard(self, worker: int, sent_s: float) -> None:
        """Notes a heartbeat that was sent at `sent_s` by the worker's clock."""
        if worker not in self._here:
            self._differences.setdefault(worker, deque(maxlen=_HEARTBEATS)).append(self._now() - sent_s)

    def offset_s(self, worker: int) -> float:
        """The seconds to add to a worker's times."""
        offset = min(self._differences.get(worker, ()), default=0.0)
        return offset if abs(offset) > TOLERATED_S else 0.0

    def corrected(self, worker: int, span: Span) -> Span:
        """A worker's span by the master's clock."""
        offset = self.offset_s(worker)
        return msgspec.structs.replace(span, start=span.start + offset, end=span.end + offset) if offset else span
