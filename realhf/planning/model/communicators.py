"""Which communicators a call needs in a layout, and when two layouts share one.

Process groups are made at the start, in one order on all ranks; NCCL makes the communicator of a group, with its
buffers on the device, when it is first used (`realhf.parallel.groups`). Groups of the same ranks are one. Stages send
to each other one by one, for which NCCL makes a communicator of each pair.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import Layout, ParallelStrategy

# "next" and "previous": a stage's pairs with its neighbours in the ring of all stages. Of two stages both are one.
Axis = Literal["tensor", "data", "next", "previous", "tied", "model"]
PAIRS: tuple[Axis, ...] = ("next", "previous")
Digits = tuple[tuple[int, int], ...]  # (stride, count), strides ascending
Key = tuple[str, Digits, int]

# Labels of the communicators of all devices: of the world, and of moves of parameters where there are any (also in
# csrc/search/problem.h). Samples travel through host memory.
WORLD, MOVES = 0, 1


def axes_used(call: ModelFunctionCallDef, strategy: ParallelStrategy, *, gathers_parameters: bool) -> tuple[Axis, ...]:
    """The axes of more than one rank along which `call` communicates under `strategy`; `gathers_parameters`: it finds
    them divided over the data-parallel ranks.

    Of more than two stages this is an upper bound: only generation and model chunks close the ring, so that otherwise
    the first and the last stage have one pair; and the stages between them have no part in "tied".
    """
    used: dict[Axis, bool] = {
        "tensor": strategy.tp > 1,
        "next": strategy.pp > 1,
        "previous": strategy.pp > 2,
        "data": strategy.dp > 1 and (call.trains or gathers_parameters),
        "model": strategy.size > 1 and call.trains,  # sums the norm of gradients
        "tied": strategy.pp > 1 and call.trains and call.config.tied_embeddings,
    }
    return tuple(axis for axis, is_used in used.items() if is_used)


def group_key(layout: Layout, axis: Axis) -> Key:
    """Two layouts of equal keys have the same group on every device that is in both.

    The ranks of a group differ in digits, (stride, count), of their place in the mesh; where the mesh begins matters up
    to multiples of the largest stride x count.
    """
    digits = _digits(layout.strategy, axis)
    stride, count = digits[-1]
    return axis if axis in PAIRS else "", digits, layout.mesh.first % (stride * count)


class CommunicatorLabels:
    """Numbers communicators: equal labels of two options are one communicator on the devices that both have, and all
    devices have the labels `common`."""

    def __init__(self, common: Iterable[int]):
        self._common = tuple(sorted(common))
        self._labels: dict[Key, int] = {}

    def of(self, keys: Iterable[Key]) -> tuple[int, ...]:
        """The labels of communicators, ascending, behind those that every device has."""
        first = MOVES + 1
        own = {self._labels.setdefault(key, first + len(self._labels)) for key in keys}
        return (*self._common, *sorted(own))


def of_all_devices(num_devices: int, *, moves: bool) -> tuple[int, ...]:
    """Labels of the communicators that every device has under any plan; `moves`: parameters move in every plan."""
    if num_devices == 1:
        return ()
    return (WORLD, MOVES) if moves else (WORLD,)


@lru_cache(maxsize=65536)
def _digits(s: ParallelStrategy, axis: Axis) -> Digits:
    """Which digits of a rank's place in the mesh differ within a group (see `Layout.device`): without those of one
    value, and with neighbours as one digit."""
    places, stages = s.micro_dp
    replicas, ring = s.dp // stages, ((s.dp * s.tp, s.pp),)
    digits: dict[Axis, Digits] = {
        "tensor": ((places, s.tp),),
        "data": ((1, places), (places * s.tp, replicas // places), (replicas * s.tp, stages)),
        "next": ring,
        "previous": ring,
        "tied": ((s.dp * s.tp * (s.pp - 1), 2),),
        "model": ((1, s.size),),
    }
    merged: list[tuple[int, int]] = []
    for stride, count in digits[axis]:
        if count == 1:
            continue
        if merged and stride == merged[-1][0] * merged[-1][1]:
            stride, count = merged[-1][0], merged.pop()[1] * count
        merged.append((stride, count))
    return tuple(merged)
