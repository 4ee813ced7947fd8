"""The fit of constants to measured times, on rows whose seconds are known sums of a few constants."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lib import fit as fit_module
from lib.fit import (
    Constant,
    Fitted,
    MeasuredCall,
    MeasuredTable,
    Residual,
    call_error,
    error_beyond_constants,
    fit,
    log_errors,
    mean_error,
    predict_s,
    residuals,
    step_residuals,
    worst_error,
)
from msgspec import structs

from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP
from realhf.geometry.layout import ParallelStrategy
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from tests.unit.planning.graphs import call, call_model

H100 = load_hardware("h100")
# Only launches, sampling and the call's way take time.
LAUNCHES = structs.replace(
    H100, matmul_flops={"bfloat16": 1e24}, memory_bandwidth=1e24, intra_node_bandwidth=1e24, intra_node_latency_s=0.0,
    inter_node_bandwidth=1e24, inter_node_send_bandwidth=1e24, inter_node_latency_s=0.0, layer_launch_s=2e-3,
    train_launch_s=5e-3, decode_launch_s=1e-2, decode_graph_launch_s=3e-3, call_overhead_s=0.5, sampling_s=0.25,
    mini_batch_s=0.0, uncertainty=None,
)  # fmt: skip
LAYERS = 32  # of llama7b
INFER = MeasuredCall(call="ref inference", model_type="llama7b", interface=INFERENCE, micro_batches=3, seconds=1.0)
EAGER = MeasuredCall(call="actor generate", model_type="llama7b", interface=GENERATE, micro_batches=3, seconds=2.0)
GRAPHS = structs.replace(EAGER, cuda_graphs=True, seconds=4.0)
TRAIN = MeasuredCall(call="actor train", model_type="llama7b", interface=TRAIN_STEP, micro_batches=3, seconds=8.0)


def table(*rows: MeasuredCall, **changes: Any) -> MeasuredTable:
    given: dict[str, Any] = {
        "name": "measured",
        "nodes": 2,
        "devices_per_node": 2,
        "dp": 2,
        "tp": 2,
        "pp": 1,
        "batch_size": 48,
        "prompt_tokens": 100,
        "new_tokens": 11,
        "mini_batches": 4,
        "dtype": "bfloat16",
        "features": EngineFeatures(),
        "calls": rows,
    }
    return MeasuredTable(**(given | changes))


def test_rows_have_names() -> None:
    assert [str(row) for row in (INFER, EAGER, GRAPHS, TRAIN)] == [
        "ref inference", "actor generate, eager", "actor generate, CUDA graphs", "actor train",
    ]  # fmt: skip


def test_micro_batches_in_flight() -> None:
    """So many for each stage, in pipelined training twice that; under the row's strategy, if it has one."""
    piped = table(INFER, TRAIN, pp=2, dp=1)
    assert [piped.in_flight(row) for row in piped.calls] == [6, 12]
    assert piped.strategy(TRAIN) == ParallelStrategy(1, 2, 2)
    own = structs.replace(TRAIN, strategy=ParallelStrategy(4, 1, 1))
    assert piped.strategy(own) == ParallelStrategy(4, 1, 1)
    assert piped.in_flight(own) == 3
    deep = structs.replace(TRAIN, strategy=ParallelStrategy(1, 1, 4))
    assert table(deep).in_flight(deep) == 3 * 4 * 2


PREFILL, STEPS = 3 * LAYERS * 2e-3, 10 * 3  # of three micro-batches; the tokens of the prefill are drawn together


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        (INFER, 0.5 + 3 * LAYERS * 2e-3),
        (EAGER, 0.5 + PREFILL + 0.25 + STEPS * (LAYERS * 1e-2 + 0.25)),
        (GRAPHS, 0.5 + PREFILL + 0.25 + STEPS * (LAYERS * 3e-3 + 0.25)),
    ],
)
def test_seconds_of_a_row_by_hand(row: MeasuredCall, seconds: float) -> None:
    assert predict_s(table(row), row, LAUNCHES) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("row", [INFER, EAGER, GRAPHS, TRAIN], ids=str)
@pytest.mark.parametrize("strategy", [None, ParallelStrategy(2, 1, 2), ParallelStrategy(1, 4, 1)])
def test_a_row_is_predicted_as_a_call_of_a_plan(row: MeasuredCall, strategy: ParallelStrategy | None) -> None:
    """Of a model's rows on a cluster of the table's nodes, with what the engine of the table does."""
    row = structs.replace(row, strategy=strategy)
    features = EngineFeatures(recomputation="full", blocking_sends=True, zero1=False, response_logits=False)
    measured = table(row, features=features)
    asked = call("m", "llama7b", row.interface, "x", mini_batches=4 if row.interface is TRAIN_STEP else 1)
    does = replace(features, cuda_graphs=row.cuda_graphs, drains_pipelines=True)
    model = call_model(
        call=asked,
        batch_size=48,
        workload=Workload(prompt_tokens=100, new_tokens=11),
        cluster=Cluster(num_nodes=2, devices_per_node=2, hardware=H100),
        costs=load_costs({"m": asked.config}, dtype="bfloat16", hardware=H100, features=does),
        dtype="bfloat16",
    )
    expected = model.seconds(measured.strategy(row), measured.in_flight(row))
    assert predict_s(measured, row, H100) == pytest.approx(expected, rel=1e-12)


def test_residuals_are_of_every_row() -> None:
    tables = [table(INFER, EAGER), table(GRAPHS, name="other")]
    rows = residuals(tables, LAUNCHES)
    assert [(row.table, row.row, row.measured_s) for row in rows] == [
        ("measured", "ref inference", 1.0), ("measured", "actor generate, eager", 2.0),
        ("other", "actor generate, CUDA graphs", 4.0),
    ]  # fmt: skip
    predicted = [predict_s(tables[0], INFER, LAUNCHES), predict_s(tables[0], EAGER, LAUNCHES)]
    assert [row.predicted_s for row in rows[:2]] == predicted
    assert log_errors(tables[:1], LAUNCHES) == pytest.approx([math.log(predicted[0]), math.log(predicted[1] / 2)])


def test_errors_of_rows() -> None:
    rows = [Residual(table="t", row="r", measured_s=2.0, predicted_s=s) for s in (2.5, 1.0, 2.0)]
    assert [row.error for row in rows] == [0.25, -0.5, 0.0]
    assert mean_error(rows) == 0.25
    assert worst_error(rows) == 0.5


def test_a_step_is_the_sum_of_its_calls_with_or_without_graphs() -> None:
    both, one = table(GRAPHS, EAGER, INFER, step_s={"graphs": 3.0, "eager": 5.0}), table(INFER, step_s={"eager": 7.0})
    steps = step_residuals([both, one], LAUNCHES)
    graphs, eager, infer = (predict_s(table(row), row, LAUNCHES) for row in (GRAPHS, EAGER, INFER))
    assert [(step.row, step.measured_s) for step in steps] == [
        ("whole step, graphs", 3.0), ("whole step, eager", 5.0), ("whole step, eager", 7.0),
    ]  # fmt: skip
    assert [step.predicted_s for step in steps] == pytest.approx([graphs + infer, eager + infer, infer])
    assert step_residuals([table(INFER)], LAUNCHES) == []


def test_a_constant_is_read_and_put_by_its_name() -> None:
    flops = Constant("matmul_flops[bfloat16]", 1e14, 1e13, 1e15, "")
    assert flops.get(H100) == H100.flops("bfloat16")
    assert flops.put(H100, 2e14).flops("bfloat16") == 2e14
    assert flops.spread == 2.0


# --- the fit

OVERHEAD_ONLY = structs.replace(LAUNCHES, layer_launch_s=0.0, sampling_s=0.0)
STEP_S = STEPS * LAYERS  # of EAGER, by a second of a launch


def timed(seconds: float, row: MeasuredCall = EAGER) -> MeasuredTable:
    return table(structs.replace(row, seconds=seconds))


def launch(prior: float, low: float = 1e-9, high: float = 1e3, spread: float = 2.0) -> Constant:
    return Constant("decode_launch_s", prior, low, high, "", spread=spread)


def test_each_step_is_damped_less_after_one_that_succeeds() -> None:
    """Where the logarithm of the time is that of the constant, a step would find the optimum if it were not damped: it
    leaves d / (1 + d) of the way, where d is 1 / 100 and then a fifth of the last one."""
    free = structs.replace(OVERHEAD_ONLY, call_overhead_s=0.0)
    prior, noise, spread = math.log(1e-3), 0.1, math.log(2.0)
    seen = math.log(5e-3)
    optimum = (prior / spread**2 + seen / noise**2) / (1 / spread**2 + 1 / noise**2)
    left, damping = prior - optimum, 0.01
    for iterations in range(4):
        found = fit([timed(STEP_S * 5e-3)], free, [launch(1e-3)], row_error=noise, iterations=iterations)
        assert math.log(found.hardware.decode_launch_s) - optimum == pytest.approx(left, rel=2e-3, abs=1e-10)
        left, damping = left * damping / (1 + damping), damping / 5


def scalar_fit(overhead_s: float, seconds: float, start: float, low: float, high: float, iterations: int) -> float:
    """The same by one number: rows of a row_error of 0.1 and a prior that says nothing."""
    x, damping, spread = math.log(start), 0.01, math.log(1e6)
    low, high = math.log(low), math.log(high)

    def misfit(x: float) -> float:
        error = math.log((overhead_s + STEP_S * math.exp(x)) / seconds) / 0.1
        return error**2 + ((x - math.log(start)) / spread) ** 2

    for _ in range(iterations):
        taken = STEP_S * math.exp(x)
        slope_of_error = taken / (overhead_s + taken) / 0.1
        slope = slope_of_error * math.log((overhead_s + taken) / seconds) / 0.1 + (x - math.log(start)) / spread**2
        step = -slope / ((slope_of_error**2 + 1 / spread**2) * (1 + damping))
        candidate = min(max(x + step, low), high)
        if misfit(candidate) < misfit(x):
            x, damping = candidate, damping / 5
        else:
            damping *= 5
    return math.exp(x)


@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 5, 6, 8, 12])
def test_a_step_that_goes_too_far_is_taken_back_and_damped_more(iterations: int) -> None:
    """From a launch that is a thousandth of the call, a first step overshoots by far."""
    hardware = structs.replace(OVERHEAD_ONLY, call_overhead_s=1.0)
    constant = launch(1e-6, 1e-9, 1.0, spread=1e6)
    found = fit([timed(10.0)], hardware, [constant], row_error=0.1, iterations=iterations).hardware
    expected = scalar_fit(1.0, 10.0, 1e-6, 1e-9, 1.0, iterations)
    assert math.log(found.decode_launch_s) == pytest.approx(math.log(expected), abs=0.02)


def test_a_row_is_thought_to_be_off_by_eight_per_cent() -> None:
    free = structs.replace(OVERHEAD_ONLY, call_overhead_s=0.0)
    found = fit([timed(STEP_S * 5e-3)], free, [launch(5e-3)])
    assert found.covariance == pytest.approx(1 / (1 / 0.08**2 + 1 / math.log(2.0) ** 2), rel=1e-3)
    assert found.hardware.decode_launch_s == pytest.approx(5e-3)
    assert structs.replace(found.hardware, decode_launch_s=1e-2) == free


@pytest.mark.parametrize(("low", "high", "bound"), [(8e-3, 1.0, 8e-3), (1e-5, 2e-3, 2e-3)])
@pytest.mark.parametrize(("prior", "row_error"), [(1e-4, 0.1), (2e-2, 0.1), (2e-2, 3.0)])
def test_a_constant_that_its_bound_holds_leaves_the_others_free(
    low: float, high: float, bound: float, prior: float, row_error: float
) -> None:
    """A launch of 5 ms would fit best and may not be: the overhead takes what two rows say beside it."""
    rows = [structs.replace(EAGER, seconds=1 + STEP_S * 5e-3), structs.replace(INFER, seconds=1.0)]
    overhead = Constant("call_overhead_s", 1.5, 1e-3, 1e2, "", spread=1e30)
    found = fit([table(*rows)], OVERHEAD_ONLY, [launch(prior, low, high, spread=1e30), overhead], row_error=row_error)
    assert found.hardware.decode_launch_s == pytest.approx(bound)

    tried = np.geomspace(0.2, 5.0, 20_001)
    first, second = np.log((tried + STEP_S * bound) / rows[0].seconds), np.log(tried)
    misfits = (first / row_error) ** 2 + (second / row_error) ** 2 + (np.log(tried / 1.5) / math.log(1e30)) ** 2
    best = tried[misfits.argmin()]
    assert found.hardware.call_overhead_s == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize(("prior", "low", "high"), [(1e-4, 1e-3, 1.0), (1e-1, 1e-9, 2e-2)])
@pytest.mark.parametrize("row_error", [0.1, 3.0])
def test_a_constant_that_begins_at_a_bound_may_leave_it(
    prior: float, low: float, high: float, row_error: float
) -> None:
    """Also where a row says little: the prior lies beyond the bound, and nobody trusts it."""
    free = structs.replace(OVERHEAD_ONLY, call_overhead_s=0.0)
    found = fit([timed(STEP_S * 5e-3)], free, [launch(prior, low, high, spread=1e100)], row_error=row_error)
    assert found.hardware.decode_launch_s == pytest.approx(5e-3, rel=2e-3)


def test_the_covariance_of_two_constants_by_hand() -> None:
    """An inference is all layer launches; a generation has those of its prefill, and others in its steps."""
    hardware = structs.replace(LAUNCHES, call_overhead_s=0.0, sampling_s=0.0)
    rows = [structs.replace(row, seconds=predict_s(table(row), row, hardware)) for row in (INFER, EAGER)]
    constants = [
        Constant("layer_launch_s", 2e-3, 1e-6, 1.0, "", spread=1.5),
        Constant("decode_launch_s", 1e-2, 1e-6, 1.0, "", spread=3.0),
    ]
    found = fit([table(*rows)], hardware, constants, row_error=0.2)
    part = PREFILL / (PREFILL + STEP_S * 1e-2)  # of a generation
    slopes = np.array([[1.0, 0.0], [part, 1 - part]])
    precision = slopes.T @ slopes / 0.2**2 + np.diag([1 / math.log(1.5) ** 2, 1 / math.log(3.0) ** 2])
    a, b, d = precision[0, 0], precision[0, 1], precision[1, 1]
    expected = np.array([[d, -b], [-b, a]]) / (a * d - b * b)
    assert found.covariance == pytest.approx(expected, rel=1e-3)


def test_a_fit_ends_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are predicted before, for the slopes and after the step, and for the slopes at the end: one step at most
    is made from the optimum."""
    asked: list[Hardware] = []

    def counted(tables: list[MeasuredTable], hardware: Hardware) -> np.ndarray:
        asked.append(hardware)
        return log_errors(tables, hardware)

    free = structs.replace(OVERHEAD_ONLY, call_overhead_s=0.0)
    measured = [timed(predict_s(timed(1.0), timed(1.0).calls[0], structs.replace(free, decode_launch_s=5e-3)))]
    monkeypatch.setattr(fit_module, "log_errors", counted)
    fit(measured, free, [launch(5e-3)])
    assert len(asked) <= 8


def test_errors_on_a_table_that_was_not_fitted() -> None:
    """Of an inference all of a launch's error, of a generation its parts, by the covariance of both."""
    hardware = structs.replace(LAUNCHES, call_overhead_s=0.0, sampling_s=0.0)
    constants = [Constant(name, 1.0, 1e-6, 1e2, "") for name in ("layer_launch_s", "decode_launch_s")]
    fitted = Fitted(hardware, np.array([[0.04, 0.01], [0.01, 0.09]]))
    errors, explained = error_beyond_constants(table(INFER, EAGER), fitted, constants)
    eager_s = PREFILL + STEP_S * 1e-2
    assert errors == pytest.approx([math.log(PREFILL / 1.0), math.log(eager_s / 2.0)], rel=1e-6)
    part = PREFILL / eager_s
    variance = part**2 * 0.04 + 2 * part * (1 - part) * 0.01 + (1 - part) ** 2 * 0.09
    assert explained == pytest.approx([0.2, math.sqrt(variance)], rel=1e-3)


@pytest.mark.parametrize(
    ("errors", "explained", "expected"),
    [
        ([0.3, -0.3], [0.0, 0.0], 0.3),
        ([0.5, -0.5, 0.5], [0.3, 0.3, 0.3], 0.4),
        ([0.1, -0.1], [0.3, 0.3], 0.0),
        ([0.0], [0.0], 0.0),
        ([5.0], [0.0], 0.999),  # the largest that is looked at
        ([0.1, 0.7], [0.0, 0.0], 0.5),  # the root of the mean square
    ],
)
def test_what_errors_have_beside_what_is_explained(
    errors: list[float], explained: list[float], expected: float
) -> None:
    assert call_error(np.array(errors), np.array(explained)) == expected
