"""A plan of a cell with its prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from lib.breakdown import DATA, DATA_TRANSFER, IDLE, REALLOCATION, device_time_shares
from lib.papers.cells import Cell

from realhf.dataflow.plan import ExecutionPlan
from realhf.planning.model.hardware import Hardware
from realhf.planning.options import Option, chosen, option_of
from realhf.planning.predict import Prediction, simulated
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import SearchRequest, native_problem, search_problem
from realhf.planning.request import SearchBudget
from realhf.planning.task import PlanningTask

BUDGET = SearchBudget(evaluations=5_000)  # among the options of a given placement


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """A call of a plan; `seconds` alone, `communication_s` of them in messages."""

    name: str
    first: int
    num_devices: int
    dp: int
    tp: int
    pp: int
    micro_batches: int
    seconds: float
    communication_s: float


@dataclass(frozen=True, kw_only=True)
class Span:
    """A call of a simulated step."""

    name: str
    step: int
    first: int
    num_devices: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Planned:
    """`shares` of device time: each call by name, reallocation, data transfer, idle. `reallocation_s` of all moves of
    parameters in a step; `spans` of the simulated steps."""

    step_s: float
    reallocation_s: float
    calls: tuple[PlannedCall, ...]
    shares: Mapping[str, float]
    spans: tuple[Span, ...]

    def call(self, name: str) -> PlannedCall:
        return next(call for call in self.calls if call.name == name)

    @property
    def by_kind(self) -> dict[str, float]:
        """Shares of device time: compute (launches and pipeline bubbles too), communication of calls, reallocation,
        data transfer, idle between calls."""
        communication = sum(
            self.shares[call.name] * call.communication_s / call.seconds for call in self.calls if call.seconds
        )
        rest = {name: self.shares[name] for name in (REALLOCATION, DATA_TRANSFER, IDLE)}
        return {"compute": 1 - communication - sum(rest.values()), "communication": communication, **rest}


def fastest(task: PlanningTask, options: Mapping[str, Sequence[Option]]) -> ExecutionPlan | None:
    """The fastest plan found among the options of every call; None if one has none, or nothing fits."""
    if not all(options.values()):
        return None
    native = native_problem(build_problem(task, options))
    found = search_problem(native, SearchRequest(budget=BUDGET, seed=0, proves=False))
    return task.plan(chosen(options, found.choice)) if found.feasible else None


def planned(cell: Cell, task: PlanningTask, prediction: Prediction) -> Planned:
    """What a prediction says of a plan of `task`, which is the cell's, perhaps for another engine."""
    plan, free = prediction.plan, cell.task(_free_links(task.costs.hardware), task.costs.features)
    problem, _, events = simulated(task, plan)
    calls = []
    for name, call in plan.calls.items():
        option, seconds = option_of(call), prediction.call_s[name]
        calls.append(
            PlannedCall(
                name=name,
                first=call.mesh.first,
                num_devices=call.mesh.size,
                dp=call.dp,
                tp=call.tp,
                pp=call.pp,
                micro_batches=option.micro_batches,
                seconds=seconds,
                communication_s=max(seconds - free.call_models[name].under(call.compute).seconds(*option.shape), 0.0),
            )
        )
    return Planned(
        step_s=prediction.step_s,
        reallocation_s=sum(s for name, s in prediction.transfer_s.items() if not name.startswith(DATA)),
        calls=tuple(calls),
        shares=device_time_shares(problem, [0] * len(problem.calls), events),
        spans=tuple(
            Span(
                name=calls[event.node].name,
                step=event.step,
                first=calls[event.node].first,
                num_devices=calls[event.node].num_devices,
                start_s=event.start_s,
                end_s=event.end_s,
            )
            for event in events
            if event.node < len(calls)
        ),
    )


def _free_links(hardware: Hardware) -> Hardware:
    """The same devices, with links that take no time: what is left is not communication."""
    rates: dict[str, float | None] = dict.fromkeys(("intra_node_bandwidth", "inter_node_bandwidth"), 1e24)
    rates |= dict.fromkeys(("inter_node_send_bandwidth", "inter_node_shared_bandwidth"), None)
    latencies = dict.fromkeys(("intra_node_latency_s", "inter_node_latency_s"), 0.0)
    return msgspec.structs.replace(hardware, **rates, **latencies)
