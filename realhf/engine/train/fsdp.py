"""Fully sharded data parallelism: a rank keeps a shard of every unit of parameters, and gathers a unit for its use
(ZeRO-3: Rajbhandari et al., 2020, section 5.3; the order of gathering after Zhao et al., 2023, sections 3 and 4).

A unit is an embedding, a layer, or the final norm with the head (`realhf.geometry.shards.units`). Its parameters are
views of a vector that has memory only while the unit is gathered: neither the decoder nor autograd need know.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.engine.arena import Arena
from realhf.engine.build import decoder_on
from realhf.engine.train.data_parallel import own_token_names, sum_over
from realhf.geometry.boxes import Box
from realhf.geometry.shards import FlatLayout, shard_boxes, units
from realhf.parallel.collectives import reduce_scatter, start_all_gather
from realhf.parallel.groups import ParallelGroups

# Units with memory at a time: the one that computes and the one that comes next (or a tied embedding and the norm).
GATHERED_UNITS = 2
_EMBEDDING, _HEAD = "model.embed_tokens", "model.norm"


class _Unit:
    """Parameters that are gathered, freed and reduced together."""

    def __init__(self, place: int, layout: FlatLayout, shard: Tensor):
        """`place`: in the order of use; `shard`: what this rank keeps of the unit, a view."""
        self.place, self.shard = place, shard
        self.arena = Arena(layout, shard.dtype, shard.device)
        self.views = self.arena.views()  # made while there is memory, and good for all that comes later
        self.arena.free()
        self.parameters: dict[str, nn.Parameter] = {}
        self.gradient: Tensor | None = None  # of the shard
        self._arriving: list[dist.Work] = []

    def start_gather(self, group: dist.ProcessGroup) -> None:
        self.arena.allocate()
        # Past autograd's version counter: what it saved of the unit is the same again.
        flat = self.arena.flat.data
        flat.chunk(group.size())[group.rank()].copy_(self.shard)
        self._arriving = start_all_gather(flat, group)

    def wait(self) -> None:
        while self._arriving:
            self._arriving.pop().wait()

    def free(self) -> None:
        self.wait()
        self.arena.free()

    def reduce_gradients(self, group: dist.ProcessGroup) -> None:
        """Adds the sum over the group to the shard's gradient, and frees what the parameters have."""
        assert self.gradient is not None
        whole = Arena(self.arena.layout, self.gradient.dtype, self.gradient.device)
        for name, view in whole.views().items():
            gradient = self.parameters[name].grad
            if gradient is not None:  # an expert may have seen no token
                view.copy_(gradient)
                self.parameters[name].grad = None
        self.gradient.add_(reduce_scatter(whole.flat, group))


class ShardedParameters:
    """Every data-parallel rank keeps its shard of each unit. Implements `realhf.engine.train.data_parallel.Parameters`.

    A unit is gathered by the forward pass of its first module, and again by the first of its saved tensors that the
    backward pass asks for, or by the forward pass that is computed again. With it the next one in the same
    direction is started. A unit's gradients are reduced when the backward pass has come to the next unit. All ranks of
    a data-parallel group run the same schedule, hence gather and reduce in the same order.
    """

    data_parallel: DataParallel = "fsdp"

    def __init__(self, config: DecoderConfig, groups: ParallelGroups, dtype: torch.dtype, device: torch.device):
        assert groups.data is not None, "one data-parallel rank has nothing to divide: ReplicatedParameters"
        self._group, dp = groups.data, groups.layout.strategy.dp
        layouts = units(config, groups.layout, groups.rank, self.data_parallel)
        self.flat = self.shard = torch.zeros(sum(u.size // dp for u in layouts.values()), dtype=dtype, device=device)
        shards = self._by_unit(self.shard, layouts)
        self._units = {name: _Unit(place, layout, shards[name]) for place, (name, layout) in enumerate(layouts.items())}
        self._in_order = list(self._units.values())
        views = {name: view for unit in self._in_order for name, view in unit.views.items()}
        self.decoder = decoder_on(config, groups, views)
        self._boxes = shard_boxes(config, groups.layout, groups.rank, self.data_parallel)
        self._place = -1  # of the unit used last
        self._in_use: list[_Unit] = []
        self._gathered: dict[int, _Unit] = {}  # by the address of its memory, the oldest first
        self._with_gradients: dict[_Unit, None] = {}  # in the order in which the backward pass came to them
        named = dict(self.decoder.named_parameters())
        for name, unit in self._units.items():
            unit.parameters = {parameter: named[parameter] for parameter in unit.arena.layout.shapes}
            needed = [unit]
            if name == _HEAD and config.tied_embeddings:
                needed.append(self._units[_EMBEDDING])
            self.decoder.get_submodule(name).register_forward_pre_hook(lambda *_, needed=needed: self._use(needed))

    def held(self) -> list[tuple[Box, Tensor]]:
        return [(box, self.shard[at : at + box.size].view(box.shape)) for box, at in self._boxes]

    @contextmanager
    def whole(self) -> Iterator[None]:
        try:
            for unit in self._in_order:
                self._start(unit, at_most=len(self._in_order))
            for unit in self._in_order:
                unit.wait()
            self._in_use = self._in_order
            yield
        finally:
            self._release()

    @contextmanager
    def computing(self) -> Iterator[None]:
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._release()

    def attach_gradients(self, dtype: torch.dtype) -> None:
        self._gradient = torch.zeros_like(self.shard, dtype=dtype)
        parts = self._by_unit(self._gradient, {name: unit.arena.layout for name, unit in self._units.items()})
        for name, unit in self._units.items():
            unit.gradient = parts[name]
            for parameter in unit.parameters.values():
                parameter.requires_grad_(True)
                parameter.grad_dtype = dtype
                parameter.register_post_accumulate_grad_hook(
                    lambda _, unit=unit: self._with_gradients.setdefault(unit, None)
                )

    @property
    def gradient(self) -> Tensor:
        return self._gradient

    def zero_gradients(self) -> None:
        self._gradient.zero_()
        for parameter in self.decoder.parameters():
            parameter.grad = None  # of a step that failed
        self._with_gradients.clear()

    def reduce_gradients(self, *, sequence_parallel: bool) -> Tensor:
        config, groups = self.decoder.config, self.decoder.groups
        self._reduce(but=[])
        if sequence_parallel and groups.tensor is not None:
            names = own_token_names(config)
            own = [self._gradient[at : at + box.size] for box, at in self._boxes if box.name in names]
            sum_over(groups.tensor, own)
        if config.tied_embeddings and groups.tied is not None:
            dist.all_reduce(self._units[_EMBEDDING].gradient, group=groups.tied)
        return self._gradient

    def publish(self) -> None:
        """Nothing is gathered between steps."""

    def _by_unit(self, vector: Tensor, layouts: Mapping[str, FlatLayout]) -> dict[str, Tensor]:
        sizes = [layout.size // self._group.size() for layout in layouts.values()]
        return dict(zip(layouts, vector.split(sizes), strict=True))

    def _use(self, needed: Sequence[_Unit]) -> None:
        """Returns when the parameters of the units may be read."""
        if all(unit in self._in_use for unit in needed):
            return
        with _disable_current_modes():  # selective recomputation would take these operations for the layer's
            self._gather(needed)

    def _gather(self, needed: Sequence[_Unit]) -> None:
        """Gathers the units and starts the following one; reduces gradients that are there."""
        self._reduce(but=needed)
        step = 1 if needed[0].place > self._place else -1
        self._place, self._in_use = needed[0].place, list(needed)
        for unit in needed:
            self._start(unit)
        for unit in needed:
            unit.wait()
        following = self._place + step
        if len(needed) < GATHERED_UNITS and 0 <= following < len(self._in_order):
            self._start(self._in_order[following])

    def _start(self, unit: _Unit, at_most: int = GATHERED_UNITS) -> None:
        """Begins to gather a unit that is not there, in the place of the one that has been there longest."""
        if unit in self._gathered.values():
            return
        while len(self._gathered) >= at_most:
            address, oldest = next((a, u) for a, u in self._gathered.items() if u not in self._in_use)
            del self._gathered[address]
            oldest.free()
        unit.start_gather(self._group)
        self._gathered[unit.arena.flat.untyped_storage().data_ptr()] = unit

    def _release(self) -> None:
        for unit in self._gathered.values():
            unit.free()
        self._gathered.clear()
        self._place, self._in_use = -1, []

    def _reduce(self, but: Sequence[_Unit]) -> None:
        for unit in [unit for unit in self._with_gradients if unit not in but]:
            del self._with_gradients[unit]
            unit.reduce_gradients(self._group)

    def _pack(self, tensor: Tensor) -> Any:
        """What autograd keeps for the backward pass: of a parameter, which unit to gather before it is read."""
        unit = self._gathered.get(tensor.untyped_storage().data_ptr())
        return tensor if unit is None else (unit, tensor.detach())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        unit, tensor = packed
        self._use([unit])
        return tensor
