"""Data that goes from call to call, as transfers of a planning problem."""

from array import array
from collections.abc import Sequence

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import Layout
from realhf.planning.problem.numbering import Numbering, distinct
from realhf.planning.problem.tables import TransferTable

_Place = tuple[int | None, int | None]  # the device if the mesh is one, the node that it lies in if it is within one


class DataTransfers:
    """Tables of the transfers of samples."""

    def __init__(self, numbers: Numbering):
        self._numbers = numbers

    def between(self, call: ModelFunctionCallDef, parent: str, keys: int) -> TransferTable:
        """Of the meshes only single devices and single nodes matter, of the strategy the parts: the table is small.

        What a call that runs ahead of training (stale rollouts) has made leaves while it makes the next: had the
        transfer to wait for the source's devices, it would stand behind all steps that were ready before it.
        """
        numbers = self._numbers
        source, target = numbers.number[parent], numbers.number[call.name]
        runs_ahead = any(edge.kind == "version" and edge.steps_back > 1 for edge in numbers.task.graph.parents(parent))
        sources, rows = distinct(numbers.layouts[parent], self._place)
        places = numbers.layouts[call.name]
        targets, columns = distinct(places, lambda layout: (self._place(layout), call.parts(layout)))
        return TransferTable(
            name=f"data: {parent} -> {call.name}",
            source=source,
            target=target,
            parents=[(source, 0)],
            on=(target,) if runs_ahead else (source, target),
            rows=rows,
            columns=columns,
            num_columns=len(targets),
            seconds=self._transfer_seconds(call, keys, sources, targets),
        )

    def _transfer_seconds(
        self,
        call: ModelFunctionCallDef,
        keys: int,
        sources: Sequence[_Place],
        targets: Sequence[tuple[_Place, int]],
    ) -> "array[float]":
        """Row-major. A row is that of meshes on different nodes, but for the few targets on the source's own node."""

        model = self._numbers.task.call_models[call.name]
        numbers_of_parts = {parts for _, parts in targets}
        across, within = (
            {parts: model.transfer_s(keys, parts, crosses_nodes=crosses) for parts in numbers_of_parts}
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

    def _place(self, layout: Layout) -> _Place:
        mesh = layout.mesh
        first, last = (
            self._numbers.task.cluster.node_of(mesh.first),
            self._numbers.task.cluster.node_of(mesh.devices[-1]),
        )
        return mesh.first if mesh.size == 1 else None, first if first == last else None
