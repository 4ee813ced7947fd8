"""Why a plan takes as long as it does: its timeline, its longest chain, its busiest device, its memory."""

from collections import Counter
from dataclasses import dataclass

from realhf.planning.predict import Prediction, problem_of, sequence_of
from realhf.planning.problem.simulation import Event, Simulation, makespan_s, simulate
from realhf.planning.problem.tables import Problem
from realhf.planning.task import PlanningTask

TRANSFER, REALLOCATION, OFFLOAD, COMPUTE = "transfer", "reallocation", "offload", "compute"
BESIDE = "beside"  # a call that occupies no device
_ROUNDING_S = 1e-9


@dataclass(frozen=True)
class Span:
    """Devices `devices` were busy with `name` of step `step`."""

    name: str
    kind: str
    step: int
    start_s: float
    end_s: float
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What a plan does in steady state, simulated over the problem's unrolled steps in its own order.

    `chain` has, for every call and kind of transfer on the longest chain of waiting, its part of the
    whole time, largest first; `busiest_device` computes or sends for `busy` of the time.
    """

    prediction: Prediction
    tokens_per_s: float
    gpu_hours_per_million_tokens: float
    spans: tuple[Span, ...]
    chain: dict[str, float]
    busiest_device: int
    busy: float

    @property
    def step_s(self) -> float:
        return self.prediction.step_s

    @property
    def bottleneck(self) -> str:
        """The largest part of the longest chain."""
        name, share = next(iter(self.chain.items()))
        return f"{name} {share:.0%}"

    @property
    def limits(self) -> str:
        """What would have to become faster, in a few words."""
        parts = [f"{name} {share:.0%}" for name, share in list(self.chain.items())[:3]]
        return (
            f"the longest chain of calls ({', '.join(parts)}); the busiest device, {self.busiest_device}, is busy for "
            f"{self.busy:.0%} of the time"
        )


def analyse(task: PlanningTask, prediction: Prediction) -> Analysis:
    """Simulates a predicted plan once more and keeps what happened."""
    plan = prediction.plan
    problem = problem_of(task, plan)
    choice = [0] * len(problem.calls)
    simulation = Simulation(problem, choice)
    events = simulate(problem, choice, problem.steps, sequence_of(plan, task.graph, problem))
    spans = tuple(_span(problem, simulation, event) for event in events)
    whole_s = makespan_s(events)
    busy: Counter[int] = Counter()
    for span in spans:
        for device in span.devices:
            busy[device] += span.end_s - span.start_s  # type: ignore[assignment]
    device = min(range(problem.num_devices), key=lambda d: (-busy[d], d))
    tokens_per_s = task.tokens_per_step / prediction.step_s
    return Analysis(
        prediction=prediction,
        tokens_per_s=tokens_per_s,
        gpu_hours_per_million_tokens=task.cluster.num_devices * 1e6 / tokens_per_s / 3600,
        spans=spans,
        chain=_chain(simulation, events, spans, whole_s),
        busiest_device=device,
        busy=busy[device] / whole_s,
    )


def _span(problem: Problem, simulation: Simulation, event: Event) -> Span:
    name, kind = problem.nodes[event.node].name, COMPUTE
    if event.node >= len(problem.calls) and not problem.transfers[event.node - len(problem.calls)].on:
        kind = BESIDE
    elif event.node >= len(problem.calls):
        kind = {"data:": TRANSFER, "load": OFFLOAD, "offload": OFFLOAD}.get(name.partition(" ")[0], REALLOCATION)
    devices = tuple(sorted(simulation.devices[event.node]))
    return Span(name, kind, event.step, event.start_s, event.end_s, devices)


def _chain(simulation: Simulation, events: list[Event], spans: tuple[Span, ...], whole_s: float) -> dict[str, float]:
    """From the last event backwards, each time over what it waited for: a parent, or the devices' work before."""
    by_instance = {(event.step, event.node): i for i, event in enumerate(events)}
    parts: Counter[str] = Counter()
    current: int | None = max(range(len(events)), key=lambda i: events[i].end_s)
    while current is not None:
        event, span = events[current], spans[current]
        name = span.name if span.kind in (COMPUTE, BESIDE) else span.kind
        parts[name] += event.end_s - event.start_s  # type: ignore[assignment]
        devices = set(span.devices)
        parents = {by_instance[parent] for parent in simulation.parents(event.step, event.node)}
        # Events are in the order in which they took their devices: what came before is what was waited for.
        before = [i for i in range(current) if i in parents or devices & set(spans[i].devices)]
        current = max(
            (i for i in before if events[i].end_s <= event.start_s + _ROUNDING_S),
            key=lambda i: (events[i].end_s, i),
            default=None,
        )
    return {name: share / whole_s for name, share in parts.most_common() if share > 0}
