"""Bytes on a device against numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.architecture.compute import ComputeConfig, Recomputed
from realhf.architecture.decoding import GraphLife
from realhf.architecture.model import DecoderConfig, DType, Experts
from realhf.architecture.named import LLAMA
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, ModelFunctionCallDef
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, chunk_layers
from realhf.geometry.parameters import decoder_parameters, parameter_count
from realhf.geometry.pipeline_schedule import training_order
from realhf.planning.model.activations import (
    InFlight,
    activation_elements,
    beyond_kept_bytes,
    kept_bytes,
    kept_layer_bytes,
)
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE, FEATURES, EngineFeatures, of_setup
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.rank_work import layers_in_flight
from realhf.planning.model.sizes import model_sizes
from realhf.planning.model.timings import TensorGroup, load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.options import Option
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import device_needs, native_problem
from realhf.planning.task import PlanningTask
from realhf.planning.what_if import WhatIf
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES
from tests.unit.planning.graphs import TINY, call, call_model, ppo, with_memory, work_of

# Of TINY in float32, bytes a token and layer: two norms (input, normalised, output; the root), rotated q and
# attention's output twice, k and v, a number a head, four arrays of the MLP. The rotary tables are those of all layers.
NORMS, DIVIDED, TABLES = 2 * (3 * 4 * 64 + 4), 3 * 4 * 64 + 2 * 4 * 64 + 4 * 4 + 4 * 4 * 128, 2 * 4 * 16
LAYER = NORMS + DIVIDED
LARGEST = 4 * 64 * 128  # the product for the largest weight's gradient
BACKWARD = (
    6 * 4 * 64 + TABLES
)  # what the backward pass has of a token beside: the final norm's, or as much of the MLP's
RECOMPUTE = EngineFeatures(recomputation="full")
WHOLE = EngineFeatures(full_logits=True)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_of_a_what_if_changes_something(name: str) -> None:
    field, with_it, without = FEATURES[name]
    assert replace(ENGINE, **{field: with_it}) != replace(ENGINE, **{field: without})


@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 4), ("float32", 4), ("float64", 8)])
def test_logits_are_in_float32_at_least(dtype: DType, item: int) -> None:
    work = work_of(
        call("m", TINY, INFERENCE, "x"),
        ParallelStrategy(tp=2),
        1,
        dtype=dtype,
        features=EngineFeatures(logits_chunk_bytes=None),
    )
    assert work._logits_bytes(10) == 10 * 32 / 2 * item
    critic = work_of(call("m", TINY.with_head("scalar"), INFERENCE, "x"), ParallelStrategy(tp=2), 1, dtype=dtype)
    assert critic._logits_bytes(10) == 10 * item


def test_static_bytes() -> None:
    count = parameter_count(TINY)
    # Parameter and gradient 4 + 4 on both, two states of 4 each divided.
    assert PlacedModel(TINY, ParallelStrategy(dp=2), "float32").static_bytes(trained=True) == (8 + 8 // 2) * count
    assert PlacedModel(TINY, ParallelStrategy(dp=2), "float32").static_bytes(trained=False) == 4 * count
    # bfloat16: parameter 2, gradient, two states and the master copy 4 x 4; or the gradient 2 as well.
    assert PlacedModel(TINY, ParallelStrategy(), "bfloat16").static_bytes(trained=True) == 18 * count
    narrow = EngineFeatures(fp32_gradients=False)
    assert PlacedModel(TINY, ParallelStrategy(), "bfloat16", narrow).static_bytes(trained=True) == 16 * count
    assert PlacedModel(TINY, ParallelStrategy(), "float64").static_bytes(trained=True) == 32 * count


def test_a_run_that_saves_on_its_way_has_a_copy_of_what_it_writes_where_memory_is_the_hosts() -> None:
    count = parameter_count(TINY)
    saves = EngineFeatures(copies_checkpoints=True)
    on_cpu, on_gpu = saves.on(load_hardware("cpu")), saves.on(load_hardware("h100"))
    for strategy, share in ((ParallelStrategy(), 1), (ParallelStrategy(dp=2), 2)):
        without = PlacedModel(TINY, strategy, "bfloat16").static_bytes(trained=True)
        assert PlacedModel(TINY, strategy, "bfloat16", on_gpu).static_bytes(trained=True) == without
        copied = PlacedModel(TINY, strategy, "bfloat16", on_cpu).static_bytes(trained=True) - without
        assert copied == 14 * count // share  # parameter 2, two states and the master copy 4 each
    assert PlacedModel(TINY, ParallelStrategy(), "bfloat16", on_cpu).static_bytes(trained=False) == 2 * count


def test_zero1_divides_states_and_master_copy() -> None:
    count = parameter_count(TINY)
    assert count % 4 == 0
    assert (
        PlacedModel(TINY, ParallelStrategy(dp=4), "bfloat16").static_bytes(trained=True) == 6 * count + 12 * count // 4
    )
    without = EngineFeatures(zero1=False)
    assert PlacedModel(TINY, ParallelStrategy(dp=4), "bfloat16", without).static_bytes(trained=True) == 18 * count
    assert PlacedModel(TINY, ParallelStrategy(dp=4), "bfloat16").static_bytes(trained=False) == 2 * count


def test_fully_sharded_divides_all_of_it_and_gathers_two_units() -> None:
    count = parameter_count(TINY)
    sharded = of_setup(ModelSetup(compute=ComputeConfig(data_parallel="fsdp")))
    assert PlacedModel(TINY, ParallelStrategy(dp=4), "bfloat16", sharded).static_bytes(trained=True) == 18 * count // 4
    assert PlacedModel(TINY, ParallelStrategy(dp=4), "bfloat16", sharded).static_bytes(trained=False) == 2 * count // 4
    train = call("actor", TINY, TRAIN_STEP, "x")
    assert work_of(train, ParallelStrategy(), 1, dtype="bfloat16", features=sharded).gathered_bytes() == 0
    assert work_of(train, ParallelStrategy(dp=4), 1, dtype="bfloat16").gathered_bytes() == 0
    # The largest two units: two layers, or the embedding, or the head with its norm; gradients in float32, twice.
    sizes = model_sizes(TINY)
    head = sizes.head_sharded + sizes.head_replicated
    units = sorted([sizes.layer_sharded + sizes.layer_replicated] * 2 + [sizes.embedding_sharded, head])
    expected = 2 * (units[-1] + units[-2]) + 2 * 4 * units[-1]
    assert work_of(train, ParallelStrategy(dp=4), 1, dtype="bfloat16", features=sharded).gathered_bytes() == expected


def test_a_70b_actor_on_128_devices() -> None:
    """tp 8, pp 4: the last stage has 20 of 80 layers, and head and norm: 17.9e9 elements over 8 ranks."""
    layer = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
    largest = 20 * (layer // 8 + 2 * 8192) + 128256 * 8192 // 8 + 8192
    strategy = ParallelStrategy(dp=4, tp=8, pp=4)
    replicated = EngineFeatures(zero1=False, fp32_gradients=False)
    assert PlacedModel(LLAMA["llama70b"], strategy, "bfloat16", replicated).static_bytes(trained=True) == 16 * largest
    narrow = EngineFeatures(fp32_gradients=False)
    zero1 = PlacedModel(LLAMA["llama70b"], strategy, "bfloat16", narrow).static_bytes(trained=True)
    assert zero1 == 4 * largest + 12 * largest // 4
    assert 15e9 < zero1 < 17e9


def test_a_copy_needs_two_buckets_beside_the_parameters() -> None:
    assert (
        PlacedModel(TINY, ParallelStrategy(), "float32").copy_bytes()
        == 4 * parameter_count(TINY) + 2 * DEFAULT_BUCKET_BYTES
    )


def need(
    definition: ModelFunctionCallDef, strategy: ParallelStrategy, micro_batches: int, features: EngineFeatures = ENGINE
) -> float:
    lengths = Workload(prompt_tokens=4, new_tokens=2, max_prompt_tokens=6, max_new_tokens=4)
    return work_of(definition, strategy, micro_batches, lengths, features=features).dynamic_bytes()


def test_distributions_over_the_vocabulary_are_kept_until_the_step_ends() -> None:
    """Of 8 samples a rank and their 4 response tokens, in two mini-batches of two micro-batches, one packed."""
    train, strategy = call("actor", TINY, TRAIN_STEP, "seq", mini_batches=2), ParallelStrategy(dp=2)
    lengths = Workload(prompt_tokens=4, new_tokens=2, max_new_tokens=4)
    without, found = (
        work_of(train, strategy, 2, replace(lengths, wide_bytes=wide_bytes)).dynamic_bytes() for wide_bytes in (0, 128)
    )
    assert found - without == (8 + 2) * 4 * 128


def test_states_in_host_memory() -> None:
    count, host = parameter_count(TINY), EngineFeatures(offloads_states=True)
    assert PlacedModel(TINY, ParallelStrategy(dp=2), "float32", host).static_bytes(trained=True) == 8 * count
    assert PlacedModel(TINY, ParallelStrategy(dp=2), "bfloat16", host).static_bytes(trained=True) == 6 * count
    assert (
        PlacedModel(TINY, ParallelStrategy(dp=2), "bfloat16", host).chunk_bytes() == (12 + 4) * count // 2
    )  # they pass through, and a gradient of 4 bytes is scaled
    large = LLAMA["llama7b"]
    assert PlacedModel(large, ParallelStrategy(), "bfloat16", host).chunk_bytes() == 2 * 12 * 2**25 + 4 * 2**25
    assert PlacedModel(large, ParallelStrategy(), "bfloat16", EngineFeatures()).chunk_bytes() == 0
    # On a CPU there is no other memory to wait in.
    assert not host.on(load_hardware("cpu")).offloads_states
    assert host.on(load_hardware("h100")).offloads_states


def test_what_is_gathered_of_a_fully_sharded_model() -> None:
    """For an inference two layers, each greater than embedding and head; to generate, all."""
    sharded, strategy = EngineFeatures(fully_sharded=True), ParallelStrategy(dp=2)
    layer = sum(spec.size for spec in decoder_parameters(TINY) if spec.place == "layer") // TINY.num_layers
    inference = call("ref", TINY, INFERENCE, "seq", "logp")
    assert work_of(inference, strategy, 1, features=sharded).gathered_bytes() == 2 * 4 * layer
    generate = call("ref", TINY, GENERATE, "prompts", "seq")
    assert work_of(generate, strategy, 1, features=sharded).gathered_bytes() == 4 * parameter_count(TINY)
    assert work_of(inference, strategy, 1, features=EngineFeatures()).gathered_bytes() == 0
    assert work_of(inference, ParallelStrategy(tp=2), 1, features=sharded).gathered_bytes() == 0  # nothing is divided


def test_dynamic_bytes() -> None:
    activations = 4 * (4 * 64 + 3 * 64 + 3 * 64 + 4 * 128)  # a token and layer: 4608 bytes
    logits = 4 * 32  # a token
    cache = 2 * 64 * 4  # a token and layer; the 10 tokens of a sequence take a page of 16
    train, generate = call("m", TINY, TRAIN_STEP, "x"), call("m", TINY, GENERATE, "x")
    assert need(train, ParallelStrategy(), 2) == 8 * 10 * (4 * LAYER + BACKWARD + 3 * logits) + LARGEST
    # Two stages of two layers: two micro-batches of 4 samples in flight on the first one.
    assert need(train, ParallelStrategy(pp=2), 4) == 4 * 10 * (2 * 2 * LAYER + BACKWARD) + LARGEST
    assert need(call("m", TINY, INFERENCE, "x"), ParallelStrategy(dp=2), 2) == 4 * 10 * (activations + 2 * logits)
    assert need(generate, ParallelStrategy(), 2) == 8 * (16 * 4 * cache + 6 * activations + 2 * logits)
    assert need(generate, ParallelStrategy(pp=2), 4) == 4 * (2 * 16 * 2 * cache + 6 * activations + 2 * logits)
    assert need(replace(generate, model_type=replace(TINY, num_kv_heads=2)), ParallelStrategy(tp=2), 1) == 16 * (
        16 * 4 * cache / 4 + 6 * 4 * (4 * 64 + (3 * 64 + 3 * 32 + 4 * 128) / 2) + 2 * logits
    )


def test_layers_in_flight_in_chunks() -> None:
    # Four layers on two stages: F0 F1 F0' F1' on the first, one layer each; F0 F1 F0' on the last, then a backward.
    two = ParallelStrategy(pp=2, chunks=2)
    assert [layers_in_flight(4, 2, 2, stage, 4, Recomputed()) for stage in (0, 1)] == [((4, 0),), ((3, 0),)]
    assert [layers_in_flight(4, 2, 2, stage, 1, Recomputed()) for stage in (0, 1)] == [((2, 0),), ((2, 0),)]
    # Five layers: two in the first chunk of the first stage. B0' F2 B1' F3 leave the first chunk of each micro-batch.
    assert layers_in_flight(5, 2, 2, 0, 4, Recomputed()) == ((8, 0),)
    assert layers_in_flight(5, 2, 2, 0, 2, Recomputed()) == ((6, 0),)
    # The first of each of these four chunks of two layers.
    assert layers_in_flight(5, 2, 2, 0, 4, Recomputed("full", 1)) == ((4, 4),)
    assert layers_in_flight(5, 2, 2, 0, 4, Recomputed("full")) == ((0, 8),)
    train = call("m", TINY, TRAIN_STEP, "x")
    assert need(train, two, 4) == 4 * 10 * (max(4 * LAYER, 3 * LAYER + 3 * 4 * 32) + BACKWARD) + LARGEST


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 20), st.integers(0, 5))
def test_no_more_layers_are_in_flight_later(pp: int, chunks: int, micro_batches: int, more_layers: int) -> None:
    strategy, num_layers = ParallelStrategy(pp=pp, chunks=chunks), pp * chunks + more_layers
    for stage in range(pp):
        layers = [len(chunk) for chunk in chunk_layers(num_layers, strategy, stage)]
        live = peak = 0
        for run in training_order(pp, stage, chunks, micro_batches):
            live += layers[run.chunk] if run.is_forward else -layers[run.chunk]
            peak = max(peak, live)
        assert layers_in_flight(num_layers, pp, chunks, stage, micro_batches, Recomputed()) == ((peak, 0),)
        parts = layers_in_flight(num_layers, pp, chunks, stage, micro_batches, Recomputed("full", 1))
        assert max(map(sum, parts)) == peak
        if chunks == 1:
            assert peak == min(micro_batches, pp - stage) * layers[0]


def test_recomputation_keeps_the_inputs_of_layers_and_one_layer() -> None:
    train, logits = call("m", TINY, TRAIN_STEP, "x"), 4 * 32
    # Of the layer that is run again, the MLP's gradients beside attention's: 2 x 128, 2 x 64 and 2 x 128.
    backward = 4 * (2 * 128 + 2 * 64 + 2 * 128) + TABLES
    tokens = 8 * 10
    assert need(train, ParallelStrategy(), 2, RECOMPUTE) == (
        tokens * (4 * 4 * 64 + LAYER + backward + 3 * logits) + LARGEST
    )
    # Two stages of two layers, two micro-batches in flight on the first; one on the last, which has the logits.
    first, last = 2 * 2 * 4 * 64 + LAYER, 2 * 4 * 64 + LAYER + 3 * logits
    assert need(train, ParallelStrategy(pp=2), 4, RECOMPUTE) == 4 * 10 * (max(first, last) + backward) + LARGEST


def test_layers_that_are_not_recomputed_keep_all() -> None:
    train, logits = call("m", TINY, TRAIN_STEP, "x"), 4 * 32
    first = replace(RECOMPUTE, recomputed_layers=1)
    tokens, backward = 8 * 10, 4 * (2 * 128 + 2 * 64 + 2 * 128) + TABLES
    # Of four layers three are whole. When the first one is run again, they are freed.
    kept = 3 * LAYER + 4 * 64
    assert need(train, ParallelStrategy(), 2, first) == tokens * (kept + BACKWARD + 3 * logits) + LARGEST
    # With one whole layer there is as much when the third one is run again, and the gradients of both its parts.
    kept = LAYER + 3 * 4 * 64
    three = replace(RECOMPUTE, recomputed_layers=3)
    assert need(train, ParallelStrategy(), 2, three) == tokens * (kept + backward + 3 * logits) + LARGEST
    # Two stages of two layers: two micro-batches in flight on the first stage, one and the logits on the last.
    kept = max(2 * (LAYER + 4 * 64), LAYER + 4 * 64 + 3 * logits)
    assert need(train, ParallelStrategy(pp=2), 4, first) == 4 * 10 * (kept + backward) + LARGEST
    none, whole = (need(train, ParallelStrategy(), 2, each) for each in (replace(first, recomputed_layers=0), ENGINE))
    assert none == whole


# The input and two outputs of 64; q, k, v, attention's output of 64 and its number a head; gate and up of 128.
SELECTIVE_WHOLE, SELECTIVE_DIVIDED = 3 * 4 * 64, 4 * (4 * 64 + 4 + 2 * 128)


def test_selective_recomputation_keeps_what_products_and_attention_gave() -> None:
    kept = SELECTIVE_WHOLE + SELECTIVE_DIVIDED
    features = EngineFeatures(recomputation="selective")
    layers = InFlight(whole=0, recomputed=2 * 3)
    assert kept_bytes(TINY, "float32", 1, layers, features) == 2 * 3 * kept
    assert kept_bytes(TINY, "float32", 1, InFlight(2, 4), features) == 2 * LAYER + 4 * kept
    again = max(BACKWARD, 4 * (2 * 128 + 2 * 64 + 2 * 128) + TABLES) + LAYER - kept
    assert beyond_kept_bytes(TINY, "float32", 1, 0, features) == again
    features = EngineFeatures(recomputation="selective", sequence_parallel=True)
    kept = (4 * 64 + SELECTIVE_DIVIDED) / 2 + 2 * 4 * 64
    assert kept_bytes(TINY, "float32", 2, layers, features) == 2 * 3 * kept


def test_sequence_parallelism_divides_what_every_rank_had() -> None:
    features = EngineFeatures(sequence_parallel=True)
    layer = (NORMS + DIVIDED) / 2
    assert kept_bytes(TINY, "float32", 2, InFlight(3, 0), features) == 3 * layer
    features = EngineFeatures(sequence_parallel=True, recomputation="full")
    assert kept_bytes(TINY, "float32", 2, InFlight(0, 2 * 3), features) == 2 * 3 * 4 * 64 / 2


def test_training_on_a_cpu_attends_in_float32() -> None:
    """q, k, v and the output: two bytes more an element than where attention takes bfloat16."""
    cpu = EngineFeatures(in_host_memory=True)
    wide, narrow = (kept_layer_bytes(TINY, "bfloat16", 1, features) for features in (cpu, ENGINE))
    assert wide - narrow == 4 * 64 * 2
    assert kept_layer_bytes(TINY, "float32", 1, cpu) == kept_layer_bytes(TINY, "float32", 1)


def test_a_process_on_a_cpu_takes_more_than_its_tensors() -> None:
    cpu = EngineFeatures(in_host_memory=True)
    train = call("m", TINY, TRAIN_STEP, "x")
    tensors = need(train, ParallelStrategy(), 2)
    assert need(train, ParallelStrategy(), 2, cpu) == 16 * 2**20 + tensors * 9 / 8
    staged = need(train, ParallelStrategy(pp=2), 2)
    assert need(train, ParallelStrategy(pp=2), 2, cpu) == (16 + 16) * 2**20 + staged * 9 / 8


def test_logits_in_parts_of_the_vocabulary() -> None:
    inference = call("m", TINY, INFERENCE, "x")
    whole, parts = (need(inference, ParallelStrategy(tp=2), 1, features) for features in (WHOLE, ENGINE))
    assert whole - parts == 16 * 10 * 2 * 4 * 32 / 2
    values = call("m", TINY.with_head("scalar"), INFERENCE, "x")
    assert need(values, ParallelStrategy(tp=2), 1, WHOLE) == need(values, ParallelStrategy(tp=2), 1)


def test_logits_are_bounded_by_a_chunk_except_where_tokens_are_drawn() -> None:
    chunk = EngineFeatures(logits_chunk_bytes=1000)
    plain = EngineFeatures(logits_chunk_bytes=None)
    for interface, arrays in ((TRAIN_STEP, 3), (INFERENCE, 2)):
        definition = call("m", TINY, interface, "x")
        all_of_them = 16 * 10 * 4 * 32
        saved = need(definition, ParallelStrategy(), 1, plain) - need(definition, ParallelStrategy(), 1, chunk)
        assert saved == arrays * (all_of_them - 1000)
    generate = call("m", TINY, GENERATE, "x")
    assert need(generate, ParallelStrategy(), 1, plain) == need(generate, ParallelStrategy(), 1, chunk)


@pytest.mark.parametrize("dtype_bytes", [(2, "bfloat16"), (4, "float32")])
def test_grouped_query_heads_shrink_the_cache(dtype_bytes: tuple[int, str]) -> None:
    item, dtype = dtype_bytes
    many = replace(TINY, vocab_size=1, intermediate_size=4)
    lengths = Workload(prompt_tokens=1, new_tokens=999)
    caches = []
    for heads in (4, 1):
        definition = call("m", replace(many, num_kv_heads=heads), GENERATE, "x")
        caches.append(work_of(definition, ParallelStrategy(), 1, lengths, dtype).dynamic_bytes())  # type: ignore[arg-type]
    # Four layers, 1,000 tokens in 63 pages, keys and values of three heads of 16 fewer; and their part of the prefill.
    assert caches[0] - caches[1] == 16 * item * 3 * 16 * (4 * 63 * 16 * 2 + 3)


def test_the_cache_is_made_of_whole_pages() -> None:
    # Keys and values of 64 numbers of 4 bytes; two of four layers on the first of two stages, heads divided over two.
    a_token = 2 * 64 * 4
    generate = call("m", TINY, GENERATE, "x")

    def cache_bytes(tokens: int, strategy: ParallelStrategy) -> float:
        lengths = Workload(prompt_tokens=1, new_tokens=tokens - 1, decode_graphs="kept")
        return work_of(generate, strategy, 1, lengths, features=EngineFeatures(on_gpus=True)).kept_cache_bytes()

    for tokens, kept in ((1, 16), (16, 16), (17, 32), (1000, 1008)):  # and a spare page for what pads a graph
        assert cache_bytes(tokens, ParallelStrategy()) == 4 * a_token * (16 * kept + 16)
    assert cache_bytes(17, ParallelStrategy(tp=2, pp=2)) == 2 * a_token / 2 * (16 * 32 + 2 * 16)


def test_a_decode_step_of_a_gpu() -> None:
    """1,100 tokens are 69 pages, in a graph's table 128: four splits of 512 tokens. 10 rows are 16 there."""
    generate, lengths = call("m", TINY, GENERATE, "x"), Workload(prompt_tokens=500, new_tokens=600)
    features = EngineFeatures(on_gpus=True, full_logits=True)
    work = work_of(generate, ParallelStrategy(tp=2), 1, lengths, dtype="bfloat16", features=features)
    heads, width = TINY.num_heads // 2, TINY.head_dim
    # Logits, their logarithms, probabilities, these again in whole blocks, and two numbers a block in float64.
    drawn = 10 * (32 * (2 + 3 * 4 + 1 / 8) + 4096)
    assert work._step_bytes(10) == drawn + 16 * heads * 4 * (width + 1) * 4
    eager = work_of(
        generate, ParallelStrategy(tp=2), 1, replace(lengths, decode_graphs="off"), dtype="bfloat16", features=features
    )
    assert eager._step_bytes(10) == drawn + 10 * heads * 3 * (width + 1) * 4
    assert work_of(generate, ParallelStrategy(), 1)._step_bytes(10) == 2 * 10 * 32 * 4, "the CPU's draws are one kernel"


def grouped(samples_per_prompt: int, **lengths: Any) -> Workload:
    of_all = {"prompt_tokens": 20, "new_tokens": 12, "samples_per_prompt": samples_per_prompt}
    return Workload(**(of_all | lengths))


def test_samples_of_a_prompt_share_its_full_pages() -> None:
    """16 samples of 20 + 12 tokens in two pages of 16 each, the first of which holds only tokens of the prompt."""
    generate = call("m", TINY, GENERATE, "x")
    a_page, a_token = 16 * 4 * 2 * 64 * 4, activation_elements(TINY, 1) * 4

    def saved(lengths: Workload, strategy: ParallelStrategy, micro_batches: int = 1) -> float:
        alone = replace(lengths, samples_per_prompt=1)
        bytes_of = [work_of(generate, strategy, micro_batches, each).dynamic_bytes() for each in (alone, lengths)]
        return bytes_of[0] - bytes_of[1]

    one = ParallelStrategy()
    assert saved(grouped(4), one) == 12 * a_page + 12 * 20 * a_token
    assert saved(grouped(16), one) == 15 * a_page + 15 * 20 * a_token
    # A rank of four has 4 samples: a whole group of 4, or a part of one of 16.
    assert saved(grouped(16), ParallelStrategy(dp=4)) == saved(grouped(4), ParallelStrategy(dp=4))
    assert saved(grouped(4), ParallelStrategy(dp=4)) == 3 * a_page + 3 * 20 * a_token
    # Each of two stages has two of four layers, for all parts in flight; the prompts are those of one part.
    assert saved(grouped(4), ParallelStrategy(pp=2)) == 12 * a_page / 2 + 6 * 20 * a_token
    # Samples that come when others have ended find no pages to share.
    assert saved(grouped(4), one, micro_batches=2) == 6 * 20 * a_token
    # Prompts of 15 tokens have no full page, and behind them 12 tokens need a second one.
    uneven = grouped(4, prompt_tokens=18, max_prompt_tokens=20)
    assert saved(uneven, one) == 12 * 20 * a_token


def test_a_cache_of_given_size_is_no_larger() -> None:
    generate, strategy = call("m", TINY, GENERATE, "x"), ParallelStrategy()

    def bytes_with(kv_cache_tokens: int | None) -> float:
        workload = Workload(prompt_tokens=6, new_tokens=4, kv_cache_tokens=kv_cache_tokens)
        return work_of(generate, strategy, 1, workload).dynamic_bytes()

    a_page = PlacedModel(TINY, strategy, "float32").cache_bytes(16)
    assert bytes_with(None) == bytes_with(256) == bytes_with(1000), "a page for each of 16 samples"
    # In two pages there are two sequences, each with an array of logits and one more, and no more tokens to compute.
    prefill, logits = (16 * 6 - 32) * activation_elements(TINY, 1) * 4, 2 * (16 - 2) * 32 * 4
    assert bytes_with(None) - bytes_with(40) == (16 - 2) * a_page + prefill + logits
    # Those that were preempted may be computed again with their responses.
    assert bytes_with(240) - bytes_with(None) == (240 - 16 * 6) * activation_elements(TINY, 1) * 4 - a_page - 2 * 32 * 4


def test_a_cpu_has_the_weights_of_the_linears_twice_while_it_generates() -> None:
    cpu = EngineFeatures(packs_weights=True)
    layer, head = 4 * 64 * 64 + 3 * 64 * 128, 32 * 64
    linears = {
        ParallelStrategy(): 4 * layer + head,
        ParallelStrategy(tp=2): (4 * layer + head) // 2,
        ParallelStrategy(pp=2): 2 * layer + head,  # of the last stage
        ParallelStrategy(dp=2): 4 * layer + head,
    }
    generate = call("m", TINY, GENERATE, "x")
    for strategy, elements in linears.items():
        added = need(generate, strategy, 1, cpu) - need(generate, strategy, 1)
        assert added == PlacedModel(TINY, strategy, "float32", cpu).packed_bytes() == 4 * elements
    assert (
        PlacedModel(replace(TINY, tied_embeddings=True), ParallelStrategy(), "bfloat16", cpu).packed_bytes()
        == 2 * 4 * layer
    )
    assert (
        PlacedModel(TINY, ParallelStrategy(), "float64", cpu).packed_bytes() == 0
    )  # the kernels have no order of their own for it
    inference = call("m", TINY, INFERENCE, "x")
    assert need(inference, ParallelStrategy(), 1, cpu) == need(inference, ParallelStrategy(), 1)


def test_each_model_has_the_features_of_its_setup() -> None:
    setups = {
        "actor": ModelSetup(compute=ComputeConfig(recomputation="full")),
        "critic": ModelSetup(compute=ComputeConfig(recomputation="selective", sequence_parallel=True)),
    }
    graph, strategy = ppo(mini_batches=1), ParallelStrategy(tp=2)
    costs = load_costs(
        graph.models,
        dtype="float32",
        hardware=load_hardware("h100"),
        of_models={name: of_setup(s) for name, s in setups.items()},
    )
    workload = Workload(prompt_tokens=8, new_tokens=8)
    option = Option(Layout(DeviceMesh(0, 2), strategy), 1)
    task = PlanningTask(
        graph=graph, batch_size=16, workload=workload, costs=costs, max_steps_in_flight=1, dtype="float32",
        cluster=with_memory(Cluster(devices_per_node=2, hardware=load_hardware("h100")), 2**34),
    )  # fmt: skip
    problem = build_problem(task, {name: [option] for name in graph.calls})
    rows = {table.name: table.options[0] for table in problem.calls}
    for name, setup in setups.items():
        features = of_setup(setup).on(load_hardware("h100"))
        train = work_of(graph.calls[f"{name}_train_step"], strategy, 1, workload, features=features)
        assert rows[f"{name}_train_step"].dynamic_bytes == train.dynamic_bytes()
        other = replace(features, recomputation="off", sequence_parallel=False)
        assert train.dynamic_bytes() != work_of(train.call, strategy, 1, workload, features=other).dynamic_bytes()
    plain_features = of_setup(ModelSetup()).on(load_hardware("h100"))
    inference = work_of(graph.calls["ref_inference"], strategy, 1, workload, features=plain_features)
    assert rows["ref_inference"].dynamic_bytes == inference.dynamic_bytes()
    # The backward pass has a third of an extra forward more, or only the cheap parts of one.
    plain = load_costs(graph.models, dtype="float32", hardware=load_hardware("h100"))
    seconds = {}
    for name, ways in (("own", costs), ("plain", plain)):
        for train in ("actor_train_step", "critic_train_step"):
            cost = call_model(
                call=graph.calls[train], batch_size=16, workload=workload,
                cluster=with_memory(Cluster(devices_per_node=2, hardware=load_hardware("h100")), 2**34),
                costs=ways, dtype="float32",
            )  # fmt: skip
            seconds[name, train] = cost.seconds(strategy, 1)
    timings = plain.timings[TINY]
    again = 4 * timings.layer(256, 16, TensorGroup(2), backward=False, trains=True)
    assert seconds["own", "actor_train_step"] - seconds["plain", "actor_train_step"] == pytest.approx(again)
    assert 0 < seconds["own", "critic_train_step"] - seconds["plain", "critic_train_step"] < again


def test_what_if_goes_before_the_setup() -> None:
    setup = ModelSetup(
        compute=ComputeConfig(recomputation="full", sequence_parallel=True),
        optimizer=OptimizerConfig(fp32_gradients=False),
    )
    own = EngineFeatures(recomputation="full", sequence_parallel=True, fp32_gradients=False)
    assert WhatIf().engine(setup) == own
    assert WhatIf().unlike([setup]) == []
    asked = WhatIf(features=("selective-recomputation", "no-sequence-parallel"))
    assert asked.engine(setup) == replace(own, recomputation="selective", sequence_parallel=False)
    assert asked.unlike([setup]) == ["selective-recomputation", "no-sequence-parallel"]
    assert asked.unlike([ModelSetup(), setup]) == ["selective-recomputation", "no-sequence-parallel"]
    assert asked.engine() == EngineFeatures(recomputation="selective")
    with pytest.raises(UserError, match="feature 'turbo' is not known"):
        WhatIf(features=("turbo",))


def test_the_cache_that_graphs_keep_is_there_in_training() -> None:
    """On GPUs; where the actor generates on a copy, on which it is freed, training has that memory."""
    graph = ppo(mini_batches=1)
    home, copy = (
        Option(Layout(DeviceMesh(0, 2), strategy), 1) for strategy in (ParallelStrategy(tp=2), ParallelStrategy(dp=2))
    )

    def most_bytes(name: str, generating: Option, graphs: GraphLife) -> float:
        hardware = load_hardware(name)
        options = {name: [generating if name == "actor_generate" else home] for name in graph.calls}
        task = PlanningTask(
            graph=graph, batch_size=16, workload=Workload(prompt_tokens=120, new_tokens=8, decode_graphs=graphs),
            cluster=with_memory(Cluster(devices_per_node=2, hardware=hardware), 2**34),
            costs=load_costs(graph.models, dtype="bfloat16", hardware=hardware), max_steps_in_flight=1,
            dtype="bfloat16",
        )  # fmt: skip
        problem = build_problem(task, options)
        needed = max(need.peak_bytes for need in device_needs(native_problem(problem), [0] * len(problem.calls)))
        assert native_problem(problem).evaluate([0] * len(problem.calls))["peak_bytes"] == pytest.approx(needed)
        return needed

    # 16 sequences in 8 pages of 16 tokens each, and the page of the padding: keys and values of bfloat16 in 4 layers,
    # over tp. It is training that needs the most.
    cache = (16 * 8 + 1) * 16 * 4 * 2 * (TINY.num_kv_heads * TINY.head_dim) * 2 / 2
    assert most_bytes("h100", home, "kept") == pytest.approx(most_bytes("h100", home, "call") + cache)
    assert most_bytes("h100", copy, "kept") == most_bytes("h100", copy, "call")
    assert most_bytes("cpu", home, "kept") == most_bytes("cpu", home, "off")


def test_a_call_takes_the_graphs_that_its_options_and_its_model_allow() -> None:
    def decoding_s(name: str, graphs: GraphLife, model: DecoderConfig = TINY, tp: int = 1) -> float:
        hardware = load_hardware(name)
        generate = call("m", model, GENERATE, "x")
        costs = load_costs({"m": model}, dtype="bfloat16", hardware=hardware)
        cost = call_model(
            call=generate, batch_size=16, workload=Workload(prompt_tokens=8, new_tokens=8, decode_graphs=graphs),
            cluster=with_memory(Cluster(devices_per_node=2, hardware=hardware), 2**34),
            costs=costs, dtype="bfloat16",
        )  # fmt: skip
        return cost.seconds(ParallelStrategy(tp=tp), 1)

    h100 = load_hardware("h100")
    saved = 7 * TINY.num_layers * (h100.decode_launch_s - h100.decode_graph_launch_s)  # by 7 decode steps
    for tp in (1, 2):
        assert decoding_s("h100", "off", tp=tp) - decoding_s("h100", "kept", tp=tp) == pytest.approx(saved)
        # Of one call: the first step is no graph, and the second is recorded.
        recorded = TINY.num_layers * (2 * h100.decode_launch_s - h100.decode_graph_launch_s)
        assert decoding_s("h100", "call", tp=tp) - decoding_s("h100", "kept", tp=tp) == pytest.approx(recorded)
    experts = replace(TINY, experts=Experts(count=4, per_token=2))
    assert decoding_s("h100", "off", experts) == decoding_s("h100", "kept", experts)
    assert decoding_s("cpu", "off") == decoding_s("cpu", "kept")
