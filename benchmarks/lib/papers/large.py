"""The search on large clusters, among fewer options: so that 1,024 devices take seconds, at every size the same way."""

from collections.abc import Iterable

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.model.cluster import device_meshes
from realhf.planning.options import Option, legal_strategies, micro_batch_counts
from realhf.planning.task import PlanningTask

PARTS = 16  # the smallest device mesh is this part of the cluster


def fewer_options(task: PlanningTask) -> dict[str, list[Option]]:
    """By call: meshes are aligned powers of two of at least 1 / PARTS of the cluster, the same 31 at every size; of the
    numbers of micro-batches of a strategy those that fit and that no other beats in both time and memory."""
    meshes = [mesh for mesh in device_meshes(task.cluster) if _is_offered(mesh, task.cluster.num_devices)]
    return {name: _options(task, call, meshes) for name, call in task.graph.model_calls.items()}


def _is_offered(mesh: DeviceMesh, num_devices: int) -> bool:
    aligned = mesh.size & (mesh.size - 1) == 0 and mesh.first % mesh.size == 0
    return aligned and mesh.size * PARTS >= num_devices


def _options(task: PlanningTask, call: ModelFunctionCallDef, meshes: Iterable[DeviceMesh]) -> list[Option]:
    by_size: dict[int, list[tuple[ParallelStrategy, int]]] = {}
    options = []
    for mesh in meshes:
        if mesh.size not in by_size:
            strategies = legal_strategies(call.config, mesh.size)
            by_size[mesh.size] = [(each, count) for each in strategies for count in _useful_counts(task, call, each)]
        options += [Option(Layout(mesh, strategy), count) for strategy, count in by_size[mesh.size]]
    return options


def _useful_counts(task: PlanningTask, call: ModelFunctionCallDef, strategy: ParallelStrategy) -> list[int]:
    model, limit = task.call_models[call.name], task.cluster.device_memory_bytes
    static = model.static_bytes(strategy) if task.homes[call.name] == call.name else 0
    if static > limit:
        return []
    counts = micro_batch_counts(strategy, model.samples)
    needs = {count: model.work(strategy, count).dynamic_bytes() for count in counts}
    fitting = [count for count in counts if static + needs[count] <= limit]
    rows = sorted((needs[count], model.seconds(strategy, count), count) for count in fitting)
    return [count for i, (_, seconds, count) in enumerate(rows) if all(seconds < row[1] for row in rows[:i])]
