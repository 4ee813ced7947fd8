"""The run's store as torch's process groups use it: the master keeps it, and serves it on the worker's connection."""

import itertools
import queue
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from realhf.transport.messages import AddToKey, CheckKeys, OnStore, SetKey, StoreReply, WaitForKeys


class MasterStore(dist.Store):
    """A store for any thread of the worker; `take` gets the answers, from the thread of the connection.

    It has the operations that process groups use. torch calls them from threads of C++, which need the interpreter's
    lock for them, and does not keep the store alive: it must be kept as long as there are process groups.

    Raises, from every operation, `torch.distributed.DistStoreError`: there was no answer within the store's timeout, or
    the one given to `wait`; the master refuses the request; or the store has ended.
    """

    def __init__(self, send: Callable[[OnStore], object]):
        super().__init__()
        self._send = send
        self._ids = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[StoreReply]] = {}
        self._why_ended = ""

    def take(self, reply: StoreReply) -> None:
        if answer := self._answers.get(reply.request_id):  # else it comes too late
            answer.put(reply)

    def end(self, why: str) -> None:
        """Ends operations under way, and all later ones, with an error that says `why`."""
        self._why_ended = why
        for request_id in list(self._answers):
            self.take(StoreReply(request_id=request_id, error=why))

    def _ask(self, request: OnStore, timeout: timedelta | None = None) -> StoreReply:
        timeout_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]  # torch types it not
        answer = self._answers[request.request_id] = queue.SimpleQueue()
        try:
            if self._why_ended:  # looked at after `end` can see this operation
                raise dist.DistStoreError(self._why_ended)
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
        """`value`: torch's C++ gives bytes."""
        value = value.encode() if isinstance(value, str) else value
        self._ask(SetKey(request_id=next(self._ids), key=key, value=value))

    def get(self, key: str) -> bytes:
        return self._ask(WaitForKeys(request_id=next(self._ids), keys=(key,))).value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask(WaitForKeys(request_id=next(self._ids), keys=tuple(keys)), timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(CheckKeys(request_id=next(self._ids), keys=tuple(keys))).number)

    def add(self, key: str, amount: int) -> int:
        return self._ask(AddToKey(request_id=next(self._ids), key=key, amount=amount)).number

    def clone(self) -> "MasterStore":
        return self
