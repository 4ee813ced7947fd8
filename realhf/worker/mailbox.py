"""Per-sample data on its way between workers: posted when it was made, waited for when it is needed."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.parallel.waiting import HOST_WAITS, Waits
from realhf.transport.messages import BatchKey, KeyMetadata, Receive, Send
from realhf.worker.store import SampleStore


class _Incoming:
    """A message that is being received into `packed`; `samples` are views of it."""

    def __init__(self, receive: Receive, device: torch.device):
        metadata = receive.metadata
        size = sum(metadata.lengths) * _items_per_row(metadata)
        self.source, self.key = receive.peer, receive.key
        self.packed = torch.empty(size, dtype=getattr(torch, metadata.dtype), device=device)
        self.samples = dict(zip(metadata.ids, _unpack(self.packed, metadata), strict=True))
        self.work: dist.Work | None = None
        self._lock, self._has_arrived = threading.Lock(), False

    def wait(self, waits: Waits, timeout_s: float) -> None:
        """Several threads may call it. Only one waits for the work, because gloo allows that once."""
        with self._lock:
            if not self._has_arrived:
                assert self.work is not None
                waits.order(self.work, timeout_s)
                self._has_arrived = True


class _Outgoing:
    """A message that is being sent, or will be when its content has arrived. `packed` must stay until then."""

    def __init__(self, send: Send, packed: Tensor, wait: Callable[[Waits, float], object]):
        self.receiver, self.key, self.packed, self.wait = send.peer, send.key, packed, wait


class Mailbox:
    """Sends and receives without making the worker wait, one packed message a key and peer.

    Both ends post their parts of a transfer at the same place of the master's one sequence of requests. A tensor may
    still be arriving by an earlier transfer when it has to be sent on. A thread then sends it when it has arrived (on a
    GPU, the stream of these messages), and no call waits for it.

    No rank waits forever. Posting waits for nothing. A message arrives when both ends have reached its transfer and the
    messages of earlier transfers have arrived. A call waits for its peers and for messages of earlier transfers. So the
    first unfinished request of the sequence can always proceed, whatever the layouts.

    Args:
        group: the process group of all ranks for these messages; the world by default. With NCCL nothing else may use
            it, because NCCL matches messages by their order, and all its ranks must have made one collective call in
            it.
    """

    def __init__(
        self,
        store: SampleStore,
        device: torch.device,
        timeout_s: float,
        group: dist.ProcessGroup | None = None,
        waits: Waits = HOST_WAITS,
    ):
        self._store, self._device, self._timeout_s, self._group = store, device, timeout_s, group
        self._waits = waits
        self._outgoing: dict[BatchKey, list[_Outgoing]] = {}
        self._incoming: dict[BatchKey, list[_Incoming]] = {}
        # Messages between two workers have numbers, so that one that is sent on late is not taken for another. NCCL
        # knows no such tags: there they are matched in the order in which both ends post them.
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._forwarder = ThreadPoolExecutor(1, "sends on")

    def post(self, batch: BatchKey, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Starts the transfers and returns. They start together: over NCCL, workers that send to each other would
        wait for each other otherwise."""
        outgoing, incoming = self._outgoing.setdefault(batch, []), self._incoming.setdefault(batch, [])
        coming = {(message.key, sample): message for message in incoming for sample in message.samples}
        received = [_Incoming(receive, self._device) for receive in receives]
        operations = [self._operation(dist.irecv, message.packed, message.source) for message in received]
        at_once: list[tuple[Send, Tensor]] = []
        with self._beside_calls():
            for send in sends:
                expected = {message for sample in send.ids if (message := coming.get((send.key, sample)))}
                values = [self._value(batch, send.key, sample, coming) for sample in send.ids]
                if expected and self._stream is None:
                    outgoing.append(self._send_on(send, expected, values))
                    continue
                for message in expected:
                    assert message.work is not None
                    message.work.wait()  # NCCL: the stream waits, not the worker
                at_once.append((send, _pack(values)))
                operations.append(self._operation(dist.isend, at_once[-1][1], send.peer))
            works = dist.batch_isend_irecv(operations) if operations else []
        if len(works) < len(operations):
            works = works * len(operations)  # NCCL has one for all of them
        for message, work in zip(received, works[: len(received)], strict=True):
            message.work = work
        incoming += received
        for (send, packed), work in zip(at_once, works[len(received) :], strict=True):
            outgoing.append(_Outgoing(send, packed, partial(_order, work)))

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
            what = f"{message.key} of {batch} being taken by worker {message.receiver}"
            self._wait(message.wait, what)
            if self._stream is not None:  # from which the memory is, and which takes it again
                with torch.cuda.stream(self._stream):
                    self._wait(message.wait, what)
        self._incoming.pop(batch, None)

    def close(self) -> None:
        """Ends the thread; to be called when all batches have been freed."""
        self._forwarder.shutdown(wait=False, cancel_futures=True)

    def _value(self, batch: BatchKey, key: str, sample: int, coming: dict[tuple[str, int], _Incoming]) -> Tensor:
        message = coming.get((key, sample))
        return message.samples[sample] if message else self._store.get(batch, key, [sample])[0]

    def _operation(self, start: Callable[..., object], packed: Tensor, peer: int) -> dist.P2POp:
        numbers = self._sent if start is dist.isend else self._received
        numbers[peer] = numbers[peer] % TAGS + 1  # the world's other messages have tag 0
        # As bytes, since NCCL does not know every dtype.
        return dist.P2POp(start, packed.view(torch.uint8), peer, self._group, tag=numbers[peer])

    def _send_on(self, send: Send, expected: Collection[_Incoming], values: Sequence[Tensor]) -> _Outgoing:
        """Queues `values` for the thread, which sends them when the messages that hold them have arrived."""
        packed = torch.empty(sum(value.numel() for value in values), dtype=values[0].dtype, device=values[0].device)
        operation = self._operation(dist.isend, packed, send.peer)

        def forward() -> dist.Work:
            for message in expected:
                message.wait(self._waits, self._timeout_s)
            packed.copy_(_pack(values))
            return dist.batch_isend_irecv([operation])[0]

        future = self._forwarder.submit(forward)
        return _Outgoing(send, packed, lambda waits, timeout_s: waits.order(future.result(timeout_s), timeout_s))

    @contextmanager
    def _beside_calls(self) -> Iterator[None]:
        """On a GPU, work queued inside waits for work that calls have queued before; later work of calls does not wait
        for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _wait(self, wait: Callable[[Waits, float], object], what: str) -> None:
        try:
            wait(self._waits, self._timeout_s)
        except (RuntimeError, TimeoutError) as error:
            why = str(error) or "timed out"
            raise RuntimeError(f"data transfer: waited for {what}, at most {self._timeout_s:g} s: {why}") from error
        self._waits.watch(self._timeout_s, lambda: f"data transfer: waited for {what}")


TAGS = 2**20  # more than are on their way between two workers


def _order(work: dist.Work, waits: Waits, timeout_s: float) -> None:
    waits.order(work, timeout_s)


def _pack(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values])


def _unpack(packed: Tensor, metadata: KeyMetadata) -> list[Tensor]:
    """One tensor [length, *trailing] a sample."""
    parts = packed.split([length * _items_per_row(metadata) for length in metadata.lengths])
    return [part.view(-1, *metadata.trailing) for part in parts]


def _items_per_row(metadata: KeyMetadata) -> int:
    return torch.Size(metadata.trailing).numel()
