"""What the two threads of a worker are doing, in one text for heartbeats and post-mortems."""

import threading
from collections.abc import Callable


class WorkerActivity:
    """Joins what the thread of calls and the thread of moves (`realhf.worker.move_thread`) say.

    of_calls: what the former says, such as "actor_train_step of step 3: compute".

    Args:
        record: gets the joined text whenever it changes; called by one thread at a time.
    """

    def __init__(self, record: Callable[[str], None]):
        self._record, self._lock = record, threading.Lock()
        self.of_calls, self._beside = "", ""

    def set(self, text: str) -> None:
        """Says what is done in the order of requests."""
        with self._lock:
            self.of_calls = text
            self._record(self.text)

    def set_beside(self, text: str) -> None:
        """Says what is done beside that; "" ends it."""
        with self._lock:
            self._beside = text
            self._record(self.text)

    @property
    def text(self) -> str:
        """Both, joined."""
        return f"{self.of_calls}; and {self._beside}" if self._beside else self.of_calls
