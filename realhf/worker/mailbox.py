"""Per-sample data on its way between workers, in host memory: posted when it was made, waited for when it is needed.

On GPUs too: a receive of NCCL would spin on the device until its message comes, and whatever makes CUDA wait for the
whole device (memory that is freed, a kernel that is loaded, a graph that is recorded) would wait for that.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.transport.messages import BatchKey, KeyMetadata, Receive, Send
from realhf.worker.store import SampleStore


class _Incoming:
    """A message that is being received into `packed`; `samples` are views of it."""

    def __init__(self, receive: Receive):
        metadata = receive.metadata
        size = sum(metadata.lengths) * _items_per_row(metadata)
        self.source, self.key = receive.peer, receive.key
        self.packed = torch.empty(size, dtype=getattr(torch, metadata.dtype))
        self.samples = dict(zip(metadata.ids, _unpack(self.packed, metadata), strict=True))
        self.work: dist.Work | None = None
        self._lock, self._has_arrived = threading.Lock(), False

    def wait(self, timeout_s: float) -> None:
        """Several threads may call it. Only one waits for the work, because gloo allows that once."""
        with self._lock:
            if not self._has_arrived:
                assert self.work is not None
                self.work.wait(timedelta(seconds=timeout_s))
                self._has_arrived = True


class _Outgoing:
    """A message that is being sent, or will be when its content has arrived. `packed` must stay until then."""

    def __init__(self, send: Send, packed: Tensor, wait: Callable[[float], object]):
        self.receiver, self.key, self.packed, self.wait = send.peer, send.key, packed, wait


class Mailbox:
    """Sends and receives without making the worker wait, one packed message a key and peer.

    Both ends post their parts of a transfer at the same place of the master's one sequence of requests. A tensor may
    still be arriving by an earlier transfer when it has to be sent on. A thread then sends it when it has arrived, and
    no call waits for it.

    No rank waits forever. Posting waits for nothing. A message arrives when both ends have reached its transfer and the
    messages of earlier transfers have arrived. A call waits for its peers and for messages of earlier transfers. So the
    first unfinished request of the sequence can always proceed, whatever the layouts.

    Args:
        group: a group of all ranks over gloo; the world by default.
    """

    def __init__(self, store: SampleStore, timeout_s: float, group: dist.ProcessGroup | None = None):
        self._store, self._timeout_s, self._group = store, timeout_s, group
        self._outgoing: dict[BatchKey, list[_Outgoing]] = {}
        self._incoming: dict[BatchKey, list[_Incoming]] = {}
        # Messages between two workers have numbers, so that one that is sent on late is not taken for another.
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._forwarder = ThreadPoolExecutor(1, "sends on")

    def post(self, batch: BatchKey, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Starts the transfers and returns."""
        outgoing, incoming = self._outgoing.setdefault(batch, []), self._incoming.setdefault(batch, [])
        coming = {(message.key, sample): message for message in incoming for sample in message.samples}
        for receive in receives:
            arriving = _Incoming(receive)
            arriving.work = self._start(dist.irecv, arriving.packed, receive.peer, _next(self._received, receive.peer))
            incoming.append(arriving)
        for send in sends:
            expected = {message for sample in send.ids if (message := coming.get((send.key, sample)))}
            values = [self._value(batch, send.key, sample, coming) for sample in send.ids]
            outgoing.append(self._send_on(send, expected, values) if expected else self._send(send, _pack(values)))

    def is_expecting(self, batch: BatchKey, keys: Collection[str]) -> bool:
        """Whether data of `keys` has been posted that was not collected yet."""
        return any(message.key in keys for message in self._incoming.get(batch, ()))

    def collect(self, batch: BatchKey, keys: Collection[str]) -> None:
        """Waits for all data of `keys` that is on its way here, and stores it.

        Raises:
            RuntimeError: a peer did not send within the deadline, or went away.
        """
        waiting = self._incoming.get(batch, [])
        for message in [message for message in waiting if message.key in keys]:
            self._wait(message.wait, f"{message.key} of {batch} from worker {message.source}")
            self._store.put(batch, message.key, message.samples.keys(), message.samples.values())
            waiting.remove(message)

    def free(self, batch: BatchKey) -> None:
        """Forgets the batch, all of whose calls have ended: its messages have arrived."""
        for message in self._outgoing.pop(batch, ()):
            self._wait(message.wait, f"{message.key} of {batch} being taken by worker {message.receiver}")
        self._incoming.pop(batch, None)

    def close(self) -> None:
        """Ends the thread; to be called when all batches have been freed."""
        self._forwarder.shutdown(wait=False, cancel_futures=True)

    def _value(self, batch: BatchKey, key: str, sample: int, coming: dict[tuple[str, int], _Incoming]) -> Tensor:
        message = coming.get((key, sample))
        return message.samples[sample] if message else self._store.get(batch, key, [sample])[0]

    def _send(self, send: Send, packed: Tensor) -> _Outgoing:
        work = self._start(dist.isend, packed, send.peer, _next(self._sent, send.peer))
        return _Outgoing(send, packed, lambda timeout_s: work.wait(timedelta(seconds=timeout_s)))

    def _send_on(self, send: Send, expected: Collection[_Incoming], values: Sequence[Tensor]) -> _Outgoing:
        """Queues `values` for the thread, which sends them when the messages that hold them have arrived."""
        packed = torch.empty(sum(value.numel() for value in values), dtype=values[0].dtype)
        number = _next(self._sent, send.peer)

        def forward() -> dist.Work:
            for message in expected:
                message.wait(self._timeout_s)
            packed.copy_(_pack(values))
            return self._start(dist.isend, packed, send.peer, number)

        future = self._forwarder.submit(forward)

        def wait(timeout_s: float) -> None:
            future.result(timeout_s).wait(timedelta(seconds=timeout_s))

        return _Outgoing(send, packed, wait)

    def _start(self, start: Callable[..., dist.Work | None], packed: Tensor, peer: int, number: int) -> dist.Work:
        work = start(packed.view(torch.uint8), peer, self._group, number)  # as bytes: the wire need not know the dtype
        assert work is not None, "every rank is in the group"
        return work

    def _wait(self, wait: Callable[[float], object], what: str) -> None:
        try:
            wait(self._timeout_s)
        except (RuntimeError, TimeoutError) as error:
            why = str(error) or "timed out"
            raise RuntimeError(f"data transfer: waited for {what}, at most {self._timeout_s:g} s: {why}") from error


TAGS = 2**20  # more than are on their way between two workers


def _next(numbers: Counter[int], peer: int) -> int:
    numbers[peer] = numbers[peer] % TAGS + 1  # the world's other messages have tag 0
    return numbers[peer]


def _pack(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values])


def _unpack(packed: Tensor, metadata: KeyMetadata) -> list[Tensor]:
    """One tensor [length, *trailing] a sample."""
    parts = packed.split([length * _items_per_row(metadata) for length in metadata.lengths])
    return [part.view(-1, *metadata.trailing) for part in parts]


def _items_per_row(metadata: KeyMetadata) -> int:
    return torch.Size(metadata.trailing).numel()
