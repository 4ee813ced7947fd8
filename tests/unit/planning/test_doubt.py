"""Draws of what a plan may take, and on which constants a comparison hinges, by hand."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.planning import intervals
from realhf.planning.explain import hinges as hinge_module
from realhf.planning.explain.hinges import Hinge, hinges
from realhf.planning.intervals import Doubt, Draws, PlanDraws, at_ends, drawn, interval, probability_faster, rounded
from realhf.planning.model.gaussian import standard_draws
from realhf.planning.model.profile import PARTS
from realhf.planning.predict import Prediction, predict
from realhf.planning.task import with_staleness
from tests.unit.planning.graphs import cpu_cluster, ppo, settings, task_of
from tests.unit.planning.test_choices import TASK, predicted

# --- intervals


def test_numbers_in_four_digits() -> None:
    assert [rounded(value) for value in (1.23456, 123456.0, 0.000123456, 2.0)] == [1.235, 123500.0, 0.0001235, 2.0]
    draws = np.arange(2001.0)
    assert interval(draws, 0.0) == (0.0, 1900.0)
    assert interval(draws, 5000.0) == (100.0, 5000.0)


def test_a_tie_is_half_a_win() -> None:
    one, other = (PlanDraws(step_s=np.array(s), call_s={}) for s in ([1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 2.0]))
    assert probability_faster(one, other) == (1 + 0.5) / 4
    assert probability_faster(other, one) == (2 + 0.5) / 4


def test_the_draws_of_a_task() -> None:
    draws = drawn(TASK)
    assert (draws.count, draws.seed, draws.errors) == (128, 0, True)
    assert np.array_equal(draws.factors, drawn(TASK, 128, 0).factors)
    assert not np.array_equal(draws.factors, drawn(TASK, 128, 1).factors)
    assert drawn(TASK, 3, 5).seed == 5
    assert draws.names == intervals.doubt_of(TASK.costs).names


DOUBT = Doubt(("intra_node_bandwidth", "layers"), np.diag([0.25, 0.04]))


def test_each_constant_at_both_ends_of_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "doubt_of", lambda costs: DOUBT if costs is TASK.costs else None)
    found = at_ends(TASK)
    assert (found.names, found.errors, found.count) == (DOUBT.names, False, 4)
    first, second = math.exp(1.6448536 * 0.5), math.exp(1.6448536 * 0.2)
    assert found.factors == pytest.approx(np.array([[1 / first, 1], [first, 1], [1, 1 / second], [1, second]]))
    assert DOUBT.spread == pytest.approx([0.5, 0.2])


def test_errors_of_calls_are_drawn_by_their_names() -> None:
    """A factor of the run, of the call and of its option each; the same wherever they are asked for."""
    draws = Draws(TASK, (), np.ones((3, 0)), seed=5)
    sizes: Any = SimpleNamespace(run=0.1, call=0.2, option=0.3)

    def normal(key: str) -> np.ndarray:
        return standard_draws(1, 3, zlib.crc32(f"5 {key}".encode()))[:, 0]

    expected = np.exp(0.1 * normal("run") + 0.2 * normal("a") + 0.3 * normal("a: dp2"))
    assert draws._error("a", "dp2", sizes) == pytest.approx(expected)
    assert replace(draws, errors=False)._error("a", "dp2", sizes) == pytest.approx([1, 1, 1])


def test_without_doubt_a_draw_is_the_prediction_whatever_the_steps_in_flight() -> None:
    """Those of the plan count, and not the task's."""
    graph = with_staleness(ppo(), 1)
    task = task_of(graph, **settings(graph, cpu_cluster(2)))
    calls = {name: CallPlan(devices=(int(name == "actor_generate"), 1)) for name in graph.model_calls}
    found = []
    for in_flight in (1, 2, 3):
        prediction = predict(task, structs.replace(task.plan(calls), max_steps_in_flight=in_flight))
        draws = Draws(task, (), np.ones((2, 0)), errors=False).of(prediction)
        assert draws.step_s == pytest.approx([prediction.step_s] * 2)
        found.append(prediction.step_s)
    assert found[2] != pytest.approx(found[1])


ALL = ("inter_node_bandwidth", "intra_node_latency_s", "host_bandwidth", "reallocation", "memory_bandwidth")


@pytest.mark.parametrize(
    ("nodes", "offload", "names"),
    [
        (1, (), ["intra_node_latency_s", "reallocation"]),
        (2, (), ["intra_node_latency_s", "inter_node_bandwidth", "reallocation"]),
        (1, ("ref",), ["intra_node_latency_s", "host_bandwidth", "reallocation"]),
    ],
)
def test_what_the_times_of_transfers_can_depend_on(nodes: int, offload: tuple[str, ...], names: list[str]) -> None:
    task = replace(TASK, cluster=cpu_cluster(2, num_nodes=nodes))
    draws = Draws(task, ALL, np.ones((1, len(ALL))))
    plan = ExecutionPlan(num_devices=1, calls={}, offload=offload)
    assert draws._of_transfers(plan) == names


# --- hinges


class Ends:
    """Of constants at their ends; `steps` by the seconds of a prediction."""

    def __init__(
        self, steps: Mapping[float, Sequence[float]], factors: Any = None, costs: Any = None, names: Any = ()
    ) -> None:
        self.steps, self.factors, self.names = steps, factors, names
        self.task = SimpleNamespace(costs=costs)

    def of(self, prediction: Prediction) -> PlanDraws:
        return PlanDraws(step_s=np.array(self.steps[prediction.step_s]), call_s={})


NAMES = ("intra_node_bandwidth", "layers", "memory_bandwidth")


def hinge_of(monkeypatch: pytest.MonkeyPatch, margins: Sequence[float], *, profiled: bool = False) -> list[Hinge]:
    """For a plan of 1 s and a rival of 1.1 s, which is slower by these parts at the ends of each constant."""
    hardware = SimpleNamespace(constant=lambda name: {"intra_node_bandwidth": 1e9}.get(name, 3.0))
    costs = SimpleNamespace(
        profiled=profiled, hardware=hardware, timings=["m", "n"], call_error=lambda model: {"m": 0.1, "n": 0.2}[model]
    )
    draws: Any = Ends({1.0: [1.0] * 4, 1.1: [0.9, 1.1, 1.2, 1.0]}, costs=costs)
    factors = np.array([[0.5, 1, 1], [2.0, 1, 1], [1, 0.8, 1], [1, 1.25, 1], [1, 1, 0.9], [1, 1, 1.1]])
    ends = Ends({1.0: [2.0] * 6, 1.1: [2.0 * (1 + margin) for margin in margins]}, factors, names=NAMES)
    monkeypatch.setattr(hinge_module, "at_ends", lambda task: ends if task is draws.task else None)
    monkeypatch.setattr(hinge_module, "PARTS", ("layers",))
    monkeypatch.setattr(hinge_module, "measurement_of", lambda name: f"of {name}")
    return hinges(draws, predicted(1.0), {"rival": predicted(1.1)})


def test_constants_that_decide_come_by_how_much_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their own unit, or as times of what was measured."""
    found = hinge_of(monkeypatch, [-0.1, 0.1, 0.3, -0.3, 0.1, 0.9])
    common: dict[str, Any] = {"rival": "rival", "slower": 0.625}
    assert found == [
        Hinge(**common, constant="layers", low=0.8, high=1.25, measurement="of layers"),
        Hinge(**common, constant="intra_node_bandwidth", low=5e8, high=2e9, measurement="of intra_node_bandwidth"),
    ]
    assert hinge_of(monkeypatch, [0.0, 0.1, 0.3, 0.3, -0.9, 0.0], profiled=True) == []


def test_where_no_constant_decides_calls_without_profiles_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the least sure of the models may be off."""
    [hinge] = hinge_of(monkeypatch, [0.1] * 6)
    high = rounded(math.exp(1.6448536 * 0.2))
    assert hinge == Hinge(
        rival="rival", slower=0.625, constant="calls", low=rounded(1 / math.exp(1.6448536 * 0.2)), high=high,
        measurement="layers",
    )  # fmt: skip
    assert hinge_of(monkeypatch, [0.1] * 6, profiled=True) == []


def test_only_rivals_that_may_be_faster_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest; none that takes three times as long, is as fast in every draw, or is surely slower."""
    sure = [1.1] * 19 + [0.9]
    steps: dict[float, Sequence[float]] = {
        1.0: [1.0] * 20, 3.0: [0.5] * 20, 1.01: [1.0] * 20, 1.02: sure, 1.03: [1.1] * 13 + [0.9] * 7,
        1.04: [1.1] * 12 + [0.9] * 8, 2.9: [1.1] * 14 + [0.9] * 6,
    }  # fmt: skip
    costs = SimpleNamespace(profiled=True, hardware="hardware")
    draws: Any = Ends(steps, costs=costs)
    ends = Ends({s: [s - 0.02 * (s > 1), s] for s in steps}, np.array([[0.5], [2.0]]), names=("layers",))
    monkeypatch.setattr(hinge_module, "at_ends", lambda task: ends)
    monkeypatch.setattr(hinge_module, "measurement_of", lambda name: name)
    assert hinges(draws, predicted(1.0), {str(s): predicted(s) for s in (3.0, 1.01, 1.02)}) == []
    ends.steps = {s: [s - 0.05 * (s > 1), s] for s in steps} | {2.9: [0.9, 2.9]}
    [found] = hinges(draws, predicted(1.0), {str(s): predicted(s) for s in steps if s > 1})
    assert (found.rival, found.slower) == ("1.04", 0.6)
    [other] = hinges(draws, predicted(1.0), {"near": predicted(2.9)})
    assert (other.rival, other.slower) == ("near", 0.7)


@pytest.mark.parametrize(
    ("constant", "measurement", "what", "words"),
    [
        ("calls", "layers", "how far calls are from their predictions (0.50 to 1500000.00 times)", "--only layers"),
        (
            PARTS[0],
            "layers",
            f"the measured {PARTS[0]} (0.50 to 1500000.00 times what the profile has)",
            "--only layers",
        ),
        ("host_bandwidth", "links", "host_bandwidth (0.5 to 1.5e+06)", "--only links"),
        (
            "inter_node_latency_s",
            "network",
            "inter_node_latency_s (0.5 to 1.5e+06)",
            "--launcher slurm --only network",
        ),
    ],
)
def test_hinges_in_words(constant: str, measurement: str, what: str, words: str) -> None:
    hinge = Hinge(rival="split", slower=0.625, constant=constant, low=0.5, high=1.5e6, measurement=measurement)
    assert str(hinge) == (
        f"split is slower with a probability of 62% only; which is faster hinges on {what}: `realhf profile EXPERIMENT "
        f"{words}` measures that in a few minutes"
    )
