"""A rank's part of a model in memory: boxes with their tensors, and the pieces of them that others need."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from realhf.geometry.boxes import Box

HeldBoxes = Mapping[str, list[tuple[Box, Tensor]]]  # parameter name -> its boxes here, each with a view of its shape


def by_name(held: Iterable[tuple[Box, Tensor]]) -> HeldBoxes:
    """`held` for `part` to look in."""
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for box, tensor in held:
        found.setdefault(box.name, []).append((box, tensor))
    return found


def part(held: HeldBoxes, box: Box) -> Tensor:
    """The view of the part `box` of the parameter `box.name`.

    Raises:
        ValueError: no held box contains all of `box`, or its tensor has another shape.
    """
    holder, tensor = holder_of(held, box)
    return tensor if box.shape == holder.shape else tensor[box.slices_in(holder)]


def holder_of(held: HeldBoxes, box: Box) -> tuple[Box, Tensor]:
    """The held box that contains `box`, with its tensor.

    Raises:
        ValueError: as `part`.
    """
    of_name = held.get(box.name, [])
    for holder, tensor in of_name:
        if holder.contains(box) and tuple(tensor.shape) == holder.shape:
            return holder, tensor
    has = [f"{holder} in a tensor of {tuple(tensor.shape)}" for holder, tensor in of_name] or ["nothing of it"]
    raise ValueError(
        f"{box} is asked for, but this rank has {', '.join(has)}; pass the tensors of the layout that was planned for"
    )


def holds(held: HeldBoxes, box: Box) -> bool:
    """Whether one of the held boxes contains all of `box`."""
    return any(holder.contains(box) for holder, _ in held.get(box.name, []))
