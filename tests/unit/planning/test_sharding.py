"""Modes of operators in the plan search: what is chosen where, that it can run, and that no other choice is better."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest

from realhf.architecture.compute import ModeRules
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.cli import main
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import AS_SET_UP, CallCompute, CallPlan, load_plan, save_plan
from realhf.dataflow.plan_checks import check_plan
from realhf.geometry.layout import ParallelStrategy
from realhf.geometry.operators import NORMS, operators, slice_modes
from realhf.planning.explain.comparison import best_alternatives
from realhf.planning.explain.remedies import smallest_peak_bytes
from realhf.planning.model.call import CallModel
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.mode_choice import compact, memory_limits
from realhf.planning.model.sizes import largest_units
from realhf.planning.model.timings import Costs, Timings
from realhf.planning.model.workload import Workload
from realhf.planning.options import options_to_search
from realhf.planning.predict import predict
from realhf.planning.problem.option_rows import row_of
from realhf.planning.request import SearchBudget
from realhf.planning.search import SearchResult, search_plan, worthwhile_options
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, ppo, with_memory

CPU, H100 = load_hardware("cpu"), msgspec.structs.replace(load_hardware("h100"), communicator_bytes=0.0)
# One layer and one key-value head: neither stages nor tensor parallelism can divide it.
WHOLE = DecoderConfig(
    hidden_size=512, intermediate_size=2048, num_layers=1, num_heads=8, num_kv_heads=1, vocab_size=65536
)
DEEP = DecoderConfig(
    hidden_size=512, intermediate_size=2048, num_layers=6, num_heads=8, num_kv_heads=1, vocab_size=1024
)
LENGTHS = Workload(prompt_tokens=8, new_tokens=8)
SFT = DataflowGraph([call("sft", WHOLE, TRAIN_STEP, "seq")], ["seq"])
DEEP_SFT = DataflowGraph([call("sft", DEEP, TRAIN_STEP, "seq")], ["seq"])
PPO = ppo(WHOLE, TINY.with_head("scalar"))
OPEN = ("data_parallel", "prefetch")
MIB = 2**20


def task(
    graph: DataflowGraph, memory: int, *, mixed: bool = True, hardware: Hardware = CPU, num_nodes: int = 1
) -> PlanningTask:
    features = ENGINE.on(hardware)
    timings = {
        model: Timings(model=model, dtype="float32", hardware=hardware, features=features)
        for model in graph.models.values()
    }
    cluster = replace(cpu_cluster(8, num_nodes=num_nodes), hardware=hardware)
    return PlanningTask(
        graph=graph,
        batch_size=16,
        workload=LENGTHS,
        cluster=with_memory(cluster, memory),
        costs=Costs(hardware, timings, features),
        max_steps_in_flight=1,
        dtype="float32",
        open_choices=dict.fromkeys(graph.models, OPEN),
        mixed=frozenset(graph.models) if mixed else frozenset(),
    )


def searched(asked: PlanningTask) -> SearchResult | None:
    try:
        return search_plan(asked, SearchBudget(evaluations=2000))
    except UserError:
        return None


def chosen_rules(asked: PlanningTask, found: SearchResult) -> dict[str, ModeRules]:
    compute = {name: entry.compute.data_parallel for name, entry in found.plan.calls.items()}
    return {name: rules for name, rules in compute.items() if isinstance(rules, tuple)}


@pytest.mark.parametrize(("graph", "memory"), [(SFT, 500 * MIB), (PPO, 580 * MIB)], ids=["alone", "beside others"])
def test_what_fits_in_no_one_mode_fits_with_some_operators_sharded(
    graph: DataflowGraph, memory: int, tmp_path: Path
) -> None:
    # 71 million parameters: 8 bytes of each on every rank and 8 / 8 of its AdamW states (610 MiB) do not fit, nor does
    # full sharding, which gathers the embedding (128 MiB) whole, with its gradient twice.
    assert searched(task(graph, memory, mixed=False)) is None
    asked = task(graph, memory)
    found = searched(asked)
    assert found is not None
    save_plan(found.plan, tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    check_plan(plan, graph, asked.batch_size)
    predicted = predict(asked, plan)
    assert predicted.fits
    assert predicted.step_s == pytest.approx(found.prediction.step_s)
    assert predicted.peak_bytes == found.prediction.peak_bytes <= memory
    [(name, rules)] = chosen_rules(asked, found).items()
    assert graph.model_calls[name].trains
    assert plan.calls[name].compute == found.plan.calls[name].compute
    assert plan.calls[name].compute.prefetch is False  # on a CPU it would hide nothing
    assert any("sharded" in modes for modes in slice_modes(WHOLE, rules).values())
    [text] = asked.modes(plan).values()
    assert text.startswith(f"{rules[0][0]} {rules[0][1]}")
    assert f"of the parameters sharded over dp={plan.calls[name].dp}" in text
    alternative = next(each for each in best_alternatives(asked, plan) if each.call == name)
    assert [worth.feature for worth in alternative.worth] == ["modes by operator"]
    assert alternative.worth[0].without_s is None  # nothing fits without them


@pytest.mark.parametrize("memory", [480, 520, 560, 600, 640, 700, 1000])
def test_never_slower_than_the_pure_ways(memory: int) -> None:
    for graph in (SFT, DEEP_SFT, PPO):
        mixed, pure = (searched(task(graph, memory * MIB, mixed=mixed)) for mixed in (True, False))
        if pure is not None:
            assert mixed is not None
            assert mixed.prediction.step_s <= pure.prediction.step_s
    plenty = searched(task(SFT, 2**34))
    assert plenty is not None
    assert chosen_rules(task(SFT, 2**34), plenty) == {}


def training(memory: int, graph: DataflowGraph, **changes: object) -> CallModel:
    asked = task(graph, memory)
    [model] = asked.call_models.values()
    return replace(model.under(CallCompute(prefetch=False)), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [0.35, 0.6, 0.85])
def test_the_choice_is_the_best_of_all(part: float) -> None:
    """Every choice of whole operators of one layer, and of how many layers of three kinds, is no faster in the room."""
    strategy = ParallelStrategy(4)
    for graph in (DataflowGraph([call("m", replace(DEEP, num_layers=1), TRAIN_STEP, "x")], ["x"]), DEEP_SFT):
        model = training(2**40, graph)
        config = model.call.config
        zero1, least = model.static_bytes(strategy), need(model, (("*", "sharded"),), strategy)
        room = int(least + part * (zero1 - least))
        rules = model.mix(strategy, 2, room)
        assert rules
        assert need(model, rules, strategy) <= room
        others = [
            other
            for names in sharded_sets(config)
            if (other := compact(dict.fromkeys(names, ("sharded",)), config)) and need(model, other, strategy) <= room
        ]
        assert others
        best_s = min(mixed(model, other).seconds(strategy, 2) for other in others)
        assert mixed(model, rules).seconds(strategy, 2) <= best_s * (1 + 1e-9)
        assert mixed(model, rules).seconds(strategy, 2) > model.seconds(strategy, 2)


def sharded_sets(config: DecoderConfig) -> list[list[str]]:
    """With one layer all sets of operators, with several the first layers of three kinds and the rest whole."""
    names = [name for name in operators(config) if name != NORMS]
    if config.num_layers == 1:
        return [
            [n for n, taken in zip(names, bits, strict=True) if taken] for bits in product((0, 1), repeat=len(names))
        ]
    layers = range(config.num_layers + 1)
    return [
        [f"layers.{n}.{kind}" for kind, count in zip(("gate", "up", "down"), counts, strict=True) for n in range(count)]
        for counts in product(layers, repeat=3)
    ]


def mixed(model: CallModel, rules: ModeRules) -> CallModel:
    return model.under(CallCompute(data_parallel=rules))


def need(model: CallModel, rules: ModeRules, strategy: ParallelStrategy) -> float:
    """Of states, and of what is gathered of them."""
    way = mixed(model, rules)
    gathered = way.work(strategy, 2).dynamic_bytes() - model.work(strategy, 2).dynamic_bytes()
    return way.static_bytes(strategy) + gathered


def test_an_inference_gathers_in_a_sharded_home_and_a_generation_has_it_copied() -> None:
    """As the engine does: what the inference gathers, two units at a time, and how long, are the home's."""
    sharded, strategy = CallCompute(data_parallel="fsdp"), ParallelStrategy(dp=2)
    calls = [call("m", WHOLE, TRAIN_STEP, "seq"), call("m", WHOLE, INFERENCE, "prompt", "seq")]
    alone = DataflowGraph(calls, ["prompt"])
    first, second = largest_units(WHOLE, 1)
    [home, reader] = (alone.model_calls[name] for name in ("m_train_step", "m_inference"))
    asked = task(alone, 4096 * MIB)
    row, model = row_of(asked, home, strategy, 1, sharded), asked.call_models[home.name].under(sharded)
    assert row.static_bytes == model.static_bytes(strategy) + 4 * (first + second)
    once_s = asked.call_models[reader.name].under(sharded).gathering_s(strategy, 1)
    assert row.time_s == pytest.approx(model.seconds(strategy, 1) + once_s)
    assert once_s > 0
    assert row.strategy == row_of(asked, reader, strategy, 1, AS_SET_UP).strategy, "no copy is made"
    plans = {home.name: CallPlan(devices=(0, 2), dp=2, compute=sharded), reader.name: CallPlan(devices=(0, 2), dp=2)}
    predicted = predict(asked, asked.plan(plans, costs="analytic"))
    assert predicted.transfer_s["m: m_train_step -> m_inference"] == 0.0
    away = {**plans, reader.name: CallPlan(devices=(0, 1))}
    assert predict(asked, asked.plan(away, costs="analytic")).transfer_s["m: m_train_step -> m_inference"] > 0.0

    rollout = call("m", WHOLE, GENERATE, "prompt", "seq")
    asked = task(DataflowGraph([calls[0], rollout], ["prompt"]), 4096 * MIB)
    row = row_of(asked, home, strategy, 1, sharded)
    assert row.static_bytes == asked.call_models[home.name].under(sharded).static_bytes(strategy)
    assert row.strategy != row_of(asked, rollout, strategy, 1, AS_SET_UP).strategy


def test_memory_limits_of_states() -> None:
    assert memory_limits(150.0, 200, 120, shares_devices=False) == [150]
    assert memory_limits(250.0, 200, 120, shares_devices=True) == [180, 160, 140]
    assert memory_limits(150.0, 200, 120, shares_devices=True) == [150, 140]


def test_stages_choose_for_themselves_and_share_a_tied_embedding() -> None:
    tied = replace(DEEP, tied_embeddings=True, vocab_size=16384)
    model = training(2**40, DataflowGraph([call("m", tied, TRAIN_STEP, "x")], ["x"]))
    strategy = ParallelStrategy(2, 1, 2)
    for room in (200 * MIB, 220 * MIB):
        rules = model.mix(strategy, 2, room)
        assert rules
        assert need(model, rules, strategy) <= room
    assert model.mix(strategy, 2, 150 * MIB) is None
    smallest = model.mix(strategy, 2, None)
    assert smallest
    assert need(model, smallest, strategy) < 200 * MIB


def test_what_fits_nowhere_is_refused_with_what_would_do() -> None:
    smallest = smallest_peak_bytes(task(SFT, 100 * MIB))
    assert smallest is not None
    assert smallest < (smallest_peak_bytes(task(SFT, 100 * MIB, mixed=False)) or 0)
    assert searched(task(SFT, int(smallest) - MIB)) is None
    assert searched(task(SFT, int(smallest) + MIB)) is not None


def test_modes_are_searched_for_one_training_that_leaves_them_open() -> None:
    def modes(asked: PlanningTask) -> list[ModeRules]:
        rows = [option for name in asked.graph.model_calls for option in options_to_search(asked, name)]
        return [row.compute.data_parallel for row in rows if isinstance(row.compute.data_parallel, tuple)]

    open_task = task(SFT, 500 * MIB)
    assert modes(open_task)
    assert not modes(task(SFT, 500 * MIB, mixed=False))
    assert not modes(replace(open_task, open_choices={"sft": ("prefetch",)}))
    assert not modes(task(SFT, 2**34))
    assert not modes(task(SFT, 500 * MIB, num_nodes=16))  # of 128 devices only a part of all ways is searched
    [without] = (replace(model.features, zero1=False) for model in open_task.call_models.values())
    assert not modes(replace(open_task, costs=replace(open_task.costs, features=without)))
    twice = [call("m", WHOLE, TRAIN_STEP, reads) for reads in ("x", "y")]
    twice[1] = replace(twice[1], name="again")
    assert not modes(task(DataflowGraph(twice, ["x", "y"]), 500 * MIB))


def test_on_gpus_the_next_gather_begins_early_where_there_is_room() -> None:
    strategy = ParallelStrategy(8)
    model = task(SFT, 2**40, hardware=H100).call_models["sft_train_step"]
    early, late = (mixed(model.under(CallCompute(prefetch=on)), (("*", "sharded"),)) for on in (True, False))
    assert early.seconds(strategy, 1) < late.seconds(strategy, 1)
    assert early.work(strategy, 1).dynamic_bytes() > late.work(strategy, 1).dynamic_bytes()
    on_host = task(SFT, 2**40).call_models["sft_train_step"]
    early, late = (mixed(on_host.under(CallCompute(prefetch=on)), (("*", "sharded"),)) for on in (True, False))
    assert early.seconds(strategy, 1) == late.seconds(strategy, 1)
    ways = {
        option.compute.prefetch
        for memory in range(440, 500, 10)
        for option in worthwhile_options(task(SFT, memory * MIB, hardware=H100))["sft_train_step"]
        if isinstance(option.compute.data_parallel, tuple)
    }
    assert ways == {None, False}


def test_the_command_says_the_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 8}
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps({**fields, "num_key_value_heads": 1, "vocab_size": 65536, "model_type": "llama"}))
    sft = Path(__file__).parents[3] / "experiments/sft.py"
    words = ["--cluster", "h100-1x8", "--batch-size", "16", "--prompt-tokens", "16"]
    words += ["--model-type", f"sft={config}", "--dtype", "float32", "--json", str(out), "--evaluations", "1000"]
    assert main(["plan", str(sft), *words, "--memory-gb", "1"]) == 2
    # 0.15 GiB, and two communicators: that of all devices, and of the data-parallel group, which has all of them, too.
    assert "the smallest change that is enough: 1.5 GiB of memory a device" in capsys.readouterr().err
    assert main(["plan", str(sft), *words, "--memory-gb", "1.6"]) == 0
    printed = capsys.readouterr().out
    [plan] = json.loads(out.read_bytes())["plans"]
    [(name, text)] = plan["modes"].items()
    assert name == "sft_train_step"
    assert "the other operators zero1; " in text
    assert f"{name}: {text}\n" in printed


def test_seconds_of_a_training_by_hand() -> None:
    """All sharded over 4 ranks beside ZeRO-1, in two micro-batches, by messages of the ring of a host."""
    model, strategy = training(2**40, DEEP_SFT), ParallelStrategy(4)
    latency_s, bandwidth = CPU.intra_node_latency_s, CPU.intra_node_bandwidth

    def one_pass(elements: int) -> float:
        return 3 * (latency_s + elements * 4 / 4 / bandwidth)

    # Of a layer q, o; k, v with one of 8 heads; gate, up, down. Norms: 13 of 512, in a vector of whole shards.
    layer = [512 * 512] * 2 + [64 * 512] * 2 + [2048 * 512] * 3
    embedding = head = 1024 * 512
    norms = 13 * 512
    units = 6 * layer
    gathered_s = sum(3 * one_pass(elements) for elements in [*units, head]) + 2 * one_pass(embedding)
    whole = sum(units) + embedding + head + norms
    added_s = 2 * gathered_s + 2 * one_pass(norms) - 2 * one_pass(whole)
    sharded = mixed(model, (("*", "sharded"),))
    assert sharded.seconds(strategy, 2) - model.seconds(strategy, 2) == pytest.approx(added_s, rel=1e-9)
