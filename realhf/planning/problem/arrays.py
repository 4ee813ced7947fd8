"""Data that goes from call to call, as transfers of a planning problem."""

from array import array
from collections.abc import Sequence
from functools import partial

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import Layout
from realhf.planning.cluster import Cluster
from realhf.planning.model.call import CallModel
from realhf.planning.problem.numbering import Numbering, distinct
from realhf.planning.problem.tables import TransferTable

_Place = tuple[int | None, int | None]  # the device if the mesh is one, the node that it lies in if it is within one


def data_transfer(numbers: Numbering, call: ModelFunctionCallDef, parent: str, keys: int) -> TransferTable:
    """Of the meshes only single devices and single nodes matter, of the strategy the parts: the table is small.

    What a call that runs ahead of training (stale rollouts) has made leaves while it makes the next: had the
    transfer to wait for the source's devices, it would stand behind all steps that were ready before it.
    """
    task = numbers.task
    runs_ahead = any(edge.kind == "version" and edge.steps_back > 1 for edge in task.graph.parents(parent))
    sources, rows = distinct(numbers.layouts[parent], partial(_place, task.cluster))
    targets, columns = distinct(numbers.layouts[call.name], lambda at: (_place(task.cluster, at), call.parts(at)))
    return TransferTable(
        name=f"data: {parent} -> {call.name}",
        source=parent,
        target=call.name,
        parents=[(parent, 0)],
        on=[call.name] if runs_ahead else [parent, call.name],
        rows=rows,
        columns=columns,
        num_columns=len(targets),
        seconds=_seconds(task.call_models[call.name], keys, sources, targets),
    )


def _seconds(
    model: CallModel, keys: int, sources: Sequence[_Place], targets: Sequence[tuple[_Place, int]]
) -> "array[float]":
    """Row-major. A row is that of meshes on different nodes, but for the few targets on the source's own node."""
    across, within = (
        {parts: model.transfer_s(keys, parts, crosses_nodes=crosses) for parts in {parts for _, parts in targets}}
        for crosses in (True, False)
    )
    between_nodes = array("d", [across[parts] for _, parts in targets])
    on_node: dict[int | None, list[int]] = {}  # numbers of targets
    for number, ((_, node), _) in enumerate(targets):
        on_node.setdefault(node, []).append(number)
    table = array("d")
    for device, node in sources:
        row = between_nodes[:]
        for number in on_node.get(node, []) if node is not None else []:
            (target_device, _), parts = targets[number]
            # One and the same device has the data already.
            row[number] = 0.0 if device is not None and device == target_device else within[parts]
        table += row
    return table


def _place(cluster: Cluster, layout: Layout) -> _Place:
    mesh = layout.mesh
    first, last = cluster.node_of(mesh.first), cluster.node_of(mesh.devices[-1])
    return mesh.first if mesh.size == 1 else None, first if first == last else None
