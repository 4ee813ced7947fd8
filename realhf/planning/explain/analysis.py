"""Why a plan takes as long as it does: its timeline, its longest chain, its busiest device, its memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from realhf.planning.predict import Prediction, simulated
from realhf.planning.problem.native import Event
from realhf.planning.problem.tables import Problem
from realhf.planning.task import PlanningTask

TRANSFER, REALLOCATION, OFFLOAD, COMPUTE = "transfer", "reallocation", "offload", "compute"
BESIDE = "beside"  # a call that occupies no device


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
    """The steady state of a plan, simulated over the problem's unrolled steps in its own order.

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
        """The bottleneck in a few words."""
        parts = [f"{name} {share:.0%}" for name, share in list(self.chain.items())[:3]]
        return (
            f"the longest chain of calls ({', '.join(parts)}); the busiest device, {self.busiest_device}, is busy for "
            f"{self.busy:.0%} of the time"
        )


def analyse(task: PlanningTask, prediction: Prediction) -> Analysis:
    """Simulates a predicted plan once more and keeps what happened."""
    problem, _, events = simulated(task, prediction.plan)
    devices = occupied(problem, [0] * len(problem.calls))
    spans = tuple(_span(problem, devices[event.node], event) for event in events)
    whole_s = max(event.end_s for event in events)
    busy: Counter[int] = Counter()
    for span in spans:
        for device in span.devices:
            busy[device] += span.end_s - span.start_s  # type: ignore[assignment]
    busiest = min(range(problem.num_devices), key=lambda d: (-busy[d], d))
    tokens_per_s = task.tokens_per_step / prediction.step_s
    return Analysis(
        prediction=prediction,
        tokens_per_s=tokens_per_s,
        gpu_hours_per_million_tokens=task.cluster.num_devices * 1e6 / tokens_per_s / 3600,
        spans=spans,
        chain=_chain(events, spans, whole_s),
        busiest_device=busiest,
        busy=busy[busiest] / whole_s,
    )


def occupied(problem: Problem, choice: Sequence[int]) -> list[tuple[int, ...]]:
    """The devices that each node occupies under a choice of options, ascending."""
    of_calls: dict[str, range] = {}
    for call, option in zip(problem.calls, choice, strict=True):
        first, size = call.options[option].devices
        of_calls[call.name] = range(first, first + size)
    of_transfers = (set[int]().union(*(of_calls[name] for name in move.on)) for move in problem.transfers)
    return [tuple(sorted(devices)) for devices in (*of_calls.values(), *of_transfers)]


def _span(problem: Problem, devices: tuple[int, ...], event: Event) -> Span:
    name, kind = problem.nodes[event.node].name, COMPUTE
    if event.node >= len(problem.calls) and not problem.transfers[event.node - len(problem.calls)].on:
        kind = BESIDE
    elif event.node >= len(problem.calls):
        kind = {"data:": TRANSFER, "load": OFFLOAD, "offload": OFFLOAD}.get(name.partition(" ")[0], REALLOCATION)
    return Span(name, kind, event.step, event.start_s, event.end_s, devices)


def _chain(events: Sequence[Event], spans: Sequence[Span], whole_s: float) -> dict[str, float]:
    """From the last event backwards, each time over the last one that it waited for."""
    parts: Counter[str] = Counter()
    current: int | None = max(range(len(events)), key=lambda i: events[i].end_s)
    while current is not None:
        event, span = events[current], spans[current]
        name = span.name if span.kind in (COMPUTE, BESIDE) else span.kind
        parts[name] += event.end_s - event.start_s  # type: ignore[assignment]
        current = max(event.waits_for, key=lambda i: (events[i].end_s, i), default=None)
    return {name: share / whole_s for name, share in parts.most_common() if share > 0}
