"""Calls beside the devices on a thread of their own, while the worker goes on with the next request."""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from realhf.rundir.logs import doing
from realhf.transport.messages import Reply, Span
from realhf.worker.channels import Channels

logger = logging.getLogger(__name__)

CLOSE_S = 5.0  # how long the end of a worker waits for a rule that is still at work, after another call has failed


@dataclass(frozen=True)
class BesideCall:
    """A call whose inputs are there.

    what: name of the call and its step, for messages.
    run: computes it, keeps its outputs, and returns the reply.
    """

    request_id: int
    what: str
    run: Callable[[], Reply]


class BesideThread:
    """Runs calls one after the other, in the order in which the master sends them, and replies.

    Why no worker waits for ever: the thread waits for no call of the devices, only for threads of its kind on other
    workers, where an interface sums over the ranks. These have the same calls in the same order, and the threads of
    calls hand them on without waiting for them.

    Args:
        channels: get the replies, and the exception of a call.
    """

    def __init__(self, channels: Channels):
        self._channels = channels
        self._calls: queue.SimpleQueue[BesideCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="calls beside the devices", daemon=True)
        self._thread.start()

    def start(self, call: BesideCall) -> None:
        """Starts the call on the thread; returns at once."""
        self._calls.put(call)

    def close(self) -> None:
        """Ends the thread behind the calls that have come."""
        self._calls.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            activity = f"{call.what}: beside"
            self._channels.activity.set_beside(activity)
            with doing(activity):
                try:
                    reply = call.run()
                except (Exception, SystemExit) as error:  # an interface may call sys.exit
                    self._channels.fail(error, call.request_id)
                    return
                logger.info("beside took %.3f s", _seconds(reply.span))
            self._channels.activity.set_beside("")
            self._channels.report(reply)


def _seconds(span: Span) -> float:
    return span.end - span.start
