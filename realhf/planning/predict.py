"""What a plan would take: seconds per call and per step, and memory."""

from dataclasses import dataclass

from msgspec.structs import replace

from realhf.architecture.model import DType
from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.offload import loads_of, with_loads
from realhf.dataflow.plan import ExecutionPlan, check_plan
from realhf.planning.cluster import Cluster
from realhf.planning.model.timings import Costs
from realhf.planning.options import Option
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.simulation import device_bytes, makespan_s, simulate
from realhf.planning.problem.tables import Problem
from realhf.planning.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """`plan` is the given plan with predicted_s and predicted_step_s filled in.

    `call_s` has the seconds of each call, `transfer_s` those of each data transfer and
    reallocation by name; `step_s` is the mean over the problem's unrolled steps in the plan's order;
    `device_bytes` what each device needs at its peak, `fits` whether all of it fits.
    """

    plan: ExecutionPlan
    call_s: dict[str, float]
    transfer_s: dict[str, float]
    step_s: float
    device_bytes: list[float]
    fits: bool


def predict(
    plan: ExecutionPlan,
    graph: DataflowGraph,
    *,
    batch_size: int,
    workload: Workload,
    cluster: Cluster,
    costs: Costs,
    dtype: DType,
) -> Prediction:
    """Predicts a plan, searched or made by hand, run in its own order.

    Raises:
        UserError: the plan cannot run the graph, or is for more devices than the cluster has.
    """
    check_plan(plan, graph, batch_size)
    if plan.num_devices > cluster.num_devices:
        raise UserError(
            f"the plan is for {plan.num_devices} devices but the cluster has {cluster.num_devices}; "
            "give a larger cluster or make a plan for this one with `realhf plan`"
        )
    options = {name: [Option(call.layout, call.micro_batches)] for name, call in plan.calls.items()}
    problem = build_problem(
        graph, options, batch_size=batch_size, workload=workload, cluster=cluster, costs=costs,
        max_steps_in_flight=plan.max_steps_in_flight, dtype=dtype, offload=plan.offload,
    )  # fmt: skip
    choice = [0] * len(problem.calls)
    step_s = makespan_s(simulate(problem, choice, problem.steps, sequence_of(plan, graph, problem))) / problem.steps
    needs = device_bytes(problem, choice)
    call_s = {call.name: call.options[0].time_s for call in problem.calls}
    filled = {name: replace(call, predicted_s=call_s[name]) for name, call in plan.calls.items()}
    return Prediction(
        plan=replace(plan, calls=filled, predicted_step_s=step_s),
        call_s=call_s,
        transfer_s={transfer.name: transfer.seconds[0] for transfer in problem.transfers},
        step_s=step_s,
        device_bytes=needs,
        fits=max(needs) <= cluster.device_memory_bytes,
    )


def sequence_of(plan: ExecutionPlan, graph: DataflowGraph, problem: Problem) -> list[tuple[int, int]]:
    """The order of a plan in the problem's words: (number of a node, step), loads from host memory among them."""
    names = [*(call.name for call in problem.calls), *(transfer.name for transfer in problem.transfers)]
    number = {name: i for i, name in enumerate(names)}
    order = with_loads(plan.unrolled(graph, problem.steps), loads_of(graph, plan.offload))
    return [(number[name], step) for name, step in order]
