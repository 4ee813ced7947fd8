"""From a dataflow graph, options and costs to the tables of a planning problem."""

from collections.abc import Mapping, Sequence

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.planning.options import Option
from realhf.planning.problem.arrays import DataTransfers
from realhf.planning.problem.native import reallocation_table
from realhf.planning.problem.numbering import Numbering
from realhf.planning.problem.option_rows import OptionRows
from realhf.planning.problem.parameters import ParameterTransfers, ReallocationTable
from realhf.planning.problem.tables import CallTable, Problem
from realhf.planning.task import PlanningTask
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES

STEPS = 4  # unrolled steps: the objective is their makespan / STEPS, so that overlap across steps counts
MANY_STEPS = 16  # where more than two steps overlap: filling and draining such a pipeline must not outweigh its overlap


def steps_unrolled(max_steps_in_flight: int) -> int:
    """How many steps are simulated, by how many of them may overlap."""
    return STEPS if max_steps_in_flight <= 2 else MANY_STEPS


def build_problem(
    task: PlanningTask,
    options: Mapping[str, Sequence[Option]],
    *,
    reallocations: ReallocationTable = reallocation_table,
    groups: bool = False,
) -> Problem:
    """The tables for a choice among `options` of every call.

    Nodes: the calls; a move of parameters for every model that follows another; a data transfer for
    every data edge; a reallocation for every call that is not its model's home. The latter two start
    when the call's parents have ended, and the call when its transfers have: the master issues them
    together, since the copy that a reallocation makes is freed after the call and must not occupy
    memory before.

    A model of the task's `offload` waits in host memory: it is loaded for each of its calls, on the devices of its
    home, and sent back behind it. Both occupy these devices alone; its memory counts in its own calls.

    With `groups`, calls on the devices of their home count as grouped like it where they can be
    (`realhf.planning.model.reallocation`). A copy that contains the home's part counts without it; where the home has
    several layouts to choose from, bytes of an option cannot depend on which, and all of it counts.
    """
    builder = _Builder(Numbering(task, options, groups), reallocations)
    return Problem(
        num_devices=task.cluster.num_devices,
        device_memory_bytes=task.cluster.device_memory_bytes,
        steps=steps_unrolled(task.max_steps_in_flight),
        max_steps_in_flight=task.max_steps_in_flight,
        calls=[builder.call_table(call) for call in task.graph.calls.values()],
        transfers=builder.transfers,
        communicator_bytes=task.costs.hardware.communicator_bytes,
        sending_bytes=_sending_bytes(task),
    )


def _sending_bytes(task: PlanningTask) -> float:
    """The buckets of a device that sends a copy: as many as fill one (`copy_bytes`), where messages are packed. What
    does not leave a host whose memory its devices share is not (`realhf.realloc.execute.carriers`)."""
    is_packed = task.cluster.num_nodes > 1 or not task.costs.hardware.shares_host_memory
    has_copies = any(home != call for call, home in task.homes.items())
    return 2.0 * DEFAULT_BUCKET_BYTES if is_packed and has_copies else 0.0


class _Builder:
    """Puts nodes in order and says what waits for what."""

    def __init__(self, numbers: Numbering, reallocations: ReallocationTable):
        self._numbers, self._task, self._rows = numbers, numbers.task, OptionRows(numbers)
        self._data, self._parameters = DataTransfers(numbers), ParameterTransfers(numbers, reallocations)
        graph = self._task.graph
        host_copies, self._waits = self._parameters.host_copies()
        # The first transfers are the graph's own nodes.
        follows = (self._parameters.follow(node, self._waits[node.name]) for node in graph.follows.values())
        self.transfers = [*follows, *host_copies]
        for call in graph.calls.values():
            self._add_transfers(call)

    def call_table(self, call: ModelFunctionCallDef) -> CallTable:
        """Waits for its version edges and its transfers; a data edge is a transfer's business."""
        number = self._numbers.number
        edges = [edge for edge in self._task.graph.parents(call.name) if edge.kind != "data"]
        return CallTable(
            name=call.name,
            home=number[self._task.homes[call.name]],
            parents=[*((number[edge.parent], edge.steps_back) for edge in edges), *self._waits[call.name]],
            options=self._rows.rows(call),
            spared=list(self._rows.spared(call)),
        )

    def _add_transfers(self, call: ModelFunctionCallDef) -> None:
        """Those that the call waits for."""
        waits, home = self._waits[call.name], self._task.homes[call.name]
        loads = tuple(waits)
        edges = [edge for edge in self._task.graph.parents(call.name) if edge.kind == "data"]
        own = [self._data.between(call, edge.parent, len(edge.keys)) for edge in edges]
        if home != call.name:
            own.append(self._parameters.reallocation(call, home, loads))
        for transfer in own:
            waits.append((len(self._task.graph.calls) + len(self.transfers), 0))
            self.transfers.append(transfer)
