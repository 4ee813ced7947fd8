"""The run's store as torch's process groups use it: the master keeps it, and serves it on the worker's connection."""

import itertools
import queue
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from realhf.transport.messages import (
    AddToKey,
    CheckKeys,
    CompareSetKey,
    CountKeys,
    DeleteKey,
    OnStore,
    SetKey,
    StoreReply,
    WaitForKeys,
)


class MasterStore(dist.Store):
    """A store for any thread of the worker; `take` gets the answers, from the thread of the connection.

    torch does not keep it alive: it must be kept as long as there are process groups.

    Raises, from every operation, `torch.distributed.DistStoreError`: no answer within the store's timeout, or the one
    given to `wait`; or the master refuses the request.
    """

    def __init__(self, send: Callable[[OnStore], object]):
        super().__init__()
        self._send = send
        self._ids = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[StoreReply]] = {}

    def take(self, reply: StoreReply) -> None:
        if reply.request_id in self._answers:  # else it comes too late
            self._answers[reply.request_id].put(reply)

    def _ask(self, request: OnStore, timeout: timedelta | None = None) -> StoreReply:
        timeout_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]  # torch types it not
        answer = self._answers[request.request_id] = queue.SimpleQueue()
        try:
            self._send(request)
            reply = answer.get(timeout=timeout_s)
        except queue.Empty:
            text = f"timed out after {timeout_s:g} s in the run's store, at the master: {request!s:.300}"
            raise dist.DistStoreError(text) from None
        finally:
            del self._answers[request.request_id]
        if reply.error:
            raise dist.DistStoreError(reply.error)
        return reply

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(SetKey(request_id=next(self._ids), key=key, value=_bytes(value)))

    def get(self, key: str) -> bytes:
        return self._ask(WaitForKeys(request_id=next(self._ids), keys=(key,))).value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask(WaitForKeys(request_id=next(self._ids), keys=tuple(keys)), timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(CheckKeys(request_id=next(self._ids), keys=tuple(keys))).number)

    def add(self, key: str, amount: int) -> int:
        return self._ask(AddToKey(request_id=next(self._ids), key=key, amount=amount)).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        expected, desired = _bytes(expected), _bytes(desired)
        request = CompareSetKey(request_id=next(self._ids), key=key, expected=expected, desired=desired)
        return self._ask(request).value

    # torch's C++ looks for these two by other names than those of `Store` in Python, which call them.
    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return bool(self._ask(DeleteKey(request_id=next(self._ids), key=key)).number)

    def getNumKeys(self) -> int:  # noqa: N802
        return self._ask(CountKeys(request_id=next(self._ids))).number


def _bytes(value: str | bytes) -> bytes:
    """Process groups give bytes, and Python a string."""
    return value.encode() if isinstance(value, str) else value
