"""The cost model against published measurements and counts."""

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import lib.fit
import msgspec
import numpy as np
import pytest
from lib.fit import (
    Constant,
    MeasuredTable,
    Residual,
    calibration_script,
    call_error,
    fit,
    load_tables,
    mean_error,
    predict_s,
    residuals,
    step_residuals,
    worst_error,
)
from msgspec import structs

from realhf.architecture.named import LLAMA, model_type
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, ModelFunctionCallDef
from realhf.geometry.layout import ParallelStrategy
from realhf.geometry.parameters import parameter_count
from realhf.planning.model.call import features_during
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import DESCRIPTIONS, load_hardware
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.sizes import model_sizes
from realhf.planning.model.workload import Workload
from tests.unit.planning.graphs import call_options, ppo

ONE = ParallelStrategy()
ROOT = Path(__file__).parents[2]
TABLES_FILE = ROOT / "tests" / "data" / "published_step_times.yaml"
TABLES = load_tables(TABLES_FILE)
H100 = load_hardware("h100")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return calibration_script()


def test_parameter_counts() -> None:
    published = {
        "llama7b": (8_030_261_248, 7_504_924_672),
        "llama13b": (14_001_525_760, 13_344_855_040),
        "llama34b": (35_321_028_608, 34_270_355_456),
        "llama70b": (70_553_706_496, 69_503_033_344),
    }
    assert set(published) == set(LLAMA)
    for name, (count, without_output_embedding) in published.items():
        assert parameter_count(LLAMA[name]) == count == model_sizes(LLAMA[name]).largest(ONE)
        assert PlacedModel(LLAMA[name], ONE, "bfloat16").parameter_bytes() == 2 * count
        critic = model_type(f"{name}-critic")
        # A critic has one row of hidden_size weights in the place of the output embedding.
        assert parameter_count(critic) - critic.hidden_size == without_output_embedding


def test_options_and_plans_on_eight_by_eight() -> None:
    """More than 500 options a call and more than 10^16 plans (ReaL, section 5.2)."""
    graph = ppo("llama70b", "llama7b-critic", mini_batches=8)
    cluster = Cluster(num_nodes=8, devices_per_node=8, hardware=load_hardware("h100"))
    counts = {name: len(call_options(call, 512, cluster)) for name, call in graph.calls.items()}
    assert min(counts.values()) > 500
    assert math.prod(counts.values()) > 10**16
    # Also without the number of micro-batches, as the paper counts.
    layouts = [len({option.layout for option in call_options(c, 512, cluster)}) for c in graph.calls.values()]
    assert min(layouts) > 500
    assert math.prod(layouts) > 10**16
    assert len(graph.calls) == 6


def test_the_two_tables_are_the_published_ones() -> None:
    first, second = TABLES
    assert (first.nodes * first.devices_per_node, first.batch_size) == (128, 4096)
    assert (second.nodes * second.devices_per_node, second.batch_size) == (16, 512)
    for table in TABLES:
        assert table.dp * table.tp * table.pp == table.nodes * table.devices_per_node
        graphs = [row.seconds for row in table.calls if row.interface is not GENERATE or row.cuda_graphs]
        assert len(graphs) == 6
        assert 0.9 < sum(graphs) / table.step_s["graphs"] < 1
    # Per stage: 8 x 4 for inference and generation, twice that for training; no pipeline, no factor.
    assert [first.in_flight(row) for row in first.calls] == [32, 32, 32, 32, 32, 64, 64]
    assert {second.in_flight(row) for row in second.calls} == {4}


def test_residuals_of_the_stored_constants() -> None:
    """Of the fit, no evidence: see `test_a_table_that_was_not_fitted`."""
    rows = residuals(TABLES, H100)
    assert len(rows) == 14
    assert mean_error(rows) <= 0.03
    # What no constant explains: with graphs a decode step of 70B is too slow by as much as one of 7B is too fast.
    worst, next_worst = sorted(rows, key=lambda row: -abs(row.error))[:2]
    assert worst.row == next_worst.row == "actor generate, CUDA graphs"
    assert worst.error > 0 > next_worst.error
    assert worst_error(rows) <= 0.09
    steps = step_residuals(TABLES, H100)
    assert len(steps) == 4
    assert worst_error(steps) <= 0.095


@pytest.mark.slow
def test_the_tables_alone_put_the_rates_where_publications_do(script: ModuleType) -> None:
    """With priors that leave the rates of products, memory and a node's links open within a factor of 2."""
    rates = ("matmul_flops[bfloat16]", "memory_bandwidth", "intra_node_bandwidth")
    wide = [replace(each, spread=2.0) if each.name in rates else each for each in script.CONSTANTS]
    found = fit(TABLES, H100, wide).hardware
    assert worst_error(residuals(TABLES, found)) <= 0.09
    for constant in wide:
        assert constant.name not in rates or 0.75 < constant.get(found) / constant.prior < 1.25, constant.name


@pytest.mark.slow
def test_the_stored_constants_are_those_of_the_script(script: ModuleType) -> None:
    fitted = script.calibrated(TABLES, H100)
    assert fitted == H100
    assert script.calibrated(TABLES, fitted) == fitted
    for constant in script.CONSTANTS:
        assert constant.low < constant.get(H100) < constant.high, constant.name
        assert constant.low < constant.prior < constant.high, constant.name


@pytest.mark.parametrize("held_out", [0, 1])
def test_a_table_that_was_not_fitted(script: ModuleType, held_out: int) -> None:
    rows = script.held_out_residuals(TABLES[held_out], [TABLES[1 - held_out]], H100)
    calls = rows[: len(TABLES[held_out].calls)]
    assert mean_error(calls) <= 0.06
    assert worst_error(calls) <= 0.195
    assert worst_error(rows[len(calls) :]) <= 0.145


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [0, 1])
@pytest.mark.parametrize(
    "misread",
    [{"drains_pipelines": False}, {"sequence_parallel": True, "regathers_inputs": True}],
    ids=["one pipeline", "sequence parallelism"],
)
def test_the_code_of_the_measured_system_predicts_better_than_its_defaults(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, held_out: int, misread: dict[str, bool]
) -> None:
    """Each of the two is read from code alone; without it a table that was not fitted is off by a third more at least,
    whichever it is."""

    def calls() -> list[Residual]:
        rows = script.held_out_residuals(TABLES[held_out], [TABLES[1 - held_out]], H100)
        return rows[: len(TABLES[held_out].calls)]

    error = mean_error(calls())

    def during(call: ModelFunctionCallDef, lengths: Workload, engine: EngineFeatures) -> EngineFeatures:
        return features_during(call, lengths, replace(engine, **misread))

    monkeypatch.setattr(lib.fit, "features_during", during)
    assert mean_error(calls()) > 1.33 * error


def test_spreads_of_the_fit_on_constants_that_are_told_apart() -> None:
    """Rows whose time is all but one constant's: the posterior of a normal prior and n normal rows is known."""
    eager = next(row for row in TABLES[1].calls if row.interface is GENERATE and not row.cuda_graphs)
    free = structs.replace(
        H100, matmul_flops={"bfloat16": 1e20}, memory_bandwidth=1e20, intra_node_bandwidth=1e20, call_overhead_s=0.0,
        intra_node_latency_s=0.0, sampling_s=0.0, layer_launch_s=0.0, decode_launch_s=1e-3,
    )  # fmt: skip
    for rows in (1, 4):
        row = structs.replace(eager, seconds=predict_s(TABLES[1], eager, free))
        tables = [structs.replace(TABLES[1], calls=(row,) * rows)]
        launch = Constant("decode_launch_s", 2e-3, 1e-5, 1e-1, "", spread=2.0)
        found = fit(tables, free, [launch], row_error=0.1)
        variance = 1 / (rows / 0.1**2 + 1 / math.log(2.0) ** 2)
        mean = math.log(1e-3) + variance / math.log(2.0) ** 2 * math.log(2.0)
        assert found.covariance[0, 0] == pytest.approx(variance, rel=1e-3)
        assert found.hardware.decode_launch_s == pytest.approx(math.exp(mean), rel=1e-4)


def test_the_error_beside_the_constants_is_found() -> None:
    errors = np.random.default_rng(0).normal(0.0, math.hypot(0.05, 0.12), 4000)
    assert call_error(errors, np.full(4000, 0.05)) == pytest.approx(0.12, abs=0.005)
    assert call_error(errors / 10, np.full(4000, 0.05)) == 0.0  # less than the constants explain


def test_written_constants_are_read_back(script: ModuleType, tmp_path: Path) -> None:
    text = (DESCRIPTIONS / "h100.yaml").read_text()
    assert script.with_constants(text, H100) == text
    assert H100.uncertainty is not None
    changed = structs.replace(
        H100,
        sampling_s=2.5e-3,
        matmul_flops={**H100.matmul_flops, "bfloat16": 4e14},
        uncertainty=structs.replace(H100.uncertainty, call_error=0.25),
    )
    (tmp_path / "h100.yaml").write_text(script.with_constants(text, changed))
    assert load_hardware(str(tmp_path / "h100.yaml")) == changed


def test_the_fit_finds_the_constants_that_made_the_times() -> None:
    truth = structs.replace(H100, matmul_flops={"bfloat16": 4e14}, decode_launch_s=4e-4, inter_node_bandwidth=12e9)
    tables = [
        structs.replace(
            table,
            calls=tuple(structs.replace(row, seconds=predict_s(table, row, truth)) for row in table.calls),
        )
        for table in TABLES
    ]
    far = 1e9  # a prior that says nothing
    constants = [
        Constant("matmul_flops[bfloat16]", 6e14, 1e14, 9e14, "", spread=far),
        Constant("decode_launch_s", 1e-4, 1e-5, 1e-2, "", spread=far),
        Constant("inter_node_bandwidth", 30e9, 1e9, 50e9, "", spread=far),
    ]
    found = fit(tables, H100, constants).hardware
    assert found.flops("bfloat16") == pytest.approx(4e14, rel=1e-3)
    assert found.decode_launch_s == pytest.approx(4e-4, rel=1e-3)
    assert found.inter_node_bandwidth == pytest.approx(12e9, rel=1e-2)
    assert worst_error(residuals(tables, found)) < 1e-3
    far_too_fast = Constant("inter_node_bandwidth", 30e9, 20e9, 50e9, "", spread=far)
    bounded = fit(tables, H100, [*constants[:2], far_too_fast]).hardware
    assert bounded.inter_node_bandwidth == pytest.approx(20e9)


def test_recomputation_zero1_and_graphs_change_what_they_should() -> None:
    table = TABLES[0]
    train = next(row for row in table.calls if row.call == "actor train")
    generate = next(row for row in table.calls if row.cuda_graphs)

    def with_features(**features: bool) -> MeasuredTable:
        return structs.replace(table, features=replace(table.features, **features))

    recomputed, kept = predict_s(table, train, H100), predict_s(with_features(recomputation="off"), train, H100)
    assert 1.25 < recomputed / kept < 1.34  # a forward is a third of forward and backward, less the embedding's ends
    assert predict_s(with_features(zero1=False), train, H100) > recomputed
    eager = predict_s(table, structs.replace(generate, cuda_graphs=False), H100)
    # 1,023 decode steps of 32 micro-batches of a stage's 20 layers.
    saved = 1023 * 32 * 20 * (H100.decode_launch_s - H100.decode_graph_launch_s)
    assert eager - predict_s(table, generate, H100) == pytest.approx(saved)


def test_a_row_with_a_strategy_of_its_own() -> None:
    table = TABLES[1]
    train = next(row for row in table.calls if row.call == "actor train")
    tp2_pp2 = structs.replace(train, strategy=ParallelStrategy(dp=4, tp=2, pp=2))
    assert table.in_flight(tp2_pp2) == 16  # 4 a stage, 2 stages, twice that in pipelined training
    assert predict_s(table, structs.replace(train, strategy=ParallelStrategy(2, 8, 1)), H100) == predict_s(
        table, train, H100
    )
    # A quarter of the all-reduced bytes a micro-batch weigh more than the bubble.
    assert predict_s(table, tp2_pp2, H100) < predict_s(table, train, H100)


def test_broken_tables(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the list of measured tables"):
        load_tables(tmp_path / "none.yaml")
    rows = msgspec.yaml.decode(TABLES_FILE.read_bytes())
    del rows[0]["batch_size"]
    path = tmp_path / "tables.yaml"
    path.write_bytes(msgspec.yaml.encode(rows))
    with pytest.raises(UserError, match="batch_size"):
        load_tables(path)
