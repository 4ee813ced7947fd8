"""Per-sample data on its way between workers: posted when it was made, waited for when it is needed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.transport.messages import BatchKey, KeyMetadata, Receive, Send
from realhf.worker.store import SampleStore


@dataclass(frozen=True)
class _Outgoing:
    """A message that is being sent; its tensor must stay until then."""

    receive_by: int
    key: str
    packed: Tensor
    work: dist.Work


@dataclass(frozen=True)
class _Incoming:
    """A message that is being received into `packed`."""

    source: int
    key: str
    metadata: KeyMetadata
    packed: Tensor
    work: dist.Work


class Mailbox:
    """Sends and receives without making the worker wait, one packed message a key and peer.

    Both ends post their parts of a transfer at the same place of the master's one sequence of
    requests, so that messages between two workers match in order, and nobody waits in a circle.
    """

    def __init__(self, store: SampleStore, device: torch.device, timeout_s: float):
        self._store, self._device, self._timeout_s = store, device, timeout_s
        self._outgoing: dict[BatchKey, list[_Outgoing]] = {}
        self._incoming: dict[BatchKey, list[_Incoming]] = {}

    def post(self, batch: BatchKey, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Starts the transfers and returns."""
        outgoing = self._outgoing.setdefault(batch, [])
        for send in sends:
            packed = torch.cat([value.flatten() for value in self._store.get(batch, send.key, send.ids)])
            outgoing.append(_Outgoing(send.peer, send.key, packed, dist.isend(packed, send.peer)))
        incoming = self._incoming.setdefault(batch, [])
        for receive in receives:
            packed = _allocate(receive.metadata, self._device)
            work = dist.irecv(packed, receive.peer)
            incoming.append(_Incoming(receive.peer, receive.key, receive.metadata, packed, work))

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
            self._wait(message.work, f"{message.key} of {batch} from worker {message.source}")
            self._store.put(batch, message.key, message.metadata.ids, _unpack(message.packed, message.metadata))
            waiting.remove(message)

    def free(self, batch: BatchKey) -> None:
        """Forgets the batch, all of whose calls have ended: what was sent has arrived."""
        for message in self._outgoing.pop(batch, ()):
            self._wait(message.work, f"{message.key} of {batch} being taken by worker {message.receive_by}")
        self._incoming.pop(batch, None)

    def _wait(self, work: dist.Work, what: str) -> None:
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise RuntimeError(f"data transfer: waited for {what}, at most {self._timeout_s:g} s: {error}") from error


def _allocate(metadata: KeyMetadata, device: torch.device) -> Tensor:
    size = sum(metadata.lengths) * _items_per_row(metadata)
    return torch.empty(size, dtype=getattr(torch, metadata.dtype), device=device)


def _unpack(packed: Tensor, metadata: KeyMetadata) -> list[Tensor]:
    """One tensor [length, *trailing] a sample."""
    parts = packed.split([length * _items_per_row(metadata) for length in metadata.lengths])
    return [part.view(-1, *metadata.trailing) for part in parts]


def _items_per_row(metadata: KeyMetadata) -> int:
    return torch.Size(metadata.trailing).numel()
