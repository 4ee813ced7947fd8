"""The requests that workers have not answered, and since when each worker has been busy with its oldest ones."""

import itertools
from collections.abc import Callable, Mapping
from typing import Literal

from realhf.master.replies import Request, check_reply
from realhf.transport.messages import Reply

Clock = Callable[[], float]
Thread = Literal["calls", "moves", "beside"]
_NO_ID = -1  # before all ids
NO_REQUEST = "no request"  # describes a worker that has answered all requests


class OpenRequests:
    """The open requests of each worker, in the queues that its threads execute beside each other: `calls`, requests to
    send parameters (`moves`), and calls that run `beside` the devices. The thread of calls hands the latter on when it
    has come to them."""

    def __init__(self, num_workers: int, clock: Clock):
        self._queues: list[dict[Thread, _Queue]] = [
            {"calls": _Queue(clock), "moves": _Queue(clock), "beside": _Queue(clock)} for _ in range(num_workers)
        ]
        self._ids, self._clock = itertools.count(), clock

    def expect(self, worker: int, request: Request, thread: Thread = "calls") -> int:
        """Notes a request that is about to be sent; returns its id."""
        request_id = next(self._ids)
        self._queues[worker][thread].add(request_id, request)
        return request_id

    def answered(self, worker: int, reply: Reply) -> Request:
        """Closes the request that a reply answers, and returns it.

        Raises:
            ValueError: the reply does not answer the request that it names; nothing was changed.
        """
        queues = self._queues[worker]
        queue = next((queue for queue in queues.values() if reply.request_id in queue.requests), queues["calls"])
        request = queue.requests.get(reply.request_id)
        check_reply(request, reply)
        assert request is not None
        queue.remove(reply.request_id)
        if queue is queues["calls"] and reply.request_id < queues["beside"].oldest_id:
            queues["beside"].busy_since = self._clock()  # it may have been handed on now, not before
        return request

    def describe(self, worker: int, request_id: int | None = None) -> str:
        """The open request of that id, or those that `worker` is busy with, for error messages."""
        queues = self._queues[worker].values()
        named = [queue.requests[request_id].what for queue in queues if request_id in queue.requests]
        whats = named or [queue.oldest.what for queue in queues if queue.requests]
        return ", and beside it in ".join(whats) or NO_REQUEST

    def late(self) -> dict[int, Request]:
        """The workers that have been busy with a request for longer than its deadline, and that request.

        The time of a request starts when the worker has answered the one before. If several workers execute a request
        together, its time starts when the last of them has reached it, so waiting for a slower peer costs nothing. A
        worker that has not reached it is still busy with an earlier request. Therefore the earliest of all open
        requests always has a deadline.
        """
        reached = [queue for queues in self._queues for queue in _reached(queues)]
        ahead = {request.what for queues in self._queues for queue in queues.values() for request in queue.behind}
        ahead |= {queues["beside"].oldest.what for queues in self._queues if _is_not_handed_on(queues)}
        since: dict[str, float] = {}
        for queue in reached:
            if queue.oldest.together:
                since[queue.oldest.what] = max(queue.busy_since, since.get(queue.oldest.what, queue.busy_since))
        late = {}
        for worker, queues in enumerate(self._queues):
            for queue in _reached(queues):
                request = queue.oldest
                if request.together and request.what in ahead:
                    continue
                start = since[request.what] if request.together else queue.busy_since
                if self._clock() - start > request.deadline_s:
                    late[worker] = request
        return late

    def __bool__(self) -> bool:
        return any(queue.requests for queues in self._queues for queue in queues.values())


class _Queue:
    """Requests that one thread of a worker executes in their order."""

    def __init__(self, clock: Clock):
        self.requests: dict[int, Request] = {}  # the oldest first
        self._clock, self.busy_since = clock, clock()

    def add(self, request_id: int, request: Request) -> None:
        if not self.requests:
            self.busy_since = self._clock()
        self.requests[request_id] = request

    def remove(self, request_id: int) -> None:
        del self.requests[request_id]
        self.busy_since = self._clock()

    @property
    def oldest_id(self) -> int:
        return next(iter(self.requests), _NO_ID)

    @property
    def oldest(self) -> Request:
        return next(iter(self.requests.values()))

    @property
    def behind(self) -> list[Request]:
        """All but the oldest."""
        return list(self.requests.values())[1:]


def _is_not_handed_on(queues: Mapping[Thread, _Queue]) -> bool:
    """Whether the thread of calls has not come to the oldest call beside the devices."""
    return 0 <= queues["calls"].oldest_id < queues["beside"].oldest_id


def _reached(queues: Mapping[Thread, _Queue]) -> list[_Queue]:
    """The queues whose oldest request the worker is busy with."""
    waits = _is_not_handed_on(queues)
    return [queue for thread, queue in queues.items() if queue.requests and not (thread == "beside" and waits)]
