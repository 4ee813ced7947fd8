"""How sure predictions are: draws against predictions with other constants, intervals, probabilities, hinges."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from realhf.dataflow.plan import ExecutionPlan
from realhf.planning.explain.comparison import compare, describe, summary
from realhf.planning.explain.hinges import hinges
from realhf.planning.intervals import (
    Draws,
    at_ends,
    drawn,
    interval,
    intervals_of,
    probability_faster,
    with_factors,
)
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.uncertainty import Uncertainty
from realhf.planning.options import chosen
from realhf.planning.predict import predict
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import LENGTHS, all_options, ppo, task_of

CPU, H100 = load_hardware("cpu"), load_hardware("h100")
SURE = Uncertainty(spread={}, call_error=0.0, profiled_error=0.0)


def task(hardware: Hardware = CPU, nodes: int = 1, devices: int = 2) -> PlanningTask:
    graph = ppo()
    cluster = Cluster(num_nodes=nodes, devices_per_node=devices, hardware=hardware)
    costs = load_costs(graph.models, dtype="float32", hardware=hardware)
    return task_of(graph, batch_size=16, workload=LENGTHS, cluster=cluster, costs=costs, dtype="float32")


def with_uncertainty(of: PlanningTask, uncertainty: Uncertainty) -> PlanningTask:
    hardware = structs.replace(of.costs.hardware, uncertainty=uncertainty)
    return replace(of, costs=replace(of.costs, hardware=hardware))


def random_plan(of: PlanningTask, seed: int) -> ExecutionPlan:
    draw = np.random.default_rng(seed)
    options = all_options(of)
    return of.plan(chosen(options, [int(draw.integers(len(rows))) for rows in options.values()]))


seeds = st.integers(0, 10**6)


@settings(max_examples=20)
@given(seeds)
def test_a_draw_is_the_prediction_with_its_constants(seed: int) -> None:
    """Calls exactly; transfers too, since their times are sums of delays and inverse rates. The order of the devices is
    that of the prediction, so that a step is compared where nothing changes."""
    of = task(H100, nodes=2)
    prediction = predict(of, random_plan(of, seed))
    names = tuple(H100.sureness.spread)
    factors = np.exp(np.random.default_rng(seed).normal(0, 0.5, (3, len(names))))
    found = Draws(of, names, np.concatenate([factors, np.ones((1, len(names)))]), errors=False).of(prediction)
    assert found.step_s[-1] == pytest.approx(prediction.step_s, rel=1e-12)
    for row, its in enumerate(factors):
        other = predict(with_factors(of, names, its), prediction.plan)
        assert {name: s[row] for name, s in found.call_s.items()} == pytest.approx(other.call_s)
    # A change that scales all times alike leaves the order, and scales the step.
    slower = [0.5 if name.endswith("bandwidth") or "flops" in name else 2.0 for name in names]
    twice = Draws(of, names, np.array([slower]), errors=False).of(prediction)
    assert twice.step_s[0] == pytest.approx(2 * prediction.step_s)


@settings(max_examples=20)
@given(seeds, st.sampled_from([CPU, H100]))
@pytest.mark.slow
def test_intervals_contain_the_prediction_and_widen_with_the_spread(seed: int, hardware: Hardware) -> None:
    of = task(hardware)
    prediction = predict(of, random_plan(of, seed))
    stated = hardware.sureness
    last_width = 0.0
    for scale in (0.0, 0.5, 1.0, 2.0):
        spread = {name: scale * value for name, value in stated.spread.items()}
        doubted = structs.replace(stated, spread=spread, call_error=scale * stated.call_error)
        found = intervals_of(drawn(with_uncertainty(of, doubted)), prediction)
        assert found.step_s[0] <= prediction.step_s <= found.step_s[1]
        for name, (low, high) in found.call_s.items():
            assert low <= prediction.call_s[name] <= high
        width = found.step_s[1] - found.step_s[0]
        assert width > last_width or scale == 0.0
        last_width = width
    sure = intervals_of(drawn(with_uncertainty(of, SURE)), prediction)
    # In four digits.
    assert sure.step_s == pytest.approx((prediction.step_s, prediction.step_s), rel=5e-4)


@settings(max_examples=20)
@given(seeds, seeds)
def test_one_of_two_plans_is_faster(one: int, other: int) -> None:
    of = task()
    draws = drawn(of)
    plans = [draws.of(predict(of, random_plan(of, seed))) for seed in (one, other)]
    there, back = probability_faster(*plans), probability_faster(*reversed(plans))
    assert there + back == pytest.approx(1.0)
    assert probability_faster(plans[0], plans[0]) == 0.5


def test_what_all_plans_share_cancels_in_a_comparison() -> None:
    """A machine that may be twice as slow says nothing of which plan is faster."""
    of = task()
    alike = Uncertainty(spread=dict(CPU.sureness.spread), correlation=(), call_error=0.0)
    rates = [name for name in alike.spread if "bandwidth" in name or "flops" in name]
    count = len(alike.spread)
    signs = np.array([-1.0 if name in rates else 1.0 for name in alike.spread])
    together = 0.999 * np.outer(signs, signs)
    rows = tuple(tuple(map(float, together[i, :i])) for i in range(1, count))
    of = with_uncertainty(of, structs.replace(alike, correlation=rows))
    draws = drawn(of)
    by_step = sorted((predict(of, random_plan(of, seed)) for seed in range(8)), key=lambda found: found.step_s)
    fast, slow = draws.of(by_step[0]), draws.of(by_step[-1])
    assert by_step[-1].step_s > 1.3 * by_step[0].step_s
    assert probability_faster(fast, slow) == 1.0
    # Each by itself is wide.
    assert np.quantile(fast.step_s, 0.95) > 1.3 * np.quantile(fast.step_s, 0.05)


def test_the_same_arguments_give_the_same_draws() -> None:
    of = task()
    prediction = predict(of, random_plan(of, 3))
    first, second, other = (drawn(of, seed=seed).of(prediction).step_s for seed in (0, 0, 1))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_an_interval_by_hand() -> None:
    draws = np.arange(101.0)
    assert interval(draws, 50.0) == pytest.approx((5.0, 95.0))
    assert interval(draws, 99.0) == pytest.approx((5.0, 99.0))


@pytest.mark.parametrize(
    ("nodes", "where", "measurement", "words"),
    [
        (1, "intra_node", "links", "--only links"),
        pytest.param(2, "inter_node", "network", "--launcher slurm --only network", marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_hinges_on_a_link(nodes: int, where: str, measurement: str, words: str) -> None:
    """Two plans that differ in what they send: a link that may be ten times slower or faster decides."""
    of = task(nodes=nodes, devices=2 // nodes)
    of = with_uncertainty(of, Uncertainty(spread={f"{where}_bandwidth": 1.5}, call_error=0.0))
    links = {f"{where}_bandwidth": 2e6, f"{where}_latency_s": 1e-6}
    slow = structs.replace(of.costs.hardware, **links)
    of = replace(of, costs=load_costs(of.graph.models, dtype="float32", hardware=slow))
    predictions = {str(seed): predict(of, random_plan(of, seed)) for seed in range(40)}
    ends = at_ends(of)
    steps = {name: ends.of(plan).step_s for name, plan in predictions.items()}
    found = []
    for (name, plan), (other, rival) in itertools.permutations(predictions.items(), 2):
        margin = steps[other] / steps[name] - 1
        if margin.min() < 0 < margin.max() and rival.step_s > plan.step_s:
            found.append((name, other))
    assert found, "no pair of plans hinges on the link"
    name, other = found[0]
    [hinge] = hinges(drawn(of), predictions[name], {other: predictions[other]})
    assert (hinge.rival, hinge.constant, hinge.measurement) == (other, f"{where}_bandwidth", measurement)
    assert hinge.low == pytest.approx(2e6 / np.exp(1.6449 * 1.5), rel=1e-3)
    assert f"`realhf profile EXPERIMENT {words}` measures that" in str(hinge)
    assert hinges(drawn(with_uncertainty(of, SURE)), predictions[name], {other: predictions[other]}) == []


def test_where_no_constant_decides_the_calls_do() -> None:
    """Constants are known: only what the model of a call may be off is left, and a profile tells that."""
    of = with_uncertainty(task(), Uncertainty(spread={}, call_error=0.2))
    by_step = sorted((predict(of, random_plan(of, seed)) for seed in range(60)), key=lambda found: found.step_s)
    draws, pairs = drawn(of), itertools.pairwise(by_step)
    plan, rival = next(pair for pair in pairs if pair[1].step_s < 1.05 * pair[0].step_s)
    [hinge] = hinges(draws, plan, {"rival": rival})
    assert (hinge.constant, hinge.measurement) == ("calls", "layers")
    assert hinge.low * hinge.high == pytest.approx(1.0, rel=1e-3)
    assert hinge.high == pytest.approx(np.exp(1.6449 * 0.2), rel=1e-3)
    assert hinge.slower == probability_faster(draws.of(plan), draws.of(rival)) < 0.95
    assert hinges(draws, by_step[0], {"rival": by_step[-1]}) == []


def test_the_comparison_says_how_sure_it_is() -> None:
    of = task()
    result = search_plan(of, SearchBudget(evaluations=2000))
    alone = describe(of, result)
    assert alone.plan.intervals is not None
    assert set(alone.plan.intervals.call_s) == set(alone.plan.calls)
    found = compare(alone)
    for candidate in found.presets:
        if candidate.analysis is not None:
            assert candidate.slower is not None
            assert candidate.slower >= 0.4 or candidate.problem  # a search beats them as predicted
            low, high = candidate.step_interval_s or (0.0, 0.0)
            assert low <= candidate.analysis.step_s <= high
    plans = summary(found)["plans"]
    assert plans[0]["step_interval_s"] == alone.plan.intervals.step_s
    assert plans[0]["probability_slower"] is None
