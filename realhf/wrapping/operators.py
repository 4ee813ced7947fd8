"""The operators of a torch module: every linear and embedding by itself, all other parameters together."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn

from realhf.architecture.compute import MODES, Mode
from realhf.geometry.boxes import Box
from realhf.geometry.shards import FlatLayout, OperatorSlice, Unit, matrix_slices, units_of_slices
from realhf.parallel.tensor import sum_of_products
from realhf.planning.model.osdp.problem import MOST_SLICES

Kind = Literal["linear", "embedding", "others"]
OTHERS: Literal["others"] = "others"


@dataclass(frozen=True)
class ModuleOperator:
    """Parameters of a module that have a mode of their own.

    name: the path of the linear or embedding, of the first one where several have one weight; "others" for all
        parameters that are no weight of these: norms, biases, those of any further module.
    shapes: of its parameters, by the name that they have in the module.
    modules: the linears and embeddings that use it, by path.
    """

    name: str
    kind: Kind
    shapes: Mapping[str, tuple[int, ...]]
    modules: tuple[str, ...] = ()

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Those that it can be in. Others are used everywhere, so they are never gathered."""
        return MODES if self.kind != OTHERS else ("replicated", "zero1")

    @property
    def most_slices(self) -> int:
        """A weight that several modules use stays whole."""
        if self.kind == OTHERS or len(self.modules) > 1:
            return 1
        (shape,) = self.shapes.values()
        return min(shape[1], MOST_SLICES)

    @property
    def elements(self) -> int:
        return sum(box.size for box in self.boxes.values())

    @property
    def boxes(self) -> dict[str, Box]:
        """Its parameters, whole."""
        return {name: Box(name, (0,) * len(shape), shape) for name, shape in self.shapes.items()}

    def slices(self, modes: Sequence[Mode]) -> list[OperatorSlice]:
        """Its slices along the columns, an embedding's along its embedding dimension, as `matrix_slices` names them."""
        if len(modes) == 1:
            return [OperatorSlice(self.name, modes[0], self.boxes, self.modules[0] if self.modules else "")]
        (box,) = self.boxes.values()
        return matrix_slices(self.name, box, modes)


def operators_of(module: nn.Module, used_elsewhere: Container[str] = ()) -> tuple[ModuleOperator, ...]:
    """The operators of all parameters that are trained. `used_elsewhere` names those of `named_parameters` that others
    than their own linear or embedding read, so that they must always be there."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    users: dict[int, list[str]] = {}
    for path, part in module.named_modules():
        if path and is_operator(part):
            users.setdefault(id(part.weight), []).append(path)
    num_places = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    found, others = [], {}
    for name, parameter in trained.items():
        paths = tuple(users.get(id(parameter), ()))
        if not paths or name in used_elsewhere or len(paths) != num_places[id(parameter)]:
            others[name] = tuple(parameter.shape)
            continue
        kind: Kind = "linear" if type(module.get_submodule(paths[0])) is nn.Linear else "embedding"
        found.append(ModuleOperator(paths[0], kind, {name: tuple(parameter.shape)}, paths))
    if others:
        found.append(ModuleOperator(OTHERS, OTHERS, others))
    return tuple(found)


def is_operator(part: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
    """Whether its weight is read by its own forward alone, and can be cut into columns."""
    if not isinstance(part._parameters.get("weight"), nn.Parameter):  # made of others
        return False
    if type(part) is nn.Embedding:  # with a largest norm, a forward pass changes the weight
        return part.max_norm is None and not part.sparse
    return type(part) is nn.Linear


def units_in_modes(
    operators: Sequence[ModuleOperator], modes: Mapping[str, Sequence[Mode]], num_ranks: int
) -> tuple[Unit, ...]:
    """The vectors that `num_ranks` ranks divide; `modes` has those of every operator's slices."""

    def unit(name: str, mode: Mode, boxes: Mapping[str, Box], module: str) -> Unit:
        return Unit(name, mode, FlatLayout({key: box.shape for key, box in boxes.items()}, num_ranks), boxes, module)

    return units_of_slices((part for op in operators for part in op.slices(modes[op.name])), unit)


class SlicedLinear(nn.Linear):
    """A linear layer whose weight is cut along its inputs: each of `slices` is one with some of the columns."""

    slices: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        product = sum_of_products(self.slices, x)
        return product if self.bias is None else product + self.bias


class SlicedEmbedding(nn.Embedding):
    """An embedding whose weight is cut along its embedding dimension: each of `slices` is one with some columns."""

    slices: nn.ModuleList

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cat([part(tokens) for part in self.slices], dim=-1)


def cut(part: nn.Module, columns: Sequence[int]) -> None:
    """Cuts a linear or an embedding in place: references to it stay good. Its slices have no weights yet."""
    with torch.device("meta"):
        if isinstance(part, nn.Linear):
            slices = nn.ModuleList(nn.Linear(count, part.out_features, bias=False) for count in columns)
            part.__class__ = SlicedLinear
        else:
            assert isinstance(part, nn.Embedding)
            slices = nn.ModuleList(
                nn.Embedding(
                    part.num_embeddings, count, padding_idx=part.padding_idx, scale_grad_by_freq=part.scale_grad_by_freq
                )
                for count in columns
            )
            part.__class__ = SlicedEmbedding
    part.register_parameter("weight", None)
    part.slices = slices
