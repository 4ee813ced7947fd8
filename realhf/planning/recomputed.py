"""Trainings that recompute some of their layers: those that a search looks at beside recomputing none and all."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.plan import CallCompute
from realhf.geometry.layout import ParallelStrategy, chunk_layers
from realhf.planning.mixes import Way
from realhf.planning.model.call import CallModel
from realhf.planning.task import PlanningTask

PARTS = (0.25, 0.5, 0.75)  # parts of the layers, where other calls share the devices
# Where calls share more devices than that, what a search loses by more options is more than these are worth: PPO of 7B
# models on 8 H100, a step of 28.5 s found in place of 28.1 s by as many evaluations.
MOST_SHARED_DEVICES = 4


def partly_recomputed(task: PlanningTask, call: ModelFunctionCallDef, ways: Sequence[Way]) -> Iterator[Way]:
    """Of `ways` those that recompute all layers, with as few layers as memory allows in place of that: fewer take less
    time and more memory. None where the training fits without recomputation.

    What other models keep on the device is not known before a plan is chosen. Here they keep what they would divided
    over all devices; where other calls share the devices, some parts of the layers are choices, too, but not together
    with other ways to save memory: a search has to look at all of them.
    """
    if not call.trains or task.searched != "all" or "recomputation" not in task.open_choices.get(call.model_name, ()):
        return
    model = task.call_models[call.name]
    if model.shares_devices and task.cluster.num_devices > MOST_SHARED_DEVICES:
        return
    left_bytes = task.cluster.device_memory_bytes - _others_bytes(task, call)
    for strategy, count, compute in ways:
        is_plain = strategy.chunks == 1 and compute.data_parallel is None and not compute.offload_states
        if compute.recomputation is None or (model.shares_devices and not is_plain):
            continue
        kept = model.under(replace(compute, recomputation=None))
        if kept.least_bytes(strategy, count) > left_bytes:
            for number in _numbers(model, (strategy, count, compute), left_bytes):
                yield strategy, count, replace(compute, recomputed_layers=number)


def _numbers(model: CallModel, way: Way, left_bytes: float) -> list[int]:
    """Numbers of layers worth a search, neither none nor all."""
    strategy, count, compute = way
    most = _layers(model, strategy)
    found = [round(part * most) for part in PARTS] if model.shares_devices else []
    if model.under(compute).least_bytes(strategy, count) <= left_bytes:
        # What is needed while a layer is run again fits with all layers, and fewer need less: only what is kept counts.
        needed = partial(_needed_bytes, model, strategy, count, compute)
        found.append(bisect_left(range(most), True, key=lambda number: needed(number) <= left_bytes))
    return sorted({number for number in found if 0 < number < most})


def _layers(model: CallModel, strategy: ParallelStrategy) -> int:
    """The most layers of a model chunk."""
    return len(chunk_layers(model.call.config.num_layers, strategy, 0)[0])


def _needed_bytes(model: CallModel, strategy: ParallelStrategy, count: int, compute: CallCompute, number: int) -> float:
    return model.under(replace(compute, recomputed_layers=number)).least_bytes(strategy, count)


def _others_bytes(task: PlanningTask, call: ModelFunctionCallDef) -> float:
    """Bytes that the other models' homes keep on a device where all devices have an equal part."""
    homes = {task.homes[name] for name, other in task.graph.model_calls.items() if other.model_name != call.model_name}
    kept = [home for home in homes if task.graph.model_calls[home].model_name not in task.offload]
    whole = sum(task.call_models[home].static_bytes(ParallelStrategy()) for home in kept)
    return whole / task.cluster.num_devices
