"""Units of parameters that have memory only while they are used: a rank keeps a shard of each, and gathers it for its
use (ZeRO-3: Rajbhandari et al., 2020, section 5.3; the order of gathering after Zhao et al., 2023, sections 3 and 4).

The parameters of a unit are views of a vector that has memory only while the unit is gathered: neither the modules nor
autograd need know. The caller chooses the units: layers, operators or slices of operators.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from realhf.engine.arena import Arena
from realhf.engine.residency.offload import allocate, free
from realhf.engine.train.agreement import Agreement, Operation, Point
from realhf.geometry.shards import FlatLayout
from realhf.parallel.collectives import all_gather_integers, reduce_scatter, start_all_gather
from realhf.parallel.gradients import give_on_use
from realhf.parallel.groups import GroupReference
from realhf.parallel.views import storage_id


class GatheredUnit:
    """Parameters that are gathered, freed and reduced together."""

    def __init__(self, layout: FlatLayout, shard: Tensor):
        """`shard`: this rank's part of the unit, a view."""
        self.shard = shard
        self.arena = Arena(layout, shard.dtype, shard.device)
        self.views = self.arena.views()  # made while there is memory, and good for all that comes later
        free(self.arena.flat)
        self.parameters: dict[str, nn.Parameter] = {}
        self.gradient: Tensor | None = None  # the shard's
        self._arriving: list[dist.Work] = []

    def start_gather(self, group: dist.ProcessGroup) -> None:
        allocate(self.arena.flat)
        # Past autograd's version counter: the saved values of the unit are the same again.
        flat = self.arena.flat.data
        flat.chunk(group.size())[group.rank()].copy_(self.shard)
        self._arriving = start_all_gather(flat, group)

    def wait(self) -> None:
        while self._arriving:
            self._arriving.pop().wait()

    def free(self) -> None:
        self.wait()
        free(self.arena.flat)

    def reduce_gradients(self, group: dist.ProcessGroup) -> None:
        """Adds the sum over the group to the shard's gradient, and frees the parameters' own gradients."""
        assert self.gradient is not None
        self.gradient.add_(reduce_scatter(self._whole_gradient(self.gradient), group))

    def _whole_gradient(self, like: Tensor) -> Tensor:
        """The gradients of all parameters as one vector, taken from them; without a copy where one has no padding."""
        first, *others = self.parameters.values()
        if not others and first.grad is not None and first.grad.numel() == self.arena.layout.size:
            only, first.grad = first.grad.flatten(), None
            return only
        whole = Arena(self.arena.layout, like.dtype, like.device)
        for name, view in whole.views().items():
            gradient = self.parameters[name].grad
            if gradient is not None:  # an expert may have seen no token
                view.copy_(gradient)
                self.parameters[name].grad = None
        return whole.flat


# The two units that were used last, and whether a forward pass with gradients asked for the second one.
_History = tuple[GatheredUnit | None, GatheredUnit | None, bool]


class Gathering:
    """The units of one rank, in the order of their use.

    A unit is gathered by the forward pass of its first module, and again by the first of its saved tensors that the
    backward pass asks for, or by the forward pass that is computed again. With `prefetch` the next one is started with
    it: the one that followed the last time, so that nothing is gathered in vain. A unit's gradients are reduced when
    the backward pass has come to the next unit.

    The ranks of a data-parallel group agree on every gather and reduction before it begins, so they need not use the
    same units in the same order. A rank lends its shard, and memory for as long, where a peer alone needs a unit; it
    adds zeros, or the gradients that it has so far, where a peer alone reduces. For that each pass ends with `end_pass`
    on all ranks.
    """

    def __init__(self, units: Mapping[str, GatheredUnit], group: dist.ProcessGroup, *, prefetch: bool):
        """`units` by name, in one order on all ranks."""
        self._reference, self._prefetch = GroupReference(group), prefetch
        self._in_order = list(units.values())
        self._numbers = {unit: number for number, unit in enumerate(self._in_order)}
        self._agreement = Agreement(list(units), self._exchange, self._take_part)
        self._ending: int | None = None  # the backward pass that will wait at its end
        self._history: _History = (None, None, False)
        self._next: dict[_History, GatheredUnit | None] = {}  # the unit that followed the last time
        self._in_use: list[GatheredUnit] = []
        self._gathered: dict[GatheredUnit, None] = {}  # the oldest first
        self._by_storage = {storage_id(unit.arena.flat): unit for unit in self._in_order}
        self._with_gradients: dict[GatheredUnit, None] = {}  # in the order in which the backward pass came to them

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._reference()
        assert group is not None
        return group

    def connect(self, module: nn.Module, needed: Sequence[GatheredUnit], *, backward: bool) -> None:
        """From now on the units are there when a forward pass of `module` begins, and where its gradients need them
        (`backward`), when its backward pass does. Gradients of others are reduced before it makes its own."""

        def before_backward(_: nn.Module, __: Any, output: Any) -> None:
            # Recomputation runs the same operations again, and its saved tensors do not come through `_unpack`.
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(lambda _: use(needed))

        use = self._use if backward else self._reduce_others
        module.register_forward_pre_hook(lambda *_: self._use(needed))
        module.register_forward_hook(before_backward)

    def connect_weight(self, parameter: nn.Parameter, unit: GatheredUnit) -> None:
        """From now on the unit is there when an operation asks for its only parameter (`realhf.parallel.gradients`)."""

        def sink() -> Tensor:
            assert unit.gradient is not None
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=unit.gradient.dtype)
            self._with_gradients.setdefault(unit, None)
            return parameter.grad

        give_on_use(parameter, lambda: self._use([unit]), sink)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within it all units have their memory."""
        self._agreement.meet(Point.WHOLE)
        with self._together(self._in_order):
            yield

    @contextmanager
    def alone(self, unit: GatheredUnit) -> Iterator[None]:
        """Within it a unit has its memory, and no other has; all ranks ask for the same one."""
        with self._together([unit]):
            yield

    @contextmanager
    def computing(self) -> Iterator[Callable[[], None]]:
        """Inside it forward passes, and their backward passes, find the parameters that they need. Call the function
        that it yields at the end of each pass."""
        try:
            with self.recording():
                yield self.end_pass
        finally:
            self.release()

    def recording(self) -> AbstractContextManager[object]:
        """Within it forward passes find the parameters that they need, and so do backward passes of them at any time
        until `release`."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def attach_gradients(self, gradients: Mapping[GatheredUnit, Tensor]) -> None:
        """From now on backward passes leave the gradients of each unit's shard in its vector."""
        for unit, gradient in gradients.items():
            unit.gradient = gradient
            for parameter in unit.parameters.values():
                parameter.requires_grad_(True)
                parameter.grad_dtype = gradient.dtype
                parameter.register_post_accumulate_grad_hook(
                    lambda _, unit=unit: self._with_gradients.setdefault(unit, None)
                )

    def forget_gradients(self) -> None:
        """Drops the leftovers of a backward pass that failed."""
        for unit in self._in_order:
            for parameter in unit.parameters.values():
                parameter.grad = None
        self._with_gradients.clear()

    def reduce(self, but: Sequence[GatheredUnit] = ()) -> None:
        """Sums the gradients that are there over the group, except those of units that may get more."""
        self._agreement.perform(self._reductions(but))

    def end_pass(self) -> None:
        """Returns when all ranks have ended their pass."""
        # A forward pass within a backward pass is one that not all ranks may have.
        self.meet(Point.PASS if _backward_pass() is None else Point.BACKWARD)

    def end_backward_of(self, outputs: Iterable[Tensor]) -> None:
        """Has a backward pass that comes to any of `outputs` wait for the other ranks at its end."""

        def come_to(_: Tensor) -> None:
            running = _backward_pass()
            if running != self._ending:
                self._ending = running
                torch.autograd.Variable._execution_engine.queue_callback(partial(self.meet, Point.BACKWARD))

        for output in outputs:
            if output.requires_grad:
                output.register_hook(come_to)

    def meet(self, point: Point) -> None:
        """Returns when no rank needs this one before the next operation."""
        with _disable_current_modes():  # as in `_use`
            self._agreement.meet(point)

    def _use(self, needed: Sequence[GatheredUnit]) -> None:
        """Returns when the parameters of the units may be read."""
        if all(unit in self._in_use for unit in needed):
            return
        with _disable_current_modes():  # selective recomputation would take these operations for the layer's
            self._gather(needed)

    def _reduce_others(self, needed: Sequence[GatheredUnit]) -> None:
        with _disable_current_modes():  # as above
            self.reduce(but=needed)

    def _gather(self, needed: Sequence[GatheredUnit]) -> None:
        """Gathers the units and starts the following one; reduces gradients that are there."""
        self._next[self._history] = needed[0]
        self._history = (self._history[1], needed[0], torch.is_grad_enabled())
        self._in_use = list(needed)
        self._at_most = max(len(needed), 2 if self._prefetch else 1)  # units that may have memory
        wanted = list(needed)
        following = self._next.get(self._history)
        if len(needed) < self._at_most and following is not None:
            wanted.append(following)
        self._agreement.perform([*self._reductions(but=needed), *self._gathers(wanted)])
        for unit in needed:
            unit.wait()

    @contextmanager
    def _together(self, units: Sequence[GatheredUnit]) -> Iterator[None]:
        """Within it exactly these units have their memory."""
        try:
            self._in_use, self._at_most = list(units), len(units)
            self._agreement.perform(self._gathers(units))
            for unit in units:
                unit.wait()
            yield
        finally:
            self.release()

    def _gathers(self, units: Sequence[GatheredUnit]) -> list[Operation]:
        return [Operation("gather", self._numbers[unit]) for unit in units if unit not in self._gathered]

    def _reductions(self, but: Sequence[GatheredUnit] = ()) -> list[Operation]:
        return [Operation("reduce", self._numbers[unit]) for unit in self._with_gradients if unit not in but]

    def _exchange(self, numbers: list[int]) -> list[list[int]]:
        return all_gather_integers(numbers, self._group, self._in_order[0].shard.device)

    def _take_part(self, operation: Operation, is_own: bool) -> None:
        """Gathers or reduces a unit, also where a peer alone asked for it."""
        unit = self._in_order[operation.unit]
        if operation.kind == "reduce":
            self._with_gradients.pop(unit, None)
            unit.reduce_gradients(self._group)
        elif is_own:
            self._start(unit)
        else:
            self._lend(unit)

    def _start(self, unit: GatheredUnit) -> None:
        """Begins to gather a unit that is not there, in the place of the one that has been there longest."""
        while len(self._gathered) >= self._at_most:
            oldest = next(unit for unit in self._gathered if unit not in self._in_use)
            del self._gathered[oldest]
            oldest.free()
        unit.start_gather(self._group)
        self._gathered[unit] = None

    def _lend(self, unit: GatheredUnit) -> None:
        """Takes part in a gather that this rank does not need; a unit that is already gathered gets the same values."""
        unit.wait()
        unit.start_gather(self._group)
        unit.wait()
        if unit not in self._gathered:
            unit.free()

    def release(self) -> None:
        """Frees all units: the shards may be written, and are gathered anew for their next use."""
        for unit in self._gathered:
            unit.free()
        self._gathered.clear()
        self._next[self._history] = None
        self._history, self._in_use = (None, None, False), []

    def _pack(self, tensor: Tensor) -> Any:
        """The form in which autograd keeps a tensor for the backward pass: for a parameter, with the unit to gather
        before it is read."""
        unit = self._by_storage.get(storage_id(tensor))
        return tensor if unit is None else (unit, tensor.detach())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        unit, tensor = packed
        self._use([unit])
        return tensor


def _backward_pass() -> int | None:
    """A number of the backward pass that runs now."""
    number: int = torch._C._current_graph_task_id()
    return None if number < 0 else number
