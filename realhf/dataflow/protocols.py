"""Transfer protocols: the part of a batch that each device of a layout gets, and the devices whose outputs are taken.

HybridFlow (section 4.1 and its table of protocols) registers each method of a model with such a pair of rules. Here
they are pure functions of a layout; the master moves the data (`realhf.master.data`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from realhf.base.errors import UserError
from realhf.geometry.layout import Layout, ParallelStrategy


@dataclass(frozen=True)
class Division:
    """A batch is cut into `parts` parts; device d gets part `part_of[d]`. Devices not in `part_of` get nothing."""

    parts: int
    part_of: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class TransferProtocol:
    """A named pair of rules, both functions of the layout alone; an experiment can define further ones.

    distribute: the part that each device gets.
    collect: the devices whose outputs, end to end, form the result.
    """

    name: str
    distribute: Callable[[Layout], Division]
    collect: Callable[[Layout], tuple[int, ...]]

    def check(self, layout: Layout) -> None:
        """Raises UserError if the rules contradict the layout: they name devices outside it, give a part to no device,
        or collect outputs of a device that gets nothing."""
        division = self.distribute(layout)
        strange = {*division.part_of, *self.collect(layout)} - set(layout.mesh.devices)
        if strange:
            raise UserError(f"protocol {self.name}: devices {sorted(strange)} are not of {layout}; use its devices")
        if set(division.part_of.values()) != set(range(division.parts)):
            given = sorted(set(division.part_of.values()))
            raise UserError(
                f"protocol {self.name} cuts a batch into {division.parts} parts and gives {given} to {layout}; give a "
                f"device each part from 0 to {division.parts - 1}"
            )
        idle = sorted(set(self.collect(layout)) - set(division.part_of))
        if idle:
            raise UserError(f"protocol {self.name} collects outputs of {idle}, which get nothing; give them a part")

    def restores(self, layout: Layout) -> bool:
        """Whether the collected outputs are those of the whole batch, each sample once, in its order."""
        division = self.distribute(layout)
        return [division.part_of[device] for device in self.collect(layout)] == list(range(division.parts))


def _everything(layout: Layout) -> Division:
    return Division(1, dict.fromkeys(layout.mesh.devices, 0))


def _one_each(layout: Layout) -> Division:
    return Division(layout.mesh.size, {device: i for i, device in enumerate(layout.mesh.devices)})


def _all(layout: Layout) -> tuple[int, ...]:
    return tuple(layout.mesh.devices)


def _first(layout: Layout) -> tuple[int, ...]:
    return (layout.mesh.first,)


def _data_parallel_only(layout: Layout) -> Division:
    if layout.strategy.dp != layout.mesh.size:
        raise UserError(f"protocol DP_PROTO: {layout} divides the model as well; choose 3D_PROTO, or dp alone")
    return _one_each(layout)


def _by_data_index(layout: Layout) -> Division:
    return Division(layout.strategy.dp, {device: layout.coordinates(device)[0] for device in layout.mesh.devices})


def _output_devices(layout: Layout) -> tuple[int, ...]:
    return tuple(layout.output_device(dp) for dp in range(layout.strategy.dp))


def _first_of_each_stage(layout: Layout) -> tuple[int, ...]:
    return tuple(layout.device(0, 0, stage) for stage in range(layout.strategy.pp))


def _by_data_index_and_stage(layout: Layout) -> Division:
    dp, pp = layout.strategy.dp, layout.strategy.pp
    places = {device: layout.coordinates(device) for device in layout.mesh.devices}
    return Division(dp * pp, {device: data * pp + stage for device, (data, _, stage) in places.items()})


def _first_of_each_data_index_and_stage(layout: Layout) -> tuple[int, ...]:
    strategy = layout.strategy
    return tuple(layout.device(dp, 0, stage) for dp in range(strategy.dp) for stage in range(strategy.pp))


ONE_TO_ALL = TransferProtocol(name="ONE_TO_ALL", distribute=_everything, collect=_all)
"""All devices get the whole batch, and the outputs of all are collected: for work that every device does alike."""

ALL_TO_ALL = TransferProtocol(name="ALL_TO_ALL", distribute=_one_each, collect=_all)
"""Every device has its own input and output: for inspecting single devices."""

RANK_ZERO = TransferProtocol(
    name="RANK_ZERO", distribute=lambda layout: Division(1, {layout.mesh.first: 0}), collect=_first
)
"""The first device works alone."""

DP_PROTO = TransferProtocol(name="DP_PROTO", distribute=_data_parallel_only, collect=_all)
"""Each device gets a part of its own; for layouts with data parallelism alone.

Raises:
    UserError: by `distribute`, the layout divides the model too.
"""

THREE_D_PROTO = TransferProtocol(name="3D_PROTO", distribute=_by_data_index, collect=_output_devices)
"""Each data-parallel rank gets a part, the same on all devices of its replica; the outputs come from the first
tensor-parallel rank of the last stage. The default, and the rule for calls that use their model."""

THREE_D_PP_ONLY = TransferProtocol(name="3D_PP_ONLY", distribute=_everything, collect=_first_of_each_stage)
"""All devices get the whole batch, and each pipeline stage gives one output: for results that differ only by stage."""

THREE_D_PP_AS_DP = TransferProtocol(
    name="3D_PP_AS_DP", distribute=_by_data_index_and_stage, collect=_first_of_each_data_index_and_stage
)
"""Pipeline stages count as further data-parallel ranks, neighbours in the batch: dp x pp parts, with outputs from the
first tensor-parallel rank of each. For work that needs no pass through the stages."""


def all_micro_dp(generation: ParallelStrategy) -> TransferProtocol:
    """3D_ALL_MICRO_DP: a part for each micro data-parallel group, on devices that train in another layout.

    Only tp and pp of `generation` matter. A device's part of the model in generation contains the part that it trains.
    So t / t_g tensor neighbours and p / p_g pipeline neighbours generate different samples, and there are
    (t p) / (t_g p_g) times as many parts as in training (3D-HybridEngine, HybridFlow, section 5). Outputs come from the
    first tensor-parallel rank of the last stage of generation.

    Raises:
        UserError: by either rule, tp and pp of generation do not divide those of the layout.
    """

    def place(layout: Layout, device: int) -> tuple[int, int, int]:
        """(part, tp, pp) in generation."""
        training = layout.strategy
        if training.tp % generation.tp or training.pp % generation.pp:
            raise UserError(
                f"protocol 3D_ALL_MICRO_DP: tp={generation.tp} and pp={generation.pp} of generation must divide "
                f"tp={training.tp} and pp={training.pp} of {layout}"
            )
        data, tensor, stage = layout.coordinates(device)
        tensors, stages = training.tp // generation.tp, training.pp // generation.pp
        micro = stage % stages * tensors + tensor % tensors
        return data * tensors * stages + micro, tensor // tensors, stage // stages

    def distribute(layout: Layout) -> Division:
        part_of = {device: place(layout, device)[0] for device in layout.mesh.devices}
        return Division(max(part_of.values()) + 1, part_of)

    def collect(layout: Layout) -> tuple[int, ...]:
        places = {device: place(layout, device) for device in layout.mesh.devices}
        holders = [device for device, (_, tp, pp) in places.items() if (tp, pp) == (0, generation.pp - 1)]
        return tuple(sorted(holders, key=lambda device: places[device][0]))

    return TransferProtocol(name="3D_ALL_MICRO_DP", distribute=distribute, collect=collect)
