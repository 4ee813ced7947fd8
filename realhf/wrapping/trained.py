"""A torch module with a mode for each operator, and the optimizer of the parameters that this rank updates."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from realhf.base.errors import UserError
from realhf.engine.train.agreement import Point
from realhf.engine.train.divided import DividedParameters
from realhf.engine.train.optimizer import square_sum
from realhf.geometry.boxes import Box
from realhf.geometry.shards import Unit
from realhf.wrapping.choice import ModulePlan
from realhf.wrapping.measuring import OptimizerFactory
from realhf.wrapping.operators import ModuleOperator, cut, units_in_modes


class OsdpModule:
    """The result of `realhf.osdp`: it is called like the model. All ranks call it, and its methods, together.

    module: the model, with its operators cut in place; for anything but forward passes and steps.
    plan: the modes of its operators, and their predicted costs.
    optimizer: the optimizer of this rank's vectors; for learning-rate schedules, and states of this very plan.
    """

    def __init__(
        self,
        module: nn.Module,
        operators: tuple[ModuleOperator, ...],
        plan: ModulePlan,
        optimizer_factory: OptimizerFactory,
        group: dist.ProcessGroup | None,
        *,
        prefetch: bool,
    ):
        self.module, self.plan = module, plan
        self._num_ranks, index = (1, 0) if group is None else (group.size(), group.rank())
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._keys = list(module.state_dict())
        self._places = _places(module)
        self._first_names = {name: first for first, names in self._places.items() for name in names}
        self._shapes = {name: tuple(p.shape) for name, p in trained.items()}
        dtype, device = next((p.dtype, p.device) for p in trained.values())
        units = units_in_modes(operators, plan.slice_modes, self._num_ranks)
        self._vectors = DividedParameters(units, group, index, dtype, device)
        self._counted = _counted_parts(self._vectors, index)
        for unit in units:
            self._write(unit, trained)
        self._parameters = self._put_in_place(operators)
        del trained  # the memory of all parameters, before gradients take theirs
        self._vectors.connect(self._parameters, prefetch=prefetch)
        self._connect(operators)
        self._vectors.attach_gradients(dtype)
        self._gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._parts = [self._vectors.flat[part].detach() for part in self._vectors.updated]
        self.optimizer = optimizer_factory(list(self._parts))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gathering = self._vectors.gathering
        if gathering is None:
            return self.module(*args, **kwargs)
        with gathering.recording():
            output = self.module(*args, **kwargs)
        gathering.end_pass()
        gathering.end_backward_of(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        return output

    def train(self, mode: bool = True) -> "OsdpModule":
        """As `nn.Module.train`."""
        self.module.train(mode)
        return self

    def eval(self) -> "OsdpModule":
        """As `nn.Module.eval`."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Drops the gradients of all backward passes since the last step; a step has done so itself."""
        self._meet(Point.ZERO_GRAD)
        self._vectors.zero_gradients()

    def step(self, max_norm: float | None = None) -> float | None:
        """One optimizer step with the gradients of all backward passes since the last one, the mean over the ranks as
        `fully_shard` and DDP make it. Gradients are zero afterwards.

        Args:
            max_norm: gradients are scaled so that their Euclidean norm is at most this (`clip_grad_norm_`).

        Returns:
            The norm before that, of the whole model and the same on every rank; None without `max_norm`.

        Raises:
            FloatingPointError: the norm is not finite; the parameters are as before.
            RuntimeError: gradients were dropped or replaced behind its back.
        """
        self._check_gradients()
        self._vectors.reduce_gathered()
        self._release()
        self._vectors.reduce_others()
        gradient, scale, norm = self._vectors.gradient, 1 / self._num_ranks, None
        if max_norm is not None:
            norm = scale * self._norm()
            if not math.isfinite(norm):
                self._vectors.zero_gradients()
                raise FloatingPointError(
                    f"the norm of the gradients is {norm}; the parameters are unchanged. Lower the learning rate, or "
                    "look for values that overflow in the loss"
                )
            scale *= min(1.0, max_norm / (norm + 1e-6))  # the guard is torch's clip_grad_norm_'s
        for part, place in zip(self._parts, self._vectors.updated, strict=True):
            part.grad = gradient[place].mul_(scale)
        self.optimizer.step()
        self._vectors.publish()
        self._vectors.zero_gradients()
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters whole, and the buffers, by the names of the model before it was wrapped: copies in host
        memory, on every rank."""
        self._meet(Point.STATE_DICT)
        self._release()
        found: dict[str, Tensor] = {}
        for unit in self._vectors.kept:
            with self._vectors.whole_unit(unit) as tensors:
                for name, box in unit.boxes.items():
                    shape = self._shapes[box.name]
                    whole = found.setdefault(box.name, torch.empty(shape, dtype=tensors[name].dtype))
                    whole[box.slices_in(_whole(box.name, shape))].copy_(tensors[name])
        here = self.module.state_dict()
        return {
            key: found[self._first_names[key]] if key in self._first_names else here[key].detach().cpu().clone()
            for key in self._keys
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads the result of `state_dict`, or of that of the model before it was wrapped. The optimizer's states stay.

        Raises:
            UserError: names or shapes are not the model's.
        """
        lacking = [key for key in self._keys if key not in state]
        unknown = [key for key in state if key not in self._keys]
        shapes = {key: self._shapes[first] for key, first in self._first_names.items()}
        wrong = [key for key, shape in shapes.items() if key in state and tuple(state[key].shape) != shape]
        if lacking or unknown or wrong:
            raise UserError(
                f"state_dict is not of this model: it lacks {lacking or 'nothing'}, has {unknown or 'nothing'} beside, "
                f"and other shapes of {wrong or 'nothing'}; give one of the same model"
            )
        self._meet(Point.LOAD_STATE_DICT)
        self._release()
        for unit in self._vectors.kept:
            self._write(unit, state)
        here = self.module.state_dict()
        with torch.no_grad():
            for key in self._keys:
                if key not in self._first_names:
                    here[key].copy_(state[key])

    def _check_gradients(self) -> None:
        for name, gradient in self._gradients.items():
            if self._parameters[name].grad is not gradient:
                raise RuntimeError(
                    f"the gradient of {name} was dropped or replaced; use zero_grad() and step() of the result "
                    "of realhf.osdp, not those of the model or the optimizer, and no create_graph"
                )

    def _norm(self) -> float:
        """The norm of the sum of the gradients over the ranks."""
        square = torch.zeros((), dtype=torch.float64, device=self._vectors.flat.device)
        for part in self._counted:
            square += square_sum(self._vectors.gradient[part])
        if self._num_ranks > 1:
            dist.all_reduce(square, group=self._vectors.group)
        return math.sqrt(square.item())

    def _meet(self, point: Point) -> None:
        """Peers may still be in a pass that needs this rank's shards."""
        if self._vectors.gathering is not None:
            self._vectors.gathering.meet(point)

    def _release(self) -> None:
        if self._vectors.gathering is not None:
            self._vectors.gathering.release()

    def _write(self, unit: Unit, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad(), self._vectors.written_unit(unit) as tensors:
            for name, box in unit.boxes.items():
                tensors[name].copy_(values[box.name][box.slices_in(_whole(box.name, self._shapes[box.name]))])

    def _put_in_place(self, operators: tuple[ModuleOperator, ...]) -> dict[str, nn.Parameter]:
        """Cuts modules and gives them their parts of the vectors; returns these by the name that they have there."""
        for op in operators:
            slices = op.slices(self.plan.slice_modes[op.name])
            if len(slices) > 1:
                columns = [box.shape[1] for part in slices for box in part.boxes.values()]
                cut(self.module.get_submodule(op.name), columns)
        parameters = {name: nn.Parameter(view) for name, view in self._vectors.views().items()}
        for name, parameter in parameters.items():
            for place in self._places.get(name, [name]):
                owner, _, leaf = place.rpartition(".")
                setattr(self.module.get_submodule(owner), leaf, parameter)
        return parameters

    def _connect(self, operators: tuple[ModuleOperator, ...]) -> None:
        """Lets modules find the units that they need."""
        users = {op.name: op.modules for op in operators}
        for unit, gathered in self._vectors.gathered.items():
            assert self._vectors.gathering is not None
            for path in users.get(unit.name, (unit.module,)):
                part = self.module.get_submodule(path)
                # The gradient of an embedding is of the rows alone.
                self._vectors.gathering.connect(part, [gathered], backward=isinstance(part, nn.Linear))


def _counted_parts(vectors: DividedParameters, index: int) -> list[slice]:
    """The parts of all that rank `index` keeps whose norm it counts: each element on one rank."""
    parts = []
    for unit, kept in vectors.kept.items():
        if unit.mode != "replicated" or index == 0:
            first = kept.start - unit.kept(index).start
            updated = unit.updated(index)
            parts.append(slice(first + updated.start, first + updated.stop))
    return parts


def _places(module: nn.Module) -> dict[str, list[str]]:
    """By the name of each trained parameter, all names that it has."""
    first_names: dict[int, str] = {}
    places: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            places.setdefault(first_names.setdefault(id(parameter), name), []).append(name)
    return places


def _whole(name: str, shape: tuple[int, ...]) -> Box:
    return Box(name, (0,) * len(shape), shape)
