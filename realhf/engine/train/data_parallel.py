"""A rank's parameters and their gradients as data parallelism has them: on every rank (ZeRO-1), or one behind the seam
of `Parameters` in shards (`realhf.engine.train.fsdp`)."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.engine import build
from realhf.engine.arena import Arena
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters, sees_own_tokens
from realhf.models.decoder import Decoder
from realhf.parallel.collectives import all_gather, reduce_scatter
from realhf.parallel.groups import ParallelGroups


class Parameters(Protocol):
    """What engine and trainer know of a rank's parameters.

    data_parallel: how `realhf.geometry.shards` divides them.
    decoder: computes with them, within `computing` or `whole`.
    flat: all that this rank keeps, a vector.
    shard: the part of it that this rank updates, a vector too, of the boxes `shard_boxes`.
    gradient: what backward passes add up to, a vector, after `attach_gradients`; arbitrary between steps.
    """

    data_parallel: DataParallel
    decoder: Decoder
    flat: Tensor
    shard: Tensor

    @property
    def gradient(self) -> Tensor: ...

    def held(self) -> list[tuple[Box, Tensor]]:
        """Which parts of global parameters this rank keeps, with local tensors to be read or written in place."""

    def whole(self) -> AbstractContextManager[None]:
        """Within it all parameters of the decoder are in memory."""

    def computing(self) -> AbstractContextManager[None]:
        """Within it the decoder's forward, and backward passes of it, find the parameters that they need."""

    def attach_gradients(self, dtype: torch.dtype) -> None:
        """From now on backward passes add gradients of `dtype` to what `reduce_gradients` gives."""

    def zero_gradients(self) -> None:
        """Before the first micro-batch."""

    def reduce_gradients(self, *, sequence_parallel: bool) -> Tensor:
        """The gradient of `shard`, summed over the layout, after the last micro-batch; to be changed in place."""

    def publish(self) -> None:
        """Takes note that `shard` was updated."""


class ReplicatedParameters:
    """Every data-parallel rank has all of its stage's parameters and gradients, and updates a shard of them (ZeRO-1:
    Rajbhandari et al., 2020, section 5.1). Implements `Parameters`."""

    data_parallel: DataParallel = "zero1"

    def __init__(self, config: DecoderConfig, groups: ParallelGroups, dtype: torch.dtype, device: torch.device):
        self.arena = build.build_arena(config, groups, dtype, device)
        self.decoder = build.build_decoder(config, groups, dtype, device, self.arena)
        self.flat = self.arena.flat
        shard = self.arena.layout.shard(groups.dp_index)
        self._shard = slice(shard.start, shard.stop)
        self.shard = self.flat[self._shard]

    def held(self) -> list[tuple[Box, Tensor]]:
        return list(build.boxes(self.decoder).values())

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def attach_gradients(self, dtype: torch.dtype) -> None:
        self.gradients = Arena(self.arena.layout, dtype, self.flat.device)
        build.attach_gradients(self.decoder, self.gradients)

    @property
    def gradient(self) -> Tensor:
        return self.gradients.flat

    def zero_gradients(self) -> None:
        self.gradients.flat.zero_()

    def reduce_gradients(self, *, sequence_parallel: bool) -> Tensor:
        config, groups = self.decoder.config, self.decoder.groups
        if sequence_parallel and groups.tensor is not None:
            names = own_token_names(config)
            sum_over(groups.tensor, [view for name, view in self.gradients.views().items() if name in names])
        if config.tied_embeddings and groups.tied is not None:
            dist.all_reduce(self.decoder.model.embed_tokens.weight.grad, group=groups.tied)
        reduce_scatter(self.gradients.flat, groups.data)
        return self.gradients.flat[self._shard]

    def publish(self) -> None:
        all_gather(self.flat, self.decoder.groups.data)


def own_token_names(config: DecoderConfig) -> set[str]:
    """Whose gradients are, under sequence parallelism, sums over the tensor-parallel ranks' own tokens."""
    return {spec.name for spec in decoder_parameters(config) if sees_own_tokens(spec)}


def sum_over(group: dist.ProcessGroup, views: Sequence[Tensor]) -> None:
    """Leaves in every view the sum over the group, with one collective for all of them."""
    if views:
        total = torch.cat([view.flatten() for view in views])
        dist.all_reduce(total, group=group)
        for view, part in zip(views, total.split([view.numel() for view in views]), strict=True):
            view.copy_(part.view_as(view))
