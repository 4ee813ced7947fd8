"""The price of `reproducible="layout"`: its profiles, seconds and bytes by hand, and what a plan says of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from realhf.api.experiment import ModelSetup
from realhf.architecture.chunks import GATHERED_ELEMENTS
from realhf.architecture.model import DecoderConfig, DType
from realhf.cli.plan_tables import totals
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.geometry.layout import ParallelStrategy
from realhf.geometry.parameters import parameter_count
from realhf.planning.explain.comparison import Comparison, describe, explain, plain_step_s, summary
from realhf.planning.model.activations import backward_bytes, kept_layer_bytes
from realhf.planning.model.features import EngineFeatures, of_setup
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.profile import LayerProfile, profile_path, save_profile
from realhf.planning.model.seconds import RankSeconds, crossings
from realhf.planning.model.timings import ProfiledTimings, TensorGroup, Timings, load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.presets import rule_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, settings, task_of, work_of
from tests.unit.planning.test_profiled_timings import CPU, OVERHEADS, measured, tensor

ONE = ParallelStrategy()
ORDERED = EngineFeatures(ordered=True)
TRAINING = call("m", TINY, TRAIN_STEP, "x")
COUNT, GRADIENT = parameter_count(TINY), 4


def of_layout(**fields: Any) -> LayerProfile:
    """Layers at half the speed of `measured`, and a second for each parameter of a part."""
    overheads = structs.replace(OVERHEADS, part_s_per_parameter=1.0)
    more: dict[str, Any] = {"reproducible": "layout", "overheads": overheads}
    return measured(tensor(1, 2.0), tensor(2, 1.5), **more | fields)


def test_a_setup_says_so() -> None:
    assert of_setup(ModelSetup(reproducible="layout")).ordered
    assert not of_setup(ModelSetup()).ordered


def test_profiles_of_the_option_lie_beside_the_others(tmp_path: Path) -> None:
    """Whose path is that of before there was the option."""
    plain = profile_path(TINY, "float32", "cpu", tmp_path)
    assert plain == tmp_path / "cpu" / "6d7b4e4cf94d2f81.json"
    assert profile_path(TINY, "float32", "cpu", tmp_path, "layout") != plain


def test_costs_take_the_profile_of_the_option(tmp_path: Path) -> None:
    """And know those without it, for models that are computed with it."""
    arguments: dict[str, Any] = {"dtype": "float32", "hardware": CPU, "root": tmp_path}
    save_profile(measured(), profile_path(TINY, "float32", "cpu", tmp_path))
    models = {"m": TINY}
    before = load_costs(models, of_models={"m": ORDERED}, **arguments)
    assert not before.profiled
    assert before.plain
    assert before.plain.profiled
    save_profile(of_layout(), profile_path(TINY, "float32", "cpu", tmp_path, "layout"))
    found = load_costs(models, of_models={"m": ORDERED}, **arguments)
    assert found.timings == {TINY: ProfiledTimings.of(of_layout(), CPU)}
    assert found.plain == load_costs(models, of_models={"m": EngineFeatures()}, **arguments)
    assert found.plain.plain is None
    assert not found.plain.of_models["m"].ordered


def seconds_of(strategy: ParallelStrategy, micro_batches: int, timings: Timings) -> RankSeconds:
    work = work_of(TRAINING, strategy, micro_batches, features=ORDERED)
    return RankSeconds(work, timings, crossings(strategy, cpu_cluster(4)))


@pytest.mark.parametrize(("dp", "micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_a_mini_batch_takes_its_parts_by_hand(dp: int, micro_batches: int) -> None:
    """Over what it takes otherwise: each part's gradient, each other rank's, and the gathering of them all. A gather
    over two takes 0.5e-3 s a byte, over four 1.5e-3."""
    timings = ProfiledTimings.of(of_layout(collectives=measured().collectives), CPU)
    ordered = seconds_of(ParallelStrategy(dp=dp), micro_batches, timings)
    work = work_of(TRAINING, ParallelStrategy(dp=dp), micro_batches)
    plain = RankSeconds(work, timings, crossings(ParallelStrategy(dp=dp), cpu_cluster(4)))
    bytes_of_all, slope = COUNT * GRADIENT, {1: 0.0, 2: 1e-3, 4: 3e-3}[dp]
    exchange = slope * (dp * bytes_of_all / 2 - bytes_of_all / 4)
    expected = exchange + (micro_batches + dp - 1) * COUNT
    assert ordered.mini_batch_train_s() - plain.mini_batch_train_s() == pytest.approx(expected)


def test_parts_without_a_profile() -> None:
    """A copy (2), zeros (1) and a sum (3) of float32, bound by memory."""
    hardware = structs.replace(CPU, memory_bandwidth=1e3, uncertainty=None)
    timings = Timings(model=TINY, dtype="bfloat16", hardware=hardware, features=ORDERED)
    assert timings.parts(3, 10) == pytest.approx(3 * 10 * 6 * 4 / 1e3)


def test_tensor_parallel_ranks_gather_the_sums_of_all_leaves() -> None:
    """Of 4 leaves 10 x 64 numbers each, over two ranks."""
    group, size_bytes = TensorGroup(2), 4 * 10 * 64 * 4
    plain, ordered = (
        Timings(model=TINY, dtype="float32", hardware=CPU, features=features)
        for features in (EngineFeatures(), ORDERED)
    )
    layers = [each.layer(10, 5, group, backward=False, trains=False) for each in (plain, ordered)]
    all_reduce_s = CPU.all_reduce_s(size_bytes / 4, 2, crosses_nodes=False)
    gather_s = CPU.all_gather_s(size_bytes, 2, crosses_nodes=False)
    assert layers[1] - layers[0] == pytest.approx(2 * (gather_s - all_reduce_s))


def test_degrees_that_were_not_measured_gather_too() -> None:
    """The layer at tp=2 without its own two gathers, half of it, and two gathers over four."""
    timings = ProfiledTimings.of(of_layout(), CPU)
    size_bytes = 4 * 10 * 64 * 4
    at_two = 10 * 150 - 2 * 0.5e-3 * size_bytes
    found = timings.layer(10, 16, TensorGroup(4), backward=False, trains=False)
    assert found == pytest.approx(at_two / 2 + 2 * 1.5e-3 * size_bytes)


TIED = replace(TINY, tied_embeddings=True)


@pytest.mark.parametrize(
    ("model", "strategy", "apart"),
    [
        (TINY, ONE, 0),
        (TIED, ONE, 32 * 64),
        (TIED, ParallelStrategy(tp=2), 32 * 64 // 2),
        (TIED, ParallelStrategy(pp=2), 0),
    ],
)
def test_rows_that_are_looked_up_have_a_gradient_of_their_own(
    model: DecoderConfig, strategy: ParallelStrategy, apart: int
) -> None:
    plain, ordered = (PlacedModel(model, strategy, "bfloat16", each) for each in (EngineFeatures(), ORDERED))
    assert plain.gradient_elements() == plain.elements()
    assert ordered.gradient_elements() == ordered.elements() + apart
    assert ordered.static_bytes(trained=True) == plain.static_bytes(trained=True) + 4 * apart
    assert ordered.static_bytes(trained=False) == plain.static_bytes(trained=False)


@pytest.mark.parametrize(("micro_batches", "waiting"), [(1, 0), (2, 1), (4, 2)])
def test_sums_of_parts_wait_beside_the_next_one(micro_batches: int, waiting: int) -> None:
    """With many tokens while it is computed; with few its own gradient is more than that takes."""
    gradient, features = COUNT * GRADIENT, ORDERED
    many, few = (
        work_of(TRAINING, ONE, micro_batches, Workload(prompt_tokens=tokens), features=features) for tokens in (64, 1)
    )
    assert few._pass_bytes() < gradient < many._pass_bytes()
    assert many.dynamic_bytes() == many._pass_bytes() + waiting * gradient
    assert few.dynamic_bytes() == (waiting + 1) * gradient


def test_other_micro_batches_in_flight_keep_activations_while_a_gradient_is_copied() -> None:
    """One of two."""
    work = work_of(TRAINING, ParallelStrategy(pp=2), 4, Workload(prompt_tokens=1), features=ORDERED)
    gradient = work.placed.elements() * GRADIENT
    assert 0 < work._pass_bytes() < 2 * gradient
    assert work.dynamic_bytes() == work._pass_bytes() / 2 + 3 * gradient


@pytest.mark.parametrize(("dtype", "less"), [("float32", 64 * 4 + 16), ("bfloat16", 64 * (4 * 2 + 2) + 16)])
def test_a_layer_keeps_less_of_attention(dtype: DType, less: int) -> None:
    """Neither a copy of its output nor a number for each of 4 heads; and in bfloat16 nothing is widened."""
    plain, ordered = (
        kept_layer_bytes(TINY, dtype, 1, EngineFeatures(in_host_memory=True, ordered=each)) for each in (False, True)
    )
    assert plain - ordered == less


def test_attention_is_run_again_for_its_gradients() -> None:
    """In float32 the inputs, the output twice, and the gradients of all: 5 x 64 of queries, 4 x 64 of keys and values;
    with the MLP's gradients, where the layer was run again, and the rotary tables."""
    features = EngineFeatures(in_host_memory=True, ordered=True, recomputation="full")
    expected = 9 * 64 * 4 + (2 * 128 + 2 * 64) * 2 + 2 * 16 * 2
    assert backward_bytes(TINY, "bfloat16", 1, features) == expected


def test_ranks_gather_chunks_of_gradients() -> None:
    """Twice those of all ranks: as they come, and as they are added up. A large model with few tokens."""
    wide = replace(TINY, vocab_size=2**18)
    work = work_of(call("m", wide, TRAIN_STEP, "x"), ParallelStrategy(dp=4), 1, features=ORDERED)
    gathered, copied = 2 * 4 * GATHERED_ELEMENTS * 4, parameter_count(wide) * 4
    small = work_of(TRAINING, ParallelStrategy(dp=4), 1, features=ORDERED)
    assert work.dynamic_bytes() == max(gathered, copied, work._pass_bytes())
    assert small.dynamic_bytes() == max(small._pass_bytes(), 2 * 4 * COUNT * 4)


@pytest.mark.parametrize(
    ("strategy", "copies", "by_leaves"), [(ONE, 2, 1), (ParallelStrategy(tp=2), 1, 0), (ParallelStrategy(pp=2), 2, 1)]
)
@pytest.mark.parametrize("model", [TINY, TIED])
def test_weights_that_generation_packs(
    model: DecoderConfig, strategy: ParallelStrategy, copies: int, by_leaves: int
) -> None:
    """Prefill's own copies, with the head; row-parallel weights (64 x 64 and 64 x 128) of a layer by leaves."""
    plain, ordered = (
        PlacedModel(model, strategy, "float32", EngineFeatures(packs_weights=True, ordered=each))
        for each in (False, True)
    )
    layers = 4 // strategy.pp
    head = 32 * 64 // strategy.tp if model.tied_embeddings else 0
    expected = copies * plain.packed_bytes() + 4 * (head + by_leaves * layers * (64 * 64 + 64 * 128))
    assert ordered.packed_bytes() == expected
    assert PlacedModel(model, strategy, "float32", ORDERED).packed_bytes() == 0


GRAPH = DataflowGraph([call("m", TINY, GENERATE, "prompts", "seq"), call("m", TINY, TRAIN_STEP, "seq")], ["prompts"])


def described(root: Path, features: EngineFeatures = ORDERED) -> Comparison:
    cluster = cpu_cluster(1)
    costs = load_costs(
        GRAPH.models, dtype="float32", hardware=CPU, root=root, features=features, of_models={"m": features}
    )
    task: PlanningTask = task_of(GRAPH, **{**settings(GRAPH, cluster), "costs": costs})
    return describe(task, rule_plan("heuristic", task).plan)


def test_a_plan_says_what_the_option_costs(tmp_path: Path) -> None:
    """The same plan, priced by the profile without it."""
    save_profile(measured(), profile_path(TINY, "float32", "cpu", tmp_path))
    assert any("does not know its kernels" in line for line in totals(described(tmp_path)))
    save_profile(of_layout(), profile_path(TINY, "float32", "cpu", tmp_path, "layout"))
    found, plain = described(tmp_path), described(tmp_path, EngineFeatures())
    without_s, step_s = plain.analysis.step_s, found.analysis.step_s
    assert plain_step_s(found.task, plain.plan) == pytest.approx(without_s)
    assert found.plain_step_s == pytest.approx(without_s)
    assert step_s > 1.2 * without_s
    line = f"reproducible='layout': predicted step {step_s:.3f} s, {without_s:.3f} s without it"
    assert f"{line} ({step_s / without_s - 1:+.0%})" in list(totals(found))
    [worth] = summary(found)["worth"]
    assert (worth.feature, worth.without_s) == ("reproducible='layout'", found.plain_step_s)
    rationale = explain(found).rationale
    assert rationale
    assert worth in rationale.worth
    assert plain.plain_step_s is None
    assert not any("reproducible" in line for line in totals(plain))


def test_runs_correct_both_prices_alike(tmp_path: Path) -> None:
    for profile, option in ((measured(), "plan"), (of_layout(), "layout")):
        save_profile(profile, profile_path(TINY, "float32", "cpu", tmp_path, option))  # type: ignore[arg-type]
    found = described(tmp_path)
    costs = replace(found.task.costs, call_factors=dict.fromkeys(found.plan.calls, 2.0))
    twice = replace(found.task, costs=costs)
    assert plain_step_s(twice, found.plan) == pytest.approx(2 * (found.plain_step_s or 0))


def test_an_inference_has_no_parts() -> None:
    plain, ordered = (work_of(call("m", TINY, INFERENCE, "x"), ONE, 1, features=EngineFeatures(ordered=each))
                      for each in (False, True))  # fmt: skip
    assert plain.dynamic_bytes() == ordered.dynamic_bytes()
