"""The order in which the master issues calls, read off a simulation (ReaL, Algorithm 1)."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import ExecutionPlan, OrderEntry, check_plan

Order = tuple[OrderEntry, ...]

# (call, step, start_s) of the simulated calls, in the order in which the simulation took them
Starts = Sequence[tuple[str, int, float]]


def steps_to_simulate(max_steps_in_flight: int) -> int:
    """Steps after which a simulation shows at least two periods of its steady state, if it has one."""
    return 2 * max_steps_in_flight + 6


def possible_orders(starts: Starts, plan: ExecutionPlan, graph: DataflowGraph, batch_size: int) -> list[Order]:
    """Orders that agree with the simulated starts and can be run; the last one, step after step, always can.

    A period reaches from the start of one call of step t to its start in step t + 1. It is an
    order if every call starts exactly once in it and the next period looks the same. Any call may begin the period:
    not every choice gives steps back within bounds.
    """
    # Stable: where several start at once, what the simulation took first comes first.
    sequence = [(call, step) for call, step, _ in sorted(starts, key=lambda start: start[2])]
    middle = plan.max_steps_in_flight + 2
    orders = []
    for call in graph.calls:
        first = _period(sequence, call, middle)
        if first is not None and first == _period(sequence, call, middle + 1) and first not in orders:
            orders.append(first)
    within_step = tuple(OrderEntry(call=call) for call, step in sequence if step == middle)
    candidates = [*orders, within_step]
    runnable = [order for order in candidates if _can_run(order, plan, graph, batch_size)]
    assert within_step in runnable, "a simulation keeps the order of the edges within a step"
    return runnable


def _period(sequence: Sequence[tuple[str, int]], beginning: str, step: int) -> Order | None:
    """The calls from (beginning, step) to before (beginning, step + 1); None unless each call is there once."""
    part = sequence[sequence.index((beginning, step)) : sequence.index((beginning, step + 1))]
    calls = {call for call, _ in sequence}
    if len(part) != len(calls) or {call for call, _ in part} != calls:
        return None
    return tuple(OrderEntry(call=call, steps_back=step - of_step) for call, of_step in part)


def _can_run(order: Iterable[OrderEntry], plan: ExecutionPlan, graph: DataflowGraph, batch_size: int) -> bool:
    try:
        check_plan(replace(plan, order=tuple(order)), graph, batch_size)
    except UserError:
        return False
    return True
