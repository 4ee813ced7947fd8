"""From training to generation on the same devices: what three engines receive and keep (HybridFlow, Table 2).

Only the last is how this project generates; the others are here to be compared with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import Layout, ParallelStrategy
from realhf.geometry.micro_dp import grouped_like
from realhf.geometry.shards import held_boxes
from realhf.realloc.plan.planner import ReallocationPlan, plan_reallocation

Engine = Literal["deepspeed-chat", "hybridflow-v", "hybridflow"]
Boxes = Mapping[int, Sequence[Box]]  # by device


@dataclass(frozen=True, kw_only=True)
class Transition:
    """Boxes by device: `kept` of training for good, `gathered` before generation, and what generation `computes` with.

    Of `gathered` all is received but what `kept` has; then what generation does not compute with is freed.
    """

    kept: Boxes
    gathered: Boxes
    computes: Boxes
    element_bytes: int = 4

    @cached_property
    def plan(self) -> ReallocationPlan:
        """How the bytes travel."""
        return plan_reallocation(self.kept, self.gathered, element_bytes=self.element_bytes)

    def received_bytes(self, device: int) -> int:
        return self.plan.received_bytes.get(device, 0)

    def peak_bytes(self, device: int) -> int:
        """Parameters on the device when all is gathered; what it keeps of training counts once if it is among that."""
        gathered = sum(box.size for box in self.gathered[device])
        return (gathered + _outside(self.kept[device], self.gathered[device])) * self.element_bytes

    def unused_bytes(self, device: int) -> int:
        """What the device keeps of training during generation although it does not compute with it."""
        return _outside(self.kept[device], self.computes[device]) * self.element_bytes


def transition(engine: Engine, model: DecoderConfig, training: Layout, tp: int, pp: int) -> Transition:
    """How `engine` goes from `training` to generation with degrees `tp` and `pp` on the same devices.

    - DeepSpeed-Chat trains with ZeRO-3 over all devices, and gathers the model on each.
    - HybridFlow-V trains with 3D parallelism, and gathers the model in each replica of `training`.
    - HybridFlow groups generation's ranks such that a micro data-parallel group gathers what it computes with.

    Raises:
        ValueError: HybridFlow cannot group ranks so (`realhf.geometry.micro_dp`).
    """
    mesh, degrees = training.mesh, ParallelStrategy(training.mesh.size // (tp * pp), tp, pp)
    whole = Layout(mesh, ParallelStrategy(mesh.size))
    match engine:
        case "deepspeed-chat":
            return _between(model, (whole, "fsdp"), whole, Layout(mesh, degrees))
        case "hybridflow-v":
            return _between(model, (training, "zero1"), whole, Layout(mesh, degrees))
        case "hybridflow":
            grouped = grouped_like(training, Layout(mesh, degrees), model.num_layers)
            if grouped is None:
                raise ValueError(f"{training} is not contained in tp={tp}, pp={pp} on its devices, however grouped")
            return _between(model, (training, "zero1"), grouped, grouped)


def _between(
    model: DecoderConfig, training: tuple[Layout, DataParallel], gathered: Layout, computes: Layout
) -> Transition:
    layout, data_parallel = training
    return Transition(
        kept={device: held_boxes(model, layout, device, data_parallel) for device in layout.mesh.devices},
        gathered={device: device_boxes(model, gathered, device) for device in layout.mesh.devices},
        computes={device: device_boxes(model, computes, device) for device in layout.mesh.devices},
    )


def _outside(boxes: Sequence[Box], holders: Sequence[Box]) -> int:
    """Elements of `boxes` that are in none of `holders`, which do not overlap."""
    of_name: dict[str, list[Box]] = {}
    for holder in holders:
        of_name.setdefault(holder.name, []).append(holder)
    return sum(
        box.size - sum(common.size for holder in of_name.get(box.name, []) if (common := box.intersect(holder)))
        for box in boxes
    )
