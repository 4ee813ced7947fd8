"""Moves of parameters as transfers of a planning problem: copies for calls, models that follow, host memory."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from realhf.architecture.model import DecoderConfig
from realhf.dataflow.follow import FollowNode
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.offload import Load
from realhf.geometry.layout import Layout
from realhf.planning.cluster import Cluster
from realhf.planning.model.descriptions import DTYPE_BYTES
from realhf.planning.model.grouping import grouped_reallocations
from realhf.planning.model.hardware import Hardware
from realhf.planning.problem.inputs import ProblemInputs
from realhf.planning.problem.tables import ParentRow, TransferTable


class ReallocationTable(Protocol):
    """Seconds of the reallocations of sources x targets, row-major (`realhf.planning.model.reallocation`)."""

    def __call__(
        self,
        model: DecoderConfig,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        *,
        item: int,
        cluster: Cluster,
        hardware: Hardware,
        forwarding: bool = True,
    ) -> Sequence[float]: ...


class ParameterTransfers:
    """Tables of the moves of parameters; `reallocations` says what one takes."""

    def __init__(self, inputs: ProblemInputs, reallocations: ReallocationTable):
        self._inputs, self._reallocations = inputs, reallocations

    def host_copy(self, load: Load) -> TransferTable:
        """Between the devices of a model's home and their host's memory, all at once."""
        inputs = self._inputs
        home = inputs.home_call(load.model)
        layouts, rows = inputs.layouts[home.name]
        bandwidth = inputs.task.costs.hardware.host_bandwidth
        model = inputs.task.call_models[home.name]
        sizes = [model.offloaded_bytes(layout.strategy, states=load.states) for layout in layouts]
        return TransferTable(
            name="",
            source=inputs.number[home.name],
            target=inputs.number[home.name],
            parents=[],
            occupies="source",
            rows=rows,
            columns=[0] * len(rows),
            num_columns=1,
            seconds=[size_bytes / bandwidth for size_bytes in sizes],
        )

    def follow(self, node: FollowNode, loads: Sequence[ParentRow]) -> TransferTable:
        """From home to home, as a reallocation; what happens every N steps takes 1 / N of it in each.

        Nothing is forwarded on the way to an average. It waits for `loads`, too.
        """
        inputs = self._inputs
        source, target = (
            inputs.task.homes[inputs.task.graph.calls_of(model)[0].name] for model in (node.source, node.target)
        )
        parents = [(inputs.number[edge.parent], edge.steps_back) for edge in inputs.task.graph.parents(node.name)]
        parents += loads
        table = self._parameter_move(node.name, source, target, parents, forwarding=False)
        if node.every_steps == 1:
            return table
        return replace(table, seconds=array("d", [seconds / node.every_steps for seconds in table.seconds]))

    def reallocation(self, call: ModelFunctionCallDef, home: str, parents: list[ParentRow]) -> TransferTable:
        inputs = self._inputs
        table = self._parameter_move(f"{call.model_name}: {home} -> {call.name}", home, call.name, parents)
        if not inputs.groups:
            return table
        seconds = grouped_reallocations(
            table.seconds, call.config, inputs.layouts[home][0], inputs.layouts[call.name][0],
            item=DTYPE_BYTES[inputs.task.dtype], cluster=inputs.task.cluster,
            hardware=inputs.task.costs.of(call.config).links,
        )  # fmt: skip
        return replace(table, seconds=seconds)

    def _parameter_move(
        self, name: str, source: str, target: str, parents: list[ParentRow], *, forwarding: bool = True
    ) -> TransferTable:
        """Parameters go from the layout of call `source` to that of call `target`.

        Devices that only send do so beside what they compute (`realhf.worker.move_lane`), unless the model waits in
        host memory: then they load it, send, and send it back.
        """
        inputs = self._inputs
        (sources, rows), (targets, columns) = inputs.layouts[source], inputs.layouts[target]
        model = inputs.task.graph.calls[target].config
        is_loaded = inputs.task.graph.calls[source].model_name in inputs.task.offload
        return TransferTable(
            name=name,
            source=inputs.number[source],
            target=inputs.number[target],
            parents=parents,
            occupies="both" if is_loaded else "target",
            rows=rows,
            columns=columns,
            num_columns=len(targets),
            seconds=self._reallocations(
                model,
                sources,
                targets,
                item=DTYPE_BYTES[inputs.task.dtype],
                cluster=inputs.task.cluster,
                hardware=inputs.task.costs.of(model).links,
                forwarding=forwarding,
            ),
        )
