"""OSDP in the plan search: what is sharded where, against the solver itself and numbers by hand."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from realhf.architecture.compute import Recomputation
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig
from realhf.base.errors import UserError
from realhf.cli import main
from realhf.dataflow.graph import TRAIN_STEP, DataflowGraph, ModelFunctionCallDef
from realhf.geometry.layout import ParallelStrategy
from realhf.geometry.parameters import parameter_count
from realhf.planning.mapping import Mapper
from realhf.planning.model.call import CallModel
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.operator_modes import Links, sliced, solve, uniform_plan
from realhf.planning.model.operators import Training, decoder_problem
from realhf.planning.model.sharding import added_links, choose_modes, rooms, stage_operators
from realhf.planning.model.sizes import model_sizes
from realhf.planning.model.timings import Costs, Timings
from realhf.planning.model.workload import Workload
from realhf.planning.options import call_options
from realhf.planning.predict import predict
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.tables import Problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan, without_hopeless
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, call_model, cpu_cluster, ppo

CPU = load_hardware("cpu")
SHARDED = EngineFeatures(sharded_operators=True)
# One layer and one key-value head: neither stages nor tensor parallelism can divide it.
WHOLE = DecoderConfig(
    hidden_size=512, intermediate_size=2048, num_layers=1, num_heads=8, num_kv_heads=1, vocab_size=65536
)
LENGTHS = Workload(prompt_tokens=8, new_tokens=8)
SFT = DataflowGraph([call("sft", WHOLE, TRAIN_STEP, "seq")], ["seq"])
MIB = 2**20


def task(graph: DataflowGraph, features: EngineFeatures, memory: int, batch_size: int = 16) -> PlanningTask:
    timings = {
        model: Timings(model=model, dtype="float32", hardware=CPU, features=features) for model in graph.models.values()
    }
    return PlanningTask(
        graph=graph,
        batch_size=batch_size,
        workload=LENGTHS,
        cluster=cpu_cluster(8, memory=memory),
        costs=Costs(CPU, timings, features),
        max_steps_in_flight=1,
        dtype="float32",
    )


def tables(asked: PlanningTask) -> Problem:
    calls = asked.graph.calls.values()
    options = {call.name: call_options(call, asked.batch_size, asked.cluster) for call in calls}
    return build_problem(asked, options)


@pytest.mark.parametrize(
    ("graph", "memory"),
    [(SFT, 250 * MIB), (ppo(WHOLE, TINY.with_head("scalar")), 580 * MIB)],
    ids=["alone", "beside others"],
)
def test_an_infeasible_training_becomes_feasible(graph: DataflowGraph, memory: int) -> None:
    # 71 million parameters: 8 bytes of each on every rank and 8 / 8 of its AdamW states (610 MiB) do not fit.
    without, asked = task(graph, ENGINE, memory), task(graph, SHARDED, memory)
    with pytest.raises(UserError, match="no plan fits into memory"):
        search_plan(without, SearchBudget(evaluations=2000), 0)
    found = search_plan(asked, SearchBudget(evaluations=20_000), 0)
    predicted = predict(asked, found.plan)
    assert predicted.fits
    assert max(predicted.device_bytes) <= memory
    assert not predict(without, found.plan).fits
    [(name, sharding)] = asked.shardings(found.plan).items()
    assert graph.calls[name].config == WHOLE
    assert graph.calls[name].trains
    assert str(sharding).startswith(f"{len(sharding.sharded)} of {len(sharding.plan.problem.operators)} operators of ")
    assert without.shardings(found.plan) == {}


def test_without_the_feature_tables_are_as_they_were() -> None:
    graph = ppo(WHOLE)
    # Where everything fits the feature changes nothing, either.
    assert tables(task(graph, SHARDED, 2**34)) == tables(task(graph, ENGINE, 2**34))
    tight, sharded = tables(task(graph, ENGINE, 580 * MIB)), tables(task(graph, SHARDED, 580 * MIB))
    changed = 0
    for before, after in zip(tight.calls, sharded.calls, strict=True):
        for row, other in zip(before.options, after.options, strict=True):
            dp = int(row.strategy.split()[0].removeprefix("dp"))
            too_large = row.static_bytes + row.dynamic_bytes > 580 * MIB
            if "sharded" not in other.strategy:
                assert row == other
                continue
            changed += 1
            assert too_large
            assert dp > 1
            assert before.name.endswith("train_step")
            assert other.strategy == f"{row.strategy} sharded"  # no call of the model finds its parameters whole
            assert other.time_s > row.time_s
            assert other.static_bytes + other.dynamic_bytes <= 580 * MIB
    assert changed
    assert {row.strategy for table in tight.calls for row in table.options} == {
        str(option.layout.strategy)
        for definition in graph.calls.values()
        for option in call_options(definition, 16, task(graph, ENGINE, 580 * MIB).cluster)
    }
    assert msgspec.structs.replace(sharded, calls=[]) == msgspec.structs.replace(tight, calls=[])


def test_modes_are_those_of_the_solver() -> None:
    """Asked directly, with all three modes, for the whole model."""
    strategy, room = ParallelStrategy(dp=4), 400 * MIB
    links = Links.ring(CPU, 4)
    training = Training(sequence_length=1, flops=1.0, links=links, memory_bytes=room, dtype="float32")
    direct = decoder_problem(WHOLE, training)
    states_only = tuple(replace(op, activation_bytes=0, compute_s=0.0) for op in direct.operators)
    free = sliced(replace(direct, operators=states_only, memory_bytes=2**40), 4)
    without = uniform_plan(free, "zero1", range(1, 2))
    assert without is not None
    expected = solve([replace(free, memory_bytes=room)], range(1, 2))  # slices of the large operators do best here
    plan = choose_modes(PlacedModel(WHOLE, strategy, "float32"), links, room)
    assert plan is not None
    assert plan.proven
    assert plan.added_s == pytest.approx(expected.communication_s - without.communication_s)
    by_name = dict(zip((op.name for op in expected.problem.operators), expected.slices, strict=True))
    sharded = {op.name: row[1] / op.slices for op, row in zip(plan.problem.operators, plan.slices, strict=True)}
    assert sharded == {op.name: by_name[op.name][2] / op.slices for op in expected.problem.operators}
    assert 0 < sum(sharded.values()) < len(sharded)


@pytest.mark.parametrize("model", [TINY, replace(TINY, tied_embeddings=True), TINY.with_head("scalar")])
@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
def test_operators_are_a_device_of_the_fullest_stage(model: DecoderConfig, degrees: tuple[int, int]) -> None:
    strategy = ParallelStrategy(2, *degrees)
    placed = PlacedModel(model, strategy, "bfloat16")
    operators = stage_operators(placed)
    elements = sum(op.parameter_bytes for op in operators) // 2
    assert elements == model_sizes(model).largest(strategy)
    # ZeRO-1 of all of them is what a training keeps without sharding.
    states = sum(op.parameter_bytes + op.gradient_bytes + op.optimizer_bytes / 2 for op in operators)
    assert states == placed.static_bytes(trained=True)


def train_cost(features: EngineFeatures, memory: int, definition: ModelFunctionCallDef, latency_s: float) -> CallModel:
    hardware = msgspec.structs.replace(CPU, intra_node_latency_s=latency_s)
    timings = Timings(model=definition.config, dtype="bfloat16", hardware=hardware, features=features)
    return call_model(
        call=definition,
        batch_size=16,
        workload=LENGTHS,
        cluster=cpu_cluster(4, memory=memory),
        costs=Costs(hardware, {definition.config: timings}, features),
        dtype="bfloat16",
    )


def smallest_memory(cost: CallModel, strategy: ParallelStrategy, micro_batches: int) -> int:
    """With which every operator is sharded."""
    work = cost.work(strategy, micro_batches)
    modes = choose_modes(work.placed, added_links(work, (0.0, 1.0)), 2**40)
    assert modes is not None
    states = uniform_plan(modes.problem, "sharded", range(1, 2))
    assert states is not None
    return int(work.dynamic_bytes()) + states.memory_bytes


def test_communication_grows_as_three_to_two() -> None:
    """One micro-batch, gradients as wide as parameters, no latency: two passes of a ring of 4 become three."""
    strategy, narrow = ParallelStrategy(dp=4), EngineFeatures(fp32_gradients=False)
    definition = call("m", TINY, TRAIN_STEP, "x", mini_batches=2)
    features = replace(narrow, sharded_operators=True)
    memory = smallest_memory(train_cost(features, 2**40, definition, 0.0), strategy, 1)
    before, after = (train_cost(f, memory, definition, 0.0) for f in (narrow, features))
    sharding = after.sharding(strategy, 1)
    assert sharding is not None
    assert len(sharding.sharded) == len(sharding.plan.problem.operators)
    one_pass = 3 / 4 * parameter_count(TINY) * DTYPE_BYTES["bfloat16"] / CPU.intra_node_bandwidth
    assert before.timings.all_reduce(parameter_count(TINY) * 2, 4, crosses_nodes=False) == pytest.approx(2 * one_pass)
    assert sharding.plan.added_s == pytest.approx(one_pass)
    assert after.seconds(strategy, 1) - before.seconds(strategy, 1) == pytest.approx(2 * one_pass)
    assert sharding.regather_s == pytest.approx(one_pass)
    # A byte less than all sharded needs holds nothing, and the option stays too large.
    assert train_cost(features, memory - 1, definition, 0.0).sharding(strategy, 1) is None


@pytest.mark.parametrize("recomputation", ["off", "selective", "full"])
def test_every_micro_batch_gathers_and_scatters(recomputation: Recomputation) -> None:
    """By messages: bf16 parameters gathered twice (three times) and fp32 gradients scattered, of each operator."""
    strategy, features = ParallelStrategy(dp=2), replace(SHARDED, recomputation=recomputation)
    definition = call("m", TINY, TRAIN_STEP, "x")
    memory = smallest_memory(train_cost(features, 2**40, definition, 1e-3), strategy, 4)
    sharding = train_cost(features, memory, definition, 1e-3).sharding(strategy, 4)
    assert sharding is not None
    expected = 0.0
    for op in sharding.plan.problem.operators:
        elements = op.parameter_bytes // 2
        gather = 1e-3 + 2 * elements / 2 / CPU.intra_node_bandwidth
        scatter = 1e-3 + 4 * elements / 2 / CPU.intra_node_bandwidth
        once = (2 + 4) * elements / 2 / CPU.intra_node_bandwidth  # of the one message a mini-batch, but its latency
        expected += 4 * ((3 if recomputation == "full" else 2) * gather + scatter) - once
    assert sharding.plan.added_s == pytest.approx(expected)


def test_memory_of_an_option() -> None:
    """States, the gather and the call's own bytes add up to no more than the device has; others get half of it."""
    asked = task(SFT, SHARDED, 400 * MIB)
    [definition] = SFT.calls.values()
    strategy = ParallelStrategy(dp=8)
    model = asked.call_models[definition.name]
    dynamic = model.work(strategy, 1).dynamic_bytes()
    alone = model.sharding(strategy, 1)
    shared = replace(model, shares_devices=True).sharding(strategy, 1)
    assert alone is not None
    assert shared is not None
    states = 0.0
    largest = 0.0
    for op, (zero1, sharded) in zip(alone.plan.problem.operators, alone.plan.slices, strict=True):
        elements = op.parameter_bytes / 4 / op.slices
        states += zero1 * elements * (8 + 8 / 8) + sharded * elements * 16 / 8
        largest = max(largest, elements * 4) if sharded else largest
    assert alone.static_bytes == pytest.approx(states, abs=1)
    assert alone.gather_bytes == largest
    assert alone.static_bytes + alone.gather_bytes + dynamic <= 400 * MIB
    assert shared.static_bytes + shared.gather_bytes <= 200 * MIB < alone.static_bytes
    assert shared.plan.added_s > alone.plan.added_s
    assert rooms(50.0, 150.0, shares_devices=True) == [75, 100]
    assert rooms(50.0, 150.0, shares_devices=False) == [100]
    assert rooms(100.0, 150.0, shares_devices=True) == [50]
    assert rooms(200.0, 150.0, shares_devices=True) == []


def test_options_that_sharding_saves_are_not_hopeless() -> None:
    [definition] = SFT.calls.values()
    for features, kept in ((ENGINE, False), (SHARDED, True)):
        asked = task(SFT, features, 250 * MIB)
        rows = call_options(definition, 16, asked.cluster)
        left = without_hopeless(asked, definition.name, rows)
        # Without the feature nothing fits, and then all stay.
        assert (0 < len(left) < len(rows)) == kept
        assert not kept or all(option.layout.strategy.dp > 1 for option in left)


def test_a_plan_is_predicted_as_it_was_searched() -> None:
    asked = task(SFT, SHARDED, 250 * MIB)
    found = search_plan(asked, SearchBudget(evaluations=2000), 0)
    predicted = predict(asked, found.plan)
    assert predicted.step_s == pytest.approx(found.certificate.cost_s)
    assert predicted.peak_bytes == found.prediction.peak_bytes


def test_mapping_by_rule_shards_too() -> None:
    # 541 million parameters, 9 bytes of each with ZeRO-1 (4.5 GiB); a copy of 4, and buckets, fit beside half a device.
    graph = ppo(replace(WHOLE, vocab_size=2**19), TINY.with_head("scalar"))

    def on_two_nodes(features: EngineFeatures) -> PlanningTask:
        asked = task(graph, features, 4500 * MIB)
        return replace(asked, cluster=replace(asked.cluster, num_nodes=2))

    with pytest.raises(UserError, match="fits into the memory"):
        Mapper(on_two_nodes(ENGINE)).best()
    asked = on_two_nodes(SHARDED)
    predicted = predict(asked, asked.plan(Mapper(asked).best().calls, preset="hybridflow"))
    assert predicted.fits
    assert list(asked.shardings(predicted.plan)) == ["actor_train_step"]


def test_the_command_says_what_is_sharded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 8}
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps({**fields, "num_key_value_heads": 1, "vocab_size": 65536, "model_type": "llama"}))
    sft = Path(__file__).parents[3] / "experiments/sft.py"
    # 0.3 GiB, and three communicators: two of all devices, and of the data-parallel group, which has all of them, too.
    words = ["--cluster", "h100-1x8", "--memory-gb", "2.226", "--batch-size", "16", "--prompt-tokens", "16"]
    words += ["--model-type", f"sft={config}", "--dtype", "float32", "--json", str(out), "--evaluations", "1000"]
    assert main(["plan", str(sft), *words]) == 2
    assert "no plan fits into memory" in capsys.readouterr().err
    assert main(["plan", str(sft), *words, "--features", "sharded-operators"]) == 0
    printed = capsys.readouterr().out
    assert "what if: an engine with sharded-operators; the engine is not so" in printed
    [plan] = json.loads(out.read_bytes())["plans"]
    [(name, text)] = plan["sharded"].items()
    assert name == "sft_train_step"
    assert " of 9 operators of a device sharded over dp=" in text
    assert f"{name}: {text}\n" in printed
