"""What an interface gets beside its data: the call's context, and what stands for a model that it does not use."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.protocols import THREE_D_PROTO
from realhf.geometry.layout import Layout
from realhf.parallel.groups import GroupTable


@dataclass(frozen=True)
class BatchShare:
    """What a call's protocol makes of this device.

    holds_outputs: its outputs are taken.
    counts: in sums over the batch; of several devices with the same samples one does.
    peers: with whom it makes these sums; None: with nobody.
    """

    holds_outputs: bool
    counts: bool
    peers: dist.ProcessGroup | None


def batch_share(call: ModelFunctionCallDef, layout: Layout, groups: GroupTable) -> BatchShare:
    """Of `groups.rank`, which has to get a part of the call's batch. `groups` were made with `sharing_ranks`."""
    if call.protocol is THREE_D_PROTO:
        of_layout = groups.groups(layout)
        return BatchShare(
            of_layout.holds_outputs, True, of_layout.data
        )  # a sum among devices of one place in the model
    part_of = call.protocol.distribute(layout).part_of
    first = min(device for device, part in part_of.items() if part == part_of[groups.rank])
    peers = groups.of_ranks(sorted(part_of))
    return BatchShare(groups.rank in call.protocol.collect(layout), groups.rank == first, peers)


def sharing_ranks(calls: Iterable[tuple[ModelFunctionCallDef, Layout]]) -> list[tuple[int, ...]]:
    """For each call under another protocol than 3D_PROTO, who gets a part of its batch."""
    return [
        tuple(sorted(call.protocol.distribute(layout).part_of))
        for call, layout in calls
        if call.protocol is not THREE_D_PROTO
    ]


class CallContext:
    """The context of one call (see `realhf.engine.interface.Context`)."""

    def __init__(
        self, seed: int, step: int, micro_batches: int, share: BatchShare, record: frozenset[str] = frozenset()
    ):
        self.seed, self.step, self.micro_batches, self.record = seed, step, micro_batches, record
        self.holds_outputs = share.holds_outputs
        self._share = share

    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        total = values.clone() if self._share.counts else values.new_zeros(values.shape)
        if self._share.peers is not None:
            dist.all_reduce(total, group=self._share.peers)
        return total


class UnusedModel:
    """Stands for the model in calls of an interface that says it does not use it.

    Under their protocols a pass may find other samples on every device, and would wait for ever or mix them.
    """

    def __init__(self, call: str):
        self._call = call

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"{self._call}: the interface has uses_model=False and asks for model.{name}; leave uses_model out, "
            "and run the call under 3D_PROTO"
        )
