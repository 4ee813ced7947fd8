"""The options of a call: mesh x (dp, tp, pp) x number of micro-batches."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.plan import CallPlan
from realhf.dataflow.pools import Pool
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, check_strategy, divisors
from realhf.planning.model.cluster import Cluster, device_meshes
from realhf.planning.task import PlanningTask


@dataclass(frozen=True, order=True)
class Option:
    """One way to run a call."""

    layout: Layout
    micro_batches: int

    @property
    def shape(self) -> tuple[ParallelStrategy, int]:
        """What seconds and bytes depend on, wherever the mesh lies (`realhf.planning.model.call`)."""
        return self.layout.strategy, self.micro_batches

    def call_plan(self, predicted_s: float | None = None) -> CallPlan:
        strategy, mesh = self.layout.strategy, self.layout.mesh
        return CallPlan(
            devices=(mesh.first, mesh.size),
            dp=strategy.dp,
            tp=strategy.tp,
            pp=strategy.pp,
            chunks=strategy.chunks,
            micro_dp=strategy.micro_dp,
            micro_batches=self.micro_batches,
            predicted_s=predicted_s,
        )


def option_of(call: CallPlan) -> Option:
    """The option that a plan took for a call."""
    return Option(call.layout, call.micro_batches)


def legal_strategies(model: DecoderConfig, num_devices: int) -> list[ParallelStrategy]:
    """All (dp, tp, pp) whose product is `num_devices` and by which the model can be divided; none with chunks."""
    strategies = []
    for tp in divisors(num_devices):
        for pp in divisors(num_devices // tp):
            strategy = ParallelStrategy(num_devices // (tp * pp), tp, pp)
            with contextlib.suppress(UserError):
                check_strategy("", model, strategy)
                strategies.append(strategy)
    return strategies


def micro_batch_counts(strategy: ParallelStrategy, mini_batch: int) -> list[int]:
    """Powers of two, and pp times powers of two, such that dp x count divides the mini-batch."""
    if mini_batch % strategy.dp:
        return []
    powers = [2**power for power in range(mini_batch.bit_length())]
    counts = {*powers, *(strategy.pp * power for power in powers)}
    return [count for count in divisors(mini_batch // strategy.dp) if count in counts]


def call_strategies(
    call: ModelFunctionCallDef, num_devices: int, mini_batch: int
) -> list[tuple[ParallelStrategy, list[int]]]:
    """The strategies that a call and its protocol allow on devices from 0 on, and for each the numbers of its
    micro-batches: one for a call that does not use its model."""
    found = []
    for strategy in legal_strategies(call.config, num_devices):
        layout = Layout(DeviceMesh(0, num_devices), strategy)
        try:
            call.check_protocol(layout)
        except UserError:
            continue
        if call.uses_model:
            counts = micro_batch_counts(strategy, mini_batch)
        else:
            counts = [] if mini_batch % call.parts(layout) else [1]
        if counts:
            found.append((strategy, counts))
    return found


def options_on(meshes: Iterable[DeviceMesh], call: ModelFunctionCallDef, mini_batch: int) -> list[Option]:
    """All legal options of a call on these meshes, for mini-batches of `mini_batch` samples."""
    by_size: dict[int, list[tuple[ParallelStrategy, list[int]]]] = {}
    options = []
    for mesh in meshes:
        if mesh.size not in by_size:
            by_size[mesh.size] = call_strategies(call, mesh.size, mini_batch)
        for strategy, counts in by_size[mesh.size]:
            layout = Layout(mesh, strategy)
            options += [Option(layout, count) for count in counts]
    return options


def pool_meshes(cluster: Cluster, pool: Pool | None) -> list[DeviceMesh]:
    """The meshes of a cluster, the smallest first; of a pool those within it, and its runs of neighbours within a node.
    None: all of the cluster."""
    meshes = device_meshes(cluster)
    if pool is None:
        return meshes
    inside = [mesh for mesh in meshes if mesh in pool]
    runs = [run for run in pool.runs if not cluster.crosses_nodes((run.first, run.devices[-1])) and run not in inside]
    return sorted([*inside, *runs], key=lambda mesh: (mesh.size, mesh.first))


def call_options(
    call: ModelFunctionCallDef, batch_size: int, cluster: Cluster, pool: Pool | None = None
) -> list[Option]:
    """All legal options of the call, on every mesh of the cluster, or of the pool of its model. Raises UserError if its
    mini-batches do not divide the batch, or none is legal within the pool."""
    options = options_on(pool_meshes(cluster, pool), call, call.mini_batch_size(batch_size))
    if not options and pool is not None:
        raise UserError(
            f"{call.name}: no (dp, tp, pp) within {pool}, to which model {call.model_name!r} is confined, is legal "
            f"with mini-batches of {call.mini_batch_size(batch_size)} samples; give the pool other devices, or change "
            "the batch size"
        )
    return options


def chosen(options: Mapping[str, Sequence[Option]], choice: Sequence[int]) -> dict[str, CallPlan]:
    """The calls of a plan, from the number of an option for each."""
    return {name: rows[index].call_plan() for (name, rows), index in zip(options.items(), choice, strict=True)}


def all_options(task: PlanningTask) -> dict[str, list[Option]]:
    """`call_options` of every call of a task, by name."""
    pools = task.graph.pools
    return {
        name: call_options(call, task.batch_size, task.cluster, pools.get(call.model_name))
        for name, call in task.graph.model_calls.items()
    }
