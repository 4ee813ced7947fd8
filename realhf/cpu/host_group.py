"""Process groups of ranks of one host on CPU: collectives and messages over shared memory, behind torch.distributed.

gloo serves messages from a thread of its own. With as many workers as cores, that thread waits longer for a core than
the message takes. Here the waiting rank does the work. Sums are made in the order of the ranks, so every rank and every
run gets the same bits.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from realhf.architecture.chunks import RING_BYTES
from realhf.cpu import _host
from realhf.cpu._host import PeerError

__all__ = ["BACKEND", "HostProcessGroup", "Parts", "PeerError", "Rows", "host_identity", "rows_of"]

BACKEND = "host_memory"
SLOT_BYTES = 2**20  # size of each of the two slots of a rank; larger tensors go in pieces
# The ring of messages in parts. Both ends wait for these, so a small ring is still in a cache when it is read.
PARTS_RING_BYTES = 2**20

_DTYPES = {
    torch.float32: _host.DType.float32,
    torch.float64: _host.DType.float64,
    torch.bfloat16: _host.DType.bfloat16,
    torch.int64: _host.DType.int64,
}
IsDone = Callable[[], bool]
WaitFor = Callable[[float], None]  # seconds at most
Then = Callable[[], object] | None
Rows = tuple[int, int, int, int]  # where the first is, how many, bytes of each, bytes from one to the next
_OPERATIONS = {dist.ReduceOp.SUM: _host.Operation.sum, dist.ReduceOp.MAX: _host.Operation.max}


def host_identity() -> int:
    """A number that is equal for processes that can share memory through /proc: one boot of one machine, one process
    namespace, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    processes = os.readlink("/proc/self/ns/pid")
    return int.from_bytes(hashlib.sha256(f"{boot} {processes} {os.getuid()}".encode()).digest()[:7])


@dataclass(frozen=True, eq=False)
class Parts:
    """A sequence of parts of the memory of `tensors`: `rows` is int64 [parts, 4], in the order of `Rows`."""

    rows: NDArray[np.int64]
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Parts":
        """All elements of `tensors`, of any strides, in their order."""
        rows = [row for t in tensors for row in rows_of(t.data_ptr(), t.shape, t.stride(), t.element_size())]
        return cls(np.array(rows, np.int64).reshape(-1, 4), tensors)


class HostProcessGroup(dist.ProcessGroup):
    """all_reduce, reduce_scatter_tensor, all_gather, all_gather_into_tensor, broadcast and barrier; SUM and MAX;
    messages between two ranks, in order, without tags.

    `send_parts` and `receive_parts` are messages whose content is scattered over the memory of either rank; they are
    ordered apart from other messages. Collectives return when they are done, messages at once. A message counts as sent
    once it is in the shared memory, before its receiver asks for it. The memory has no name, so it is freed with the
    last of its processes. A group is for one thread at a time.

    Raises, from every collective and from a message's wait:
        PeerError: a rank ended, or did not take part within the timeout; the message names it.
        RuntimeError: a message has another size than its receiver expects.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]  # of two constructors torch types one
        required = [
            _host.HostGroup.required_bytes(size, SLOT_BYTES),
            _host.Channels.required_bytes(size, RING_BYTES),
            _host.Channels.required_bytes(size, PARTS_RING_BYTES),
        ]
        # The files stay open: the other ranks may open rank 0's at any time.
        self._memory = _shared_memory(store, rank, required, timeout)
        self._group = _host.HostGroup(self._memory[0], rank, size, SLOT_BYTES, timeout.total_seconds())
        self._channels = _host.Channels(self._memory[1], rank, size, RING_BYTES)
        self._parts_channels = _host.Channels(self._memory[2], rank, size, PARTS_RING_BYTES)
        self._timeout = timeout
        self._under_way: set[_Message] = set()

    def __del__(self) -> None:
        for descriptor in getattr(self, "_memory", ()):
            os.close(descriptor)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        """torch keeps the name with a group's backends, and a group in Python has none."""
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch has a type of strings for it
        """The name by which torch finds the group, for a device mesh."""
        return self._name

    # torch calls one overload of each collective.
    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> dist.Work:  # type: ignore[override]
        for tensor in tensors:
            with _Contiguous(tensor) as flat:
                dtype, operation = _kinds(flat, opts.reduceOp)
                self._group.all_reduce(flat.data_ptr(), flat.numel(), dtype, operation)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> dist.Work:  # type: ignore[override]
        for tensor in tensors:
            with _Contiguous(tensor) as flat:
                self._group.broadcast(flat.data_ptr(), flat.nbytes, opts.rootRank)
        return _done(tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        for parts, own in zip(outputs, inputs, strict=True):
            whole = torch.empty(len(parts), *own.shape, dtype=own.dtype)
            self._allgather_base(whole, own)
            for part, gathered in zip(parts, whole, strict=True):
                part.copy_(gathered)
        return _done([part for parts in outputs for part in parts])

    def _allgather_base(self, output: Tensor, own: Tensor, opts: object = None) -> dist.Work:
        own = own.contiguous()
        with _Contiguous(output) as flat:
            self._group.all_gather(own.data_ptr(), flat.data_ptr(), own.nbytes)
        return _done([output])

    def _reduce_scatter_base(  # type: ignore[override]
        self, output: Tensor, whole: Tensor, opts: dist.ReduceScatterOptions
    ) -> dist.Work:
        whole = whole.contiguous()
        with _Contiguous(output) as flat:
            dtype, operation = _kinds(flat, opts.reduceOp)
            self._group.reduce_scatter(whole.data_ptr(), flat.data_ptr(), flat.numel(), dtype, operation)
        return _done([output])

    # The names of the two in torch 2.13.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def barrier(self, opts: object = None) -> dist.Work:
        self._group.barrier()
        return _done([])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        return self._send(_whole(tensor.detach().contiguous()), self._channels, to)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        target = tensor.detach()
        flat = target.contiguous()
        then = None if flat.data_ptr() == target.data_ptr() else partial(target.copy_, flat)
        return self._receive(_whole(flat), self._channels, sender, then)

    def send_parts(self, parts: Parts, to: int) -> dist.Work:
        """Sends one message; its parts must not change until it is sent. `to` is a rank of the group, or this one."""
        return self._send(parts, self._parts_channels, to)

    def receive_parts(self, parts: Parts, sender: int) -> dist.Work:
        """Fills the parts with a message of `send_parts`, which may have been cut into other parts."""
        return self._receive(parts, self._parts_channels, sender)

    def _send(self, parts: Parts, channels: _host.Channels, to: int) -> dist.Work:
        number = channels.send(parts.rows, to)
        is_done, wait = partial(channels.is_sent, number, to), partial(channels.wait_sent, number, to)
        return _Message(self, parts.tensors, is_done, wait)

    def _receive(self, parts: Parts, channels: _host.Channels, sender: int, then: Then = None) -> dist.Work:
        number = channels.receive(parts.rows, sender)
        is_done, wait = partial(channels.is_received, number, sender), partial(channels.wait_received, number, sender)
        return _Message(self, parts.tensors, is_done, wait, then)


class _Message(dist.Work):
    """A message on its way. The group keeps it, and its memory, until it is done."""

    def __init__(
        self, group: HostProcessGroup, tensors: Sequence[Tensor], is_done: IsDone, wait: WaitFor, then: Then = None
    ):
        """`tensors` are kept until the message is done; `then` is called by the wait that sees it done."""
        super().__init__()
        self._under_way, self._timeout = group._under_way, group._timeout
        self._tensors, self._then = tensors, then
        self._is_done, self._wait = is_done, wait
        self._under_way.add(self)

    def is_completed(self) -> bool:
        return self not in self._under_way or self._is_done()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Returns True when the message is done; the default timeout is the group's. Raises as HostProcessGroup."""
        if self in self._under_way:
            self._wait((timeout or self._timeout).total_seconds())
            self._under_way.remove(self)
            if self._then is not None:
                self._then()
            del self._tensors, self._then
        return True


dist.Backend.register_backend(BACKEND, HostProcessGroup, devices=["cpu"])


class _Contiguous:
    """A contiguous tensor to write into: `target` itself, or a copy that is written back."""

    def __init__(self, target: Tensor):
        self.target = target

    def __enter__(self) -> Tensor:
        self.flat = self.target.detach().contiguous()
        return self.flat

    def __exit__(self, *error: object) -> None:
        if self.flat.data_ptr() != self.target.data_ptr():
            self.target.detach().copy_(self.flat)


def _kinds(tensor: Tensor, operation: dist.ReduceOp) -> tuple[_host.DType, _host.Operation]:
    for known, found in _OPERATIONS.items():
        if operation == known and tensor.dtype in _DTYPES:  # type: ignore[comparison-overlap]
            return _DTYPES[tensor.dtype], found
    raise NotImplementedError(f"{operation} of {tensor.dtype}: host memory has SUM and MAX of {list(_DTYPES)}")


def _whole(flat: Tensor) -> Parts:
    """A contiguous tensor as one part."""
    return Parts(np.array([[flat.data_ptr(), 1, flat.nbytes, 0]], np.int64), [flat])


def _done(tensors: Sequence[Tensor]) -> dist.Work:
    return _Done(tensors)


class _Done(dist.Work):
    """A collective that has ended."""

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()
        self._future: torch.futures.Future[Sequence[Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Sequence[Tensor]]:
        return self._future


def rows_of(first: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> Iterator[Rows]:
    """The rows that hold the elements of a tensor, in order; dimensions without gaps between them count as one.

    `first` is the address of its first element; `strides` are in elements.
    """
    dims: list[tuple[int, int]] = []  # (extent, stride), the last dimension first
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (extent * dims[-1][0], dims[-1][1])
        elif extent != 1:
            dims.append((extent, stride))
    row = dims.pop(0)[0] if dims and dims[0][1] == 1 else 1
    count, stride = dims.pop(0) if dims else (1, 0)
    outer = [[at * of_dim for at in range(extent)] for extent, of_dim in reversed(dims)]
    for offsets in itertools.product(*outer):
        yield first + sum(offsets) * item_bytes, count, row * item_bytes, stride * item_bytes


def _shared_memory(store: dist.Store, rank: int, required: list[int], timeout: timedelta) -> list[int]:
    """Open files of `required` bytes each, zeroed, that all ranks of the group share; without names, so that nothing is
    left behind."""
    if rank == 0:
        descriptors = [os.memfd_create(BACKEND) for _ in required]
        for descriptor, size_bytes in zip(descriptors, required, strict=True):
            os.ftruncate(descriptor, size_bytes)
        store.set("memory", " ".join(map(str, [os.getpid(), *descriptors])))
        return descriptors
    store.set_timeout(timeout)
    process, *descriptors = map(int, store.get("memory").split())
    return [os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR) for descriptor in descriptors]
