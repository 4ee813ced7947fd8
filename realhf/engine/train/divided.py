"""Parameters as vectors, each unit in its mode: on every rank, with optimizer states on every rank (OSDP's data
parallelism) or divided (ZeRO-1), or in shards that are gathered for their use (ZeRO-3).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realhf.engine.arena import views_in
from realhf.engine.residency.offload import allocate
from realhf.engine.train.agreement import Point
from realhf.engine.train.gathering import GatheredUnit, Gathering
from realhf.geometry.shards import Unit
from realhf.parallel.collectives import all_gather, all_reduce, reduce_scatter
from realhf.parallel.gradients import let_add_to_grad
from realhf.parallel.groups import GroupReference


class DividedParameters:
    """The vectors of one rank of a data-parallel group; it knows units and modules, nothing of decoders.

    Parameters and gradients are vectors in one order: replicated units, other units that are never gathered, shards.

    flat: all that this rank keeps of the parameters.
    kept: by unit, where it lies in `flat`.
    updated: the parts of `flat` that this rank updates.
    gathered: the units that are sharded.
    parameters: the modules', by name, after `connect`.
    gathering: when these have memory; None where there are none, and before `connect`.
    gradient: the sums of backward passes, a vector like `flat`, after `attach_gradients`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        group: dist.ProcessGroup | None,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._group = GroupReference(group)
        self.kept: dict[Unit, slice] = {}
        self.updated: list[slice] = []
        self.gathering: Gathering | None = None
        end = 0
        for unit in units:
            kept, updated = unit.kept(index), unit.updated(index)
            self.kept[unit] = slice(end, end + len(kept))
            self._add_updated(slice(end + updated.start - kept.start, end + updated.stop - kept.start))
            end += len(kept)
        self.flat = torch.zeros(end, dtype=dtype, device=device)
        self.gathered = {
            unit: GatheredUnit(unit.flat, self.flat[kept]) for unit, kept in self.kept.items() if unit.mode == "sharded"
        }

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group()

    def views(self) -> dict[str, Tensor]:
        """Every tensor of the units by name; those of sharded units have memory only while these are gathered."""
        return {name: view for unit in self.kept for name, view in self._views(unit).items()}

    def connect(self, parameters: Mapping[str, nn.Parameter], *, prefetch: bool) -> None:
        """Takes the modules' parameters, made of `views`, by name. The caller then connects the modules with
        `gathering`."""
        self.parameters = parameters
        for unit, gathered in self.gathered.items():
            gathered.parameters = {name: parameters[name] for name in unit.flat.shapes}
        if self.gathered:
            assert self.group is not None, "one data-parallel rank has nothing to gather"
            units = {f"{unit.name} [{unit.flat.size}]": gathered for unit, gathered in self.gathered.items()}
            self.gathering = Gathering(units, self.group, prefetch=prefetch)

    @contextmanager
    def whole_unit(self, unit: Unit) -> Iterator[dict[str, Tensor]]:
        """Within it all of a unit's tensors may be read."""
        if unit not in self.gathered:
            yield self._views(unit)
            return
        assert self.gathering is not None, "connected before"
        gathered = self.gathered[unit]
        with self.gathering.alone(gathered):
            yield gathered.views

    @contextmanager
    def written_unit(self, unit: Unit) -> Iterator[dict[str, Tensor]]:
        """Within it all of a unit's tensors are to be written, the same on every rank; this rank keeps its part."""
        if unit not in self.gathered:
            yield self._views(unit)
            return
        assert self.group is not None
        gathered = self.gathered[unit]
        try:
            allocate(gathered.arena.flat)
            gathered.arena.flat.zero_()  # the padding too
            yield gathered.views
            gathered.shard.copy_(gathered.arena.flat.chunk(self.group.size())[self.group.rank()])
        finally:
            gathered.free()

    def attach_gradients(self, dtype: torch.dtype) -> None:
        """From now on backward passes add up gradients of `dtype`, which `reduce_gathered` and `reduce_others`
        complete."""
        self.gradient = torch.zeros_like(self.flat, dtype=dtype)
        for unit, kept in self.kept.items():
            if unit.mode != "sharded":
                for name, view in views_in(self.gradient[kept], unit.flat).items():
                    parameter = self.parameters[name]
                    parameter.requires_grad_(True)
                    parameter.grad_dtype, parameter.grad = dtype, view
                    let_add_to_grad(parameter)
        if self.gathering is not None:
            self.gathering.attach_gradients(
                {gathered: self.gradient[self.kept[unit]] for unit, gathered in self.gathered.items()}
            )

    def zero_gradients(self) -> None:
        """Before the first micro-batch."""
        self.gradient.zero_()
        if self.gathering is not None:
            self.gathering.forget_gradients()

    def reduce_gathered(self) -> None:
        """After the last micro-batch: completes the gradients of sharded units."""
        if self.gathering is not None:
            self.gathering.reduce()
            self.gathering.meet(Point.STEP)

    def reduce_others(self) -> None:
        """Completes the gradients of all else: `gradient` then has sums over the group in the parts `updated`."""
        for unit, kept in self.kept.items():
            if unit.mode == "replicated":
                all_reduce(self.gradient[kept], self.group)
            elif unit.mode == "zero1":
                reduce_scatter(self.gradient[kept], self.group)

    def publish(self) -> None:
        """Gathers the updated parts of ZeRO-1 units, so that every rank has the new parameters."""
        for unit, kept in self.kept.items():
            if unit.mode == "zero1":
                all_gather(self.flat[kept], self.group)

    def _views(self, unit: Unit) -> dict[str, Tensor]:
        if unit in self.gathered:
            return self.gathered[unit].views
        return views_in(self.flat[self.kept[unit]], unit.flat)

    def _add_updated(self, part: slice) -> None:
        """Adds a part that this rank updates; adjacent parts become one."""
        if self.updated and self.updated[-1].stop == part.start:
            part = slice(self.updated.pop().start, part.stop)
        self.updated.append(part)
