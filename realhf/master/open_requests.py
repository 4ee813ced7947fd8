"""The requests that workers have not answered, and since when each worker has been busy with its oldest ones."""

import itertools
from collections.abc import Callable

from realhf.master.replies import Request, check_reply
from realhf.transport.messages import Reply

Clock = Callable[[], float]
NO_REQUEST = "no request"  # describes a worker that has answered all requests


class OpenRequests:
    """The open requests of each worker, in two queues that it executes beside each other: requests of calls, and
    requests to send parameters (`beside`)."""

    def __init__(self, num_workers: int, clock: Clock):
        self._of_calls = [_Queue(clock) for _ in range(num_workers)]
        self._beside = [_Queue(clock) for _ in range(num_workers)]
        self._ids, self._clock = itertools.count(), clock

    def expect(self, worker: int, request: Request, *, beside: bool = False) -> int:
        """Notes a request that is about to be sent; returns its id."""
        request_id = next(self._ids)
        (self._beside if beside else self._of_calls)[worker].add(request_id, request)
        return request_id

    def answered(self, worker: int, reply: Reply) -> Request:
        """Closes the request that a reply answers, and returns it.

        Raises:
            ValueError: the reply does not answer the request that it names; nothing was changed.
        """
        of_calls, beside = self._of_calls[worker], self._beside[worker]
        queue = beside if reply.request_id in beside.requests else of_calls
        request = queue.requests.get(reply.request_id)
        check_reply(request, reply)
        assert request is not None
        queue.remove(reply.request_id)
        return request

    def describe(self, worker: int) -> str:
        """The requests that `worker` is busy with, for error messages."""
        whats = [queue.oldest.what for queue in (self._of_calls[worker], self._beside[worker]) if queue.requests]
        return ", and beside it in ".join(whats) or NO_REQUEST

    def late(self) -> dict[int, Request]:
        """The workers that have been busy with a request for longer than its deadline, and that request.

        The time of a request starts when the worker has answered the one before. If several workers execute a request
        together, its time starts when the last of them has reached it, so waiting for a slower peer costs nothing. A
        worker that has not reached it is still busy with an earlier request. Therefore the earliest of all open
        requests always has a deadline.
        """
        queues = [queue for queue in (*self._of_calls, *self._beside) if queue.requests]
        ahead = {request.what for queue in queues for request in queue.behind if request.together}
        since: dict[str, float] = {}
        for queue in queues:
            if queue.oldest.together:
                since[queue.oldest.what] = max(queue.busy_since, since.get(queue.oldest.what, queue.busy_since))
        late = {}
        for worker, pair in enumerate(zip(self._of_calls, self._beside, strict=True)):
            for queue in pair:
                request = queue.oldest if queue.requests else None
                if request is None or (request.together and request.what in ahead):
                    continue
                start = since[request.what] if request.together else queue.busy_since
                if self._clock() - start > request.deadline_s:
                    late[worker] = request
        return late

    def __bool__(self) -> bool:
        return any(queue.requests for queue in (*self._of_calls, *self._beside))


class _Queue:
    """Requests that one thread of a worker executes in their order."""

    def __init__(self, clock: Clock):
        self.requests: dict[int, Request] = {}  # the oldest first
        self._clock, self.busy_since = clock, 0.0

    def add(self, request_id: int, request: Request) -> None:
        if not self.requests:
            self.busy_since = self._clock()
        self.requests[request_id] = request

    def remove(self, request_id: int) -> None:
        del self.requests[request_id]
        self.busy_since = self._clock()

    @property
    def oldest(self) -> Request:
        return next(iter(self.requests.values()))

    @property
    def behind(self) -> list[Request]:
        """All but the oldest."""
        return list(self.requests.values())[1:]
