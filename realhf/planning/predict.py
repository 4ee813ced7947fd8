"""The time and memory of a plan, and the best order for the master to issue its calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.offload import loads_of, with_loads
from realhf.dataflow.plan import ExecutionPlan, OrderEntry
from realhf.dataflow.plan_checks import problem_of_order
from realhf.planning.model.reallocation import Reallocation
from realhf.planning.options import option_of
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import DeviceNeed, Event, NativeProblem, device_needs, native_problem, simulate
from realhf.planning.problem.tables import Problem
from realhf.planning.task import PlanningTask

Order = tuple[OrderEntry, ...]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """`plan` is the given plan with predicted_s and predicted_step_s filled in.

    By name: `call_s` of each call, those beside the devices too, `transfer_s` of each data transfer and reallocation.
    `step_s` is the mean over the
    problem's unrolled steps in the plan's order; `needs` has the memory of each device.
    """

    plan: ExecutionPlan
    call_s: dict[str, float]
    transfer_s: dict[str, float]
    step_s: float
    needs: list[DeviceNeed]
    fits: bool

    @property
    def peak_bytes(self) -> float:
        """Bytes at the peak of the fullest device."""
        return max(self.device_bytes)

    @property
    def device_bytes(self) -> list[float]:
        """Bytes that each device needs at its peak."""
        return [need.peak_bytes for need in self.needs]


def predict(task: PlanningTask, plan: ExecutionPlan) -> Prediction:
    """Predicts a plan that can run, run in its own order with its own offloaded models."""
    problem, native, events = simulated(task, plan)
    step_s = max(event.end_s for event in events) / problem.steps
    needs = device_needs(native, [0] * len(problem.calls))
    call_s = {call.name: call.options[0].time_s for call in problem.calls}
    transfer_s = {transfer.name: transfer.seconds[0] for transfer in problem.transfers}
    beside = {name: transfer_s.pop(name) for name in task.graph.beside}
    filled = {name: structs.replace(call, predicted_s=call_s[name]) for name, call in plan.calls.items()}
    return Prediction(
        plan=structs.replace(plan, calls=filled, beside=beside, predicted_step_s=step_s),
        call_s=call_s | beside,
        transfer_s=transfer_s,
        step_s=step_s,
        needs=needs,
        fits=max(need.peak_bytes for need in needs) <= task.cluster.device_memory_bytes,
    )


def simulated(task: PlanningTask, plan: ExecutionPlan) -> tuple[Problem, NativeProblem, list[Event]]:
    """The tables of a plan, and what happens in the problem's unrolled steps in the plan's own order."""
    problem = problem_of(task, plan)
    native, number = native_problem(problem), problem.numbers()
    order = with_loads(plan.unrolled(task.graph, problem.steps), loads_of(task.graph, plan.offload))
    numbered = [(number[name], step) for name, step in order]
    return problem, native, simulate(native, [0] * len(problem.calls), problem.steps, numbered)


def problem_of(task: PlanningTask, plan: ExecutionPlan) -> Problem:
    """The tables of a plan's own options, one for each call, with its models in host memory and steps in flight."""
    options = {name: [option_of(call)] for name, call in plan.calls.items()}
    within = task.varied(offload=plan.offload, max_steps_in_flight=plan.max_steps_in_flight)
    return build_problem(
        within,
        options,
        reallocations=Reallocation.table,
        copies=plan.copies,
        broadcasts=plan.broadcasts,
        changes=plan.changes,
    )


def preemptions(task: PlanningTask, plan: ExecutionPlan) -> dict[str, float]:
    """By name of each generate call whose KV cache has no room for all sequences: how often one loses its place in a
    step, expected of a data-parallel rank."""
    works = {
        name: task.call_models[name].under(call.compute).work(call.strategy, call.micro_batches)
        for name, call in plan.calls.items()
        if task.graph.model_calls[name].generates
    }
    return {name: work.preemptions for name, work in works.items() if work.waits}


def predict_in_best_order(task: PlanningTask, plan: ExecutionPlan) -> Prediction:
    """The prediction of the plan in the fastest of the orders that a simulation suggests."""
    return fastest_order(task, plan, native_problem(problem_of(task, plan)), [0] * len(plan.calls))


def fastest_order(task: PlanningTask, plan: ExecutionPlan, native: NativeProblem, choice: Sequence[int]) -> Prediction:
    """The prediction of the plan in the fastest of the orders that can be run and agree with a simulation of `choice`,
    the plan's options in the problem."""
    names, steps = task.graph.nodes, 2 * plan.max_steps_in_flight + 6  # two periods of a steady state at least
    events = simulate(native, choice, steps)
    starts = [(names[event.node], event.step, event.start_s) for event in events if event.node < len(names)]
    orders = possible_orders(starts, plan, task.graph)
    predictions = [predict(task, structs.replace(plan, order=order)) for order in orders]
    return min(predictions, key=lambda prediction: prediction.step_s)


def with_copies_in_place(task: PlanningTask, plan: ExecutionPlan) -> ExecutionPlan | None:
    """The plan with no more copies filled in place (`CallCompute.in_place`) than it needs to fit into memory; None
    where it does not fit with all of them."""

    def filled(names: Sequence[str]) -> ExecutionPlan:
        calls = {
            name: structs.replace(call, compute=structs.replace(call.compute, in_place=True)) if name in names else call
            for name, call in plan.calls.items()
        }
        return structs.replace(plan, calls=calls)

    def fits(names: Sequence[str]) -> bool:
        problem = problem_of(task, filled(names))
        needs = device_needs(native_problem(problem), [0] * len(problem.calls))
        return max(need.peak_bytes for need in needs) <= task.cluster.device_memory_bytes

    chosen = [call.name for call in problem_of(task, plan).calls if call.spared]
    if not fits(chosen):
        return None
    for name in list(chosen):
        if fits(rest := [other for other in chosen if other != name]):
            chosen = rest
    return filled(chosen)


def possible_orders(starts: Sequence[tuple[str, int, float]], plan: ExecutionPlan, graph: DataflowGraph) -> list[Order]:
    """Orders that agree with the simulated `starts`, (call, step, start_s), and can be run; the last one, step after
    step, always can.

    A period, from the start of one call of step t to its start in step t + 1, is an order if every call starts exactly
    once in it and the next period looks the same. Not every call that begins one gives steps back within bounds.
    """
    # Stable: where several start at once, what the simulation took first comes first.
    sequence = [(call, step) for call, step, _ in sorted(starts, key=lambda start: start[2])]
    middle = plan.max_steps_in_flight + 2
    orders = []
    for call in graph.model_calls:
        first = _period(sequence, call, middle)
        if first is not None and first == _period(sequence, call, middle + 1) and first not in orders:
            orders.append(first)
    within_step = tuple(OrderEntry(call=call) for call, step in sequence if step == middle)
    found = (*orders, within_step)
    runnable = [order for order in found if not problem_of_order(structs.replace(plan, order=order), graph)]
    assert within_step in runnable, "a simulation keeps the order of the edges within a step"
    return runnable


def _period(sequence: Sequence[tuple[str, int]], beginning: str, step: int) -> Order | None:
    """The calls from (beginning, step) to before (beginning, step + 1); None unless each call is there once."""
    part = sequence[sequence.index((beginning, step)) : sequence.index((beginning, step + 1))]
    calls = {call for call, _ in sequence}
    if len(part) != len(calls) or {call for call, _ in part} != calls:
        return None
    return tuple(OrderEntry(call=call, steps_back=step - of_step) for call, of_step in part)
