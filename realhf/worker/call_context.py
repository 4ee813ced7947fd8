"""The context that an interface gets with its data, and the stand-in for a model that it does not use."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.architecture.decoding import GraphLife
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.protocols import THREE_D_PROTO
from realhf.engine.returned import InterfaceError
from realhf.geometry.layout import Layout
from realhf.parallel.groups import GroupTable

# The rows of the data set of some samples of a step (`DatasetRows.records`).
Records = Callable[[int, Sequence[int]], list[dict[str, Any]]]


def _no_records(step: int, ids: Sequence[int]) -> list[dict[str, Any]]:
    raise LookupError(f"the call of step {step} was given no data set")


@dataclass(frozen=True)
class BatchShare:
    """The part of this device in a call, by the call's transfer protocol.

    holds_outputs: the outputs of this device are collected.
    counts: this device counts in sums over the batch: one of several devices with the same samples.
    peers: the group in which these sums are made; None: this device alone.
    all: the group of all devices in the call; None: this device alone.
    """

    holds_outputs: bool
    counts: bool
    peers: dist.ProcessGroup | None
    all: dist.ProcessGroup | None = None


def batch_share(call: ModelFunctionCallDef, layout: Layout, groups: GroupTable) -> BatchShare:
    """The part of `groups.rank`, to which the call's protocol must give samples. `groups` were made with
    `sharing_ranks`."""
    if call.protocol is THREE_D_PROTO:
        of_layout = groups.groups(layout)
        return BatchShare(
            of_layout.holds_outputs, True, of_layout.data, of_layout.model
        )  # a sum among devices of one place in the model
    part_of = call.protocol.distribute(layout).part_of
    first = min(device for device, part in part_of.items() if part == part_of[groups.rank])
    peers = (groups.of_ranks_beside if call.runs_beside else groups.of_ranks)(sorted(part_of))
    return BatchShare(groups.rank in call.protocol.collect(layout), groups.rank == first, peers, peers)


def sharing_ranks(
    calls: Iterable[tuple[ModelFunctionCallDef, Layout]], *, beside: bool = False
) -> list[tuple[int, ...]]:
    """For each call under another protocol than 3D_PROTO, who gets a part of its batch: of the calls `beside` the
    devices, or of the others."""
    return [
        tuple(sorted(call.protocol.distribute(layout).part_of))
        for call, layout in calls
        if call.protocol is not THREE_D_PROTO and call.runs_beside == beside
    ]


@dataclass(kw_only=True)
class CallContext:
    """The context of one call (see `realhf.engine.interface.Context`)."""

    seed: int
    step: int
    share: BatchShare
    batch_size: int
    steps_made: int = 0
    steps: int = 0
    samples_per_prompt: int = 1
    micro_batches: int = 1
    gradient_parts: int = 0
    decode_graphs: GraphLife | None = None
    kv_cache_tokens: int | None = None
    record: frozenset[str] = frozenset()
    state: dict[str, float] = field(default_factory=dict)
    records: Records = _no_records
    holds_outputs: bool = field(init=False)

    def __post_init__(self) -> None:
        self.holds_outputs = self.share.holds_outputs

    def rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        return self.records(self.step, ids)

    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        total = values.clone() if self.share.counts else values.new_zeros(values.shape)
        if self.share.peers is not None:
            dist.all_reduce(total, group=self.share.peers)
        return total

    def sum_over_outputs(self, values: Tensor) -> Tensor:
        total = values.clone() if self.holds_outputs else values.new_zeros(values.shape)
        if self.share.all is not None:
            dist.all_reduce(total, group=self.share.all)
        return total

    def in_order(self, ids: Sequence[int], values: Tensor) -> Tensor:
        if values.dim() == 0 or len(values) != len(ids):
            raise InterfaceError(
                f"context.in_order got values of shape {list(values.shape)} for {len(ids)} samples; give it one value "
                "(or row) a sample"
            )
        # A sum with zeros keeps every bit but the sign of -0.0, which + 0 takes away whether or not there are peers.
        placed = values.new_zeros(self.batch_size, *values.shape[1:])
        placed[torch.tensor(ids, dtype=torch.int64, device=values.device)] = values
        return self.sum_over_data_parallel(placed) + 0


class UnusedModel:
    """Stands for the model in calls of an interface that says it does not use it.

    Under their protocols a pass may find other samples on every device, and would wait for ever or mix them.
    """

    def __init__(self, call: ModelFunctionCallDef):
        self._call = call

    def __getattr__(self, name: str) -> NoReturn:
        if self._call.runs_beside:
            raise RuntimeError(
                f"{self._call.name}: it runs beside the devices, without a model, and the interface asks for "
                f"model.{name}; give the call a model, and leave runs_beside and uses_model out"
            )
        raise RuntimeError(
            f"{self._call.name}: the interface has uses_model=False and asks for model.{name}; leave uses_model out, "
            "and run the call under 3D_PROTO"
        )
