"""A rank's parameters and their gradients as data parallelism has them: on every rank, with optimizer states on every
rank (OSDP's data parallelism) or divided (ZeRO-1), or in shards that are gathered for their use (ZeRO-3), each operator
in its mode."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.engine import build
from realhf.engine.arena import view_in
from realhf.engine.pipeline import EndPass, no_end
from realhf.engine.train.divided import DividedParameters
from realhf.engine.train.gathering import GatheredUnit, Gathering
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters, sees_own_tokens
from realhf.geometry.shards import Unit, boxes_in, units
from realhf.models.decoder import Decoder
from realhf.parallel.groups import ParallelGroups

_EMBEDDING, _HEAD = "model.embed_tokens", "model.norm"


class Parameters(Protocol):
    """The interface of a rank's parameters for engine and trainer.

    data_parallel: how `realhf.geometry.shards` divides them.
    decoder: computes with them, within `computing` or `whole`.
    flat: all that this rank keeps, a vector.
    updated: the parts of it that this rank updates, one after the other the boxes of `shard_boxes`.
    gradient: the sums of backward passes, a vector like `flat`, after `attach_gradients`; arbitrary between steps.
    """

    data_parallel: DataParallel
    decoder: Decoder
    flat: Tensor
    updated: list[slice]

    @property
    def gradient(self) -> Tensor: ...

    def held(self) -> list[tuple[Box, Tensor]]:
        """Which parts of global parameters this rank keeps, with local tensors to be read or written in place."""

    def whole(self) -> AbstractContextManager[None]:
        """Inside it all parameters of the decoder are in memory."""

    def computing(self) -> AbstractContextManager[EndPass]:
        """Inside it the decoder's forward passes, and their backward passes, find the parameters that they need. Call
        the function that it yields at the end of each pass of a micro-batch, on all ranks."""

    def attach_gradients(self, dtype: torch.dtype) -> None:
        """From now on backward passes add up gradients of `dtype`, which `reduce_gradients` completes."""

    def zero_gradients(self) -> None:
        """Before the first micro-batch."""

    def reduce_gradients(self, *, sequence_parallel: bool) -> None:
        """After the last micro-batch: `gradient` has the sums over the layout in the parts that are `updated`, to be
        changed in place."""

    def publish(self) -> None:
        """Gathers the `updated` parts after an update, so that every rank has the new parameters."""


class NativeParameters(DividedParameters):
    """The parameters of this project's decoder, each operator in its mode. Implements `Parameters`."""

    def __init__(
        self,
        config: DecoderConfig,
        groups: ParallelGroups,
        dtype: torch.dtype,
        device: torch.device,
        data_parallel: DataParallel,
        *,
        prefetch: bool,
    ):
        self.data_parallel, index = data_parallel, groups.dp_index
        self._groups = groups
        of_rank = units(config, groups.layout, groups.rank, data_parallel)
        super().__init__(of_rank, groups.data, index, dtype, device)
        self.decoder = build.decoder_on(config, groups, self.views())
        self._held = [
            (box, kept.start + at)
            for unit, kept in self.kept.items()
            for box, at in _from_start(unit, unit.kept(index))
        ]
        self.connect(dict(self.decoder.named_parameters()), prefetch=prefetch)
        if self.gathering is not None:
            self._connect_modules(self.gathering)

    def held(self) -> list[tuple[Box, Tensor]]:
        return [(box, view_in(self.flat, box, at)) for box, at in self._held]

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext() if self.gathering is None else self.gathering.whole()

    def computing(self) -> AbstractContextManager[EndPass]:
        return nullcontext(no_end) if self.gathering is None else self.gathering.computing()

    def reduce_gradients(self, *, sequence_parallel: bool) -> None:
        config, groups = self.decoder.config, self._groups
        self.reduce_gathered()
        if sequence_parallel and groups.tensor is not None:
            sum_over(groups.tensor, self._gradients(own_token_names(config)))
        if config.tied_embeddings and groups.tied is not None:
            sum_over(groups.tied, self._gradients([f"{_EMBEDDING}.weight"]))
        self.reduce_others()

    def _gradients(self, names: Collection[str]) -> list[Tensor]:
        """This rank's parts of the gradients of some parameters."""
        return [view_in(self.gradient, box, at) for box, at in self._held if box.name in names]

    def _connect_modules(self, gathering: Gathering) -> None:
        """Lets modules find the units that they need."""
        config = self.decoder.config
        needed: dict[str, list[GatheredUnit]] = {}
        for unit, gathered in self.gathered.items():
            needed.setdefault(unit.module, []).append(gathered)
        embedding = needed.get(_EMBEDDING)
        if embedding and config.tied_embeddings and self._groups.is_last_stage:
            needed[_HEAD] = [*needed.get(_HEAD, []), *embedding]
        for module, of_module in needed.items():
            if module.startswith("lm_head."):
                gathering.connect_weight(self.parameters[f"{module}.weight"], *of_module)
                continue
            # The gradient of an embedding is of the rows alone, and that of a norm comes after that of its head.
            needs_values = module != _HEAD and "embed_" not in module
            gathering.connect(self.decoder.get_submodule(module), of_module, backward=needs_values)


def place_of(at: int, updated: Sequence[slice]) -> int:
    """The place, in all that the rank keeps, of element `at` of the updated parts."""
    for part in updated:
        if at < part.stop - part.start:
            return part.start + at
        at -= part.stop - part.start
    raise AssertionError("every box lies in an updated part")


def _from_start(unit: Unit, elements: range) -> list[tuple[Box, int]]:
    """The boxes of some elements of a unit, each with its offset from the first."""
    return [(box, at - elements.start) for box, at in boxes_in(unit.flat, unit.boxes, elements)]


def own_token_names(config: DecoderConfig) -> set[str]:
    """Whose gradients are, under sequence parallelism, sums over the tensor-parallel ranks' own tokens."""
    return {spec.name for spec in decoder_parameters(config) if sees_own_tokens(spec)}


def sum_over(group: dist.ProcessGroup, views: Sequence[Tensor]) -> None:
    """Leaves in every view the sum over the group, with one collective for all of them."""
    if len(views) == 1:
        [only] = views
        dist.all_reduce(only, group=group)
    elif views:
        total = torch.cat([view.flatten() for view in views])
        dist.all_reduce(total, group=group)
        for view, part in zip(views, total.split([view.numel() for view in views]), strict=True):
            view.copy_(part.view_as(view))
