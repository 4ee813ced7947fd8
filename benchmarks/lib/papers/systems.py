"""How other systems lay out RLHF, as plans for an engine with their features, predicted by the same cost model.

Their engines' own speeds are not modelled: only placement, strategies, ZeRO-3 and eager generation differ.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from lib.papers.cells import Cell
from lib.papers.plans import Planned, fastest, planned

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import DeviceMesh, ParallelStrategy
from realhf.planning.mapping import allocations
from realhf.planning.options import Option, options_on
from realhf.planning.predict import predict_in_best_order
from realhf.planning.task import PlanningTask

MOST_ALLOCATIONS = 20  # the fastest that are tried until one fits


def deepspeed_chat(cell: Cell) -> Planned | None:
    """All models on all devices with ZeRO-3; generation is laid out anew with tensor parallelism within a node."""
    task = _zero3_task(cell, graphs=False)
    meshes = dict.fromkeys(task.graph.model_calls, DeviceMesh(0, cell.num_devices))
    return _best(cell, task, meshes)


def openrlhf(cell: Cell) -> Planned | None:
    """Each model on devices of its own with ZeRO-3, and generation on further ones with a copy of the actor that is
    renewed every step. Groups have powers of two of devices; of all allocations the fastest that fits."""
    task = _zero3_task(cell, graphs=True)
    groups = _groups(task)
    sizes = [2**power for power in range(cell.num_devices.bit_length())]
    known: dict[tuple[str, int], float] = {}

    def seconds(name: str, size: int) -> float:
        if (name, size) not in known:
            known[name, size] = _fastest_s(task, name, size, next(names for names in groups.values() if name in names))
        return known[name, size]

    def estimate(allocation: tuple[int, ...]) -> float:
        """Stage by stage: groups work side by side."""
        stages = ("generate", "inference", "train_step")
        parts = list(zip(groups.values(), allocation, strict=True))
        return sum(
            max((sum(seconds(n, size) for n in names if f"_{stage}" in n) for names, size in parts)) for stage in stages
        )

    found = sorted((cost, each) for each in allocations(cell.num_devices, [1] * len(groups), sizes)
                   if (cost := estimate(each)) < float("inf"))  # fmt: skip
    for _, allocation in found[:MOST_ALLOCATIONS]:
        plan = _best(cell, task, _placed(groups, allocation))
        if plan:
            return plan
    return None


def _fastest_s(task: PlanningTask, name: str, size: int, group: Sequence[str]) -> float:
    """Of a call on `size` devices beside the states of its group's other models; infinite if it does not fit."""
    model, strategy = task.call_models[name], ParallelStrategy(dp=size)
    room = task.cluster.device_memory_bytes
    room -= sum(task.call_models[other].static_bytes(strategy) for other in group if other != name)

    def fits(option: Option) -> bool:
        taken = option.layout.strategy
        parameters = model.placed(taken).copy_bytes() if model.call.generates else model.static_bytes(taken)
        return parameters + model.work(*option.shape).dynamic_bytes() <= room

    options = _options(task, model.call, DeviceMesh(0, size))
    return min((model.seconds(*option.shape) for option in options if fits(option)), default=float("inf"))


def _groups(task: PlanningTask) -> dict[str, list[str]]:
    """The calls that share devices: generation, and those of each model."""
    groups: dict[str, list[str]] = {}
    for name, call in task.graph.model_calls.items():
        groups.setdefault("generation" if call.generates else name.split("_")[0], []).append(name)
    return groups


def _placed(groups: Mapping[str, list[str]], allocation: Iterable[int]) -> dict[str, DeviceMesh]:
    """The largest group first, so that every one lies on aligned devices."""
    meshes, first = {}, 0
    for size, names in sorted(zip(allocation, groups.values(), strict=True), key=lambda pair: -pair[0]):
        meshes |= dict.fromkeys(names, DeviceMesh(first, size))
        first += size
    return meshes


def _zero3_task(cell: Cell, *, graphs: bool) -> PlanningTask:
    """The cell's task for an engine with ZeRO-3, step by step.

    The planner takes a whole copy of a sharded model for every call but its training, which ZeRO-3 does not need. So
    the critic's inference is a sharded model of its own here, and its 1 / N of the parameters counts twice.
    """
    engine = replace(cell.engine, zero1=False, fully_sharded=True, sequence_parallel=False, cuda_graphs=graphs)
    calls = [
        call if call.name != "critic_inference" else replace(call, model_name="critic-inference") for call in cell.calls
    ]
    return replace(cell.task(engine=engine, calls=calls), max_steps_in_flight=1)


def _options(task: PlanningTask, call: ModelFunctionCallDef, mesh: DeviceMesh) -> list[Option]:
    """Data parallelism alone; generation in tensor-parallel groups within a node."""
    options = options_on([mesh], call, call.mini_batch_size(task.batch_size))
    per_node = task.cluster.devices_per_node
    return [
        option
        for option in options
        if option.layout.strategy.pp == 1 and option.layout.strategy.tp <= (per_node if call.generates else 1)
    ]


def _best(cell: Cell, task: PlanningTask, meshes: Mapping[str, DeviceMesh]) -> Planned | None:
    """The fastest strategies and micro-batches with every call on its mesh; None if nothing is legal, or fits."""
    options = {name: _options(task, call, meshes[name]) for name, call in task.graph.model_calls.items()}
    plan = fastest(task, options)
    return planned(cell, task, predict_in_best_order(task, plan)) if plan else None


SYSTEMS: dict[str, Callable[[Cell], Planned | None]] = {"DeepSpeed-Chat": deepspeed_chat, "OpenRLHF": openrlhf}
