"""How sure predictions are: plans re-priced in the same draws of all that their costs are not sure of."""

import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from realhf.dataflow.plan import CallPlan, ExecutionPlan, Intervals
from realhf.planning.model.experience import CallError, expected
from realhf.planning.model.gaussian import covariance_of, square_root, standard_draws
from realhf.planning.model.timings import Costs
from realhf.planning.predict import Prediction, problem_of, simulated
from realhf.planning.problem.native import Event
from realhf.planning.problem.option_rows import seconds_of
from realhf.planning.task import PlanningTask

COUNT, SEED = 128, 0
LEVEL = 0.9  # probability of an interval
DIGITS = 4
# The time of a transfer is a weighted sum of these constants (of their inverses) and parts.
OF_TRANSFERS = (
    "intra_node_bandwidth", "intra_node_latency_s", "inter_node_bandwidth", "inter_node_send_bandwidth",
    "inter_node_shared_bandwidth", "inter_node_latency_s", "host_bandwidth", "reallocation",
)  # fmt: skip


@dataclass(frozen=True)
class PlanDraws:
    """Seconds of a plan's step, and of its calls by name, in every draw [draws]."""

    step_s: np.ndarray
    call_s: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Draws:
    """What a task's costs are not sure of, in several draws: `factors` [draws, names] of the hardware's constants and
    of the parts of profiles. With `errors` each call is off by a factor of its own besides (`Costs.call_error`), the
    same for all plans."""

    task: PlanningTask
    names: tuple[str, ...]
    factors: np.ndarray
    errors: bool = True
    seed: int = SEED
    _known: dict[Hashable, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return len(self.factors)

    @cached_property
    def tasks(self) -> tuple[PlanningTask, ...]:
        """The task with the costs of each draw."""
        return tuple(with_factors(self.task, self.names, row) for row in self.factors)

    def of(self, prediction: Prediction) -> PlanDraws:
        """The seconds of a predicted plan, its calls and transfers re-priced, in the order that it has."""
        plan = prediction.plan
        calls = {name: self._call_s(name, call) for name, call in plan.calls.items()}
        of_beside = expected((), "", "", self.task.costs.hardware.sureness.call_error)
        beside = {name: seconds * self._error(name, "", of_beside) for name, seconds in plan.beside.items()}
        problem, _, events = simulated(self.task, plan)
        durations = [calls[call.name] for call in problem.calls]
        changes = []
        for name in self._of_transfers(plan):
            # The power of the constant that a part of the time is proportional to; with a doubled rate it is halved.
            power = -1 if name.endswith("bandwidth") else 1
            doubled = problem_of(with_factors(self.task, [name], [2.0]), plan).transfers
            changes.append((doubled, 2.0**power - 1, self.factors[:, self.names.index(name)] ** power - 1))
        for number, transfer in enumerate(problem.transfers):
            seconds = transfer.seconds[0]
            if transfer.name in beside:
                durations.append(beside[transfer.name])
                continue
            drawn_s = np.full(self.count, seconds)
            for doubled, by_doubling, by_draws in changes:
                drawn_s += (doubled[number].seconds[0] - seconds) / by_doubling * by_draws
            durations.append(np.maximum(drawn_s, 0.0))
        return PlanDraws(step_s=_end_s(events, durations) / problem.steps, call_s=calls | beside)

    def _call_s(self, name: str, call: CallPlan) -> np.ndarray:
        layout, shape = call.layout, (call.layout.strategy, call.micro_batches)
        key = name, *shape, call.compute
        if key not in self._known:
            drawn_s = [seconds_of(task, task.call_models[name].under(call.compute), *shape) for task in self.tasks]
            self._known[key] = np.array(drawn_s)
        expected = self.task.call_models[name].under(call.compute).expected(*shape)
        seconds: np.ndarray = self._known[key] * self._error(name, str(layout), expected)
        return seconds

    def _error(self, call: str, option: str, expected: CallError) -> np.ndarray:
        """The factor between a call's time and its prediction, in every draw."""
        if not self.errors:
            return np.ones(self.count)
        keys = {"run": expected.run, call: expected.call, f"{call}: {option}": expected.option}
        seeds = {key: zlib.crc32(f"{self.seed} {key}".encode()) for key in keys}
        normal = {key: standard_draws(1, self.count, seed)[:, 0] for key, seed in seeds.items()}
        error: np.ndarray = np.exp(np.sum([size * normal[key] for key, size in keys.items()], axis=0))
        return error

    def _of_transfers(self, plan: ExecutionPlan) -> list[str]:
        """Names that a transfer's time can depend on."""
        is_one_node = self.task.cluster.num_nodes == 1
        return [
            name
            for name in OF_TRANSFERS
            if name in self.names
            and not (is_one_node and name.startswith("inter_node"))
            and (name != "host_bandwidth" or plan.offload)
        ]


@dataclass(frozen=True)
class Doubt:
    """`names` of the hardware's constants and of the parts of profiles, and the covariance [names, names] of their
    logarithms."""

    names: tuple[str, ...]
    covariance: np.ndarray

    @property
    def spread(self) -> np.ndarray:
        """Standard deviations, [names]."""
        return np.sqrt(np.diag(self.covariance))


def doubt_of(costs: Costs) -> Doubt:
    """The uncertainty in the description (`Uncertainty`) and the profiles (`Costs.part_spread`) of these costs."""
    stated, parts = costs.hardware.sureness, costs.part_spread
    number = len(stated.spread)
    covariance = np.zeros((number + len(parts), number + len(parts)))
    covariance[:number, :number] = covariance_of(stated)
    covariance[number:, number:] = np.diag(np.square(list(parts.values())))
    return Doubt((*stated.spread, *parts), covariance)


def drawn(task: PlanningTask, count: int = COUNT, seed: int = SEED) -> Draws:
    """Random draws; the same for the same arguments."""
    doubt = doubt_of(task.costs)
    normal = standard_draws(len(doubt.names), count, seed)
    return Draws(task, doubt.names, np.exp(normal @ square_root(doubt.covariance).T), seed=seed)


def at_ends(task: PlanningTask) -> Draws:
    """Without errors of calls: two draws for each name, with it at the lower and at the upper end of its interval and
    all others where they are."""
    doubt = doubt_of(task.costs)
    reach = np.exp(NormalDist().inv_cdf((1 + LEVEL) / 2) * doubt.spread)
    factors = np.ones((len(doubt.names), 2, len(doubt.names)))
    for number, factor in enumerate(reach):
        factors[number, :, number] = 1 / factor, factor
    return Draws(task, doubt.names, factors.reshape(2 * len(doubt.names), len(doubt.names)), errors=False)


def with_factors(task: PlanningTask, names: Sequence[str], factors: Sequence[float]) -> PlanningTask:
    """The task whose costs have these constants and parts times these factors."""
    costs: Costs = task.costs.scaled(dict(zip(names, map(float, factors), strict=True)))
    return replace(task, costs=costs)


def _end_s(events: Sequence[Event], durations: Sequence[np.ndarray]) -> np.ndarray:
    """When the last event ends in every draw: each waits for those that it waited for in the prediction's simulation,
    and takes the time of its node."""
    ends: list[np.ndarray] = []
    for event in events:
        start = np.maximum.reduce([ends[other] for other in event.waits_for]) if event.waits_for else 0.0
        ends.append(start + durations[event.node])
    result: np.ndarray = np.maximum.reduce(ends)
    return result


def interval(draws: np.ndarray, predicted: float) -> tuple[float, float]:
    """The middle LEVEL of the draws in DIGITS digits, widened to have the prediction in it."""
    low, high = map(rounded, np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return min(low, predicted), max(high, predicted)


def rounded(value: float) -> float:
    """In DIGITS digits: the last bits of draws are not the same on every machine."""
    return float(f"{value:.{DIGITS}g}")


def intervals_of(draws: Draws, prediction: Prediction) -> Intervals:
    """The intervals of a predicted plan: of its step, and of its calls by name."""
    found = draws.of(prediction)
    return Intervals(
        step_s=interval(found.step_s, prediction.step_s),
        call_s={name: interval(found.call_s[name], seconds) for name, seconds in prediction.call_s.items()},
    )


def probability_faster(one: PlanDraws, other: PlanDraws) -> float:
    """That a step of `one` takes less than one of `other`; where they tie in a draw, each is faster in half of it."""
    return float(np.mean((one.step_s < other.step_s) + 0.5 * (one.step_s == other.step_s)))
