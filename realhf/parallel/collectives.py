"""Reduce-scatter and all-gather of flat vectors, divided into equal shards, one for each rank.

NCCL and host memory have both collectives. gloo's reduce-scatter makes a whole all-reduce, and its all-gather copies
through a second vector. So with gloo, ranks exchange shards as messages, and each rank broadcasts its shard. Both move
the bytes of half a ring all-reduce (ZeRO, Rajbhandari et al., 2020, section 7.2.1), in place.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.cpu import host_group

HAS_BOTH = (dist.Backend.NCCL, host_group.BACKEND)
BUCKET_BYTES = 16 * 2**20  # received at once with gloo

# Newer names of torch first: the older ones warn.
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False)
class Traffic:
    """Messages that this rank sent in collectives, by name: their number and their bytes.

    A reduce-scatter or an all-gather of x bytes among n ranks sends x (n - 1) / n from each of them.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, flat: Tensor, group: dist.ProcessGroup) -> None:
        self.calls[name] += 1
        self.sent_bytes[name] += flat.nbytes // group.size() * (group.size() - 1)


# The counters in use. They are global to the process, because a backward pass may run in another thread than its
# caller.
_counting: list[Traffic] = []


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Within it the collectives of this process are counted."""
    counted = Traffic()
    _counting.append(counted)
    try:
        yield counted
    finally:
        _counting.remove(counted)


def reduce_scatter(flat: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums this rank's shard of `flat` over the group; returns it, a view. The other shards are overwritten.

    On the CPU the sum is made in the order of the ranks, so it does not depend on which rank keeps the shard. Sums of
    dtypes below float32 are rounded once.
    """
    if group is None:
        return flat
    for counted in _counting:
        counted.add("reduce_scatter", flat, group)
    shards = flat.chunk(group.size())
    own = shards[group.rank()]
    if dist.get_backend(group) in HAS_BOTH:
        reduce_scatter_tensor(own, flat, group=group)
        return own
    step = max(1, BUCKET_BYTES // flat.element_size() // (group.size() - 1))
    for start in range(0, len(own), step):
        _sum_of_shards([shard[start : start + step] for shard in shards], group)
    return own


def all_gather(flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fills every shard of `flat` with the content that the shard's rank has there."""
    for work in start_all_gather(flat, group):
        work.wait()


def all_reduce(flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `flat` over the group: the two halves of a ring all-reduce, each as above."""
    reduce_scatter(flat, group)
    all_gather(flat, group)


def gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: `own` [...] of every rank of the group, of one shape on all ranks. `traffic` does not count it.

    One tensor: NCCL and gloo would copy a list out of one.
    """
    whole = own.new_empty(group.size(), *own.shape)
    all_gather_tensor(whole.flatten(), own.contiguous().flatten(), group=group)
    return whole


def all_gather_integers(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """The numbers of every rank of the group, by rank; all ranks give equally many. `traffic` does not count them."""
    found: list[list[int]] = gathered(torch.tensor(numbers, dtype=torch.int64, device=device), group).tolist()
    return found


def start_all_gather(flat: Tensor, group: dist.ProcessGroup | None) -> list[dist.Work]:
    """Starts `all_gather`; `flat` is filled when all returned works have been waited for."""
    if group is None:
        return []
    for counted in _counting:
        counted.add("all_gather", flat, group)
    shards = flat.chunk(group.size())
    if dist.get_backend(group) in HAS_BOTH:
        return [all_gather_tensor(flat, shards[group.rank()], group=group, async_op=True)]
    return [dist.broadcast(s, group=group, group_src=rank, async_op=True) for rank, s in enumerate(shards)]


def _sum_of_shards(pieces: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces this rank's piece by its sum over the group; pieces[i] is a piece of rank i's shard."""
    own, operations, terms = pieces[group.rank()], [], []
    for peer, piece in enumerate(pieces):
        if piece is own:
            terms.append(own)
            continue
        terms.append(torch.empty_like(own))
        # As bytes: the wire need not know the dtype.
        operations.append(dist.P2POp(dist.isend, piece.view(torch.uint8), group=group, group_peer=peer))
        operations.append(dist.P2POp(dist.irecv, terms[-1].view(torch.uint8), group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    total = terms[0].to(torch.promote_types(own.dtype, torch.float32))
    for term in terms[1:]:
        total.add_(term)
    if total is not own:
        own.copy_(total)
