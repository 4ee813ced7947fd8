"""Seconds of calls against numbers worked out by hand."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec import structs

from realhf.architecture.model import DecoderConfig, DType
from realhf.dataflow.graph import (
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    ModelFunctionCallDef,
    ModelInterfaceType,
)
from realhf.geometry.layout import ParallelStrategy
from realhf.geometry.parameters import parameter_count
from realhf.geometry.pipeline_schedule import BACKWARD_TIME, FORWARD_TIME, simulate, training_order
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.profile import CallOverheads, CollectiveKind
from realhf.planning.model.seconds import RankSeconds, crossings
from realhf.planning.model.timings import Costs, TensorGroup, load_costs
from realhf.planning.model.workload import Workload
from tests.unit.planning.graphs import TINY, Stub, call, call_model, cpu_cluster, with_memory, work_of

CPU = load_hardware("cpu")
ROUND = structs.replace(CPU, call_overhead_s=7.0, sampling_s=0.25)
FREE = structs.replace(CPU, call_overhead_s=0.0)
NO_OVERHEADS = CallOverheads()


@dataclass(frozen=True)
class RoundTimings:
    """Constants that can be told apart in a sum."""

    hardware: Hardware = ROUND
    overheads: CallOverheads = NO_OVERHEADS
    links: Hardware = CPU
    features: EngineFeatures = ENGINE

    def under(self, features: EngineFeatures) -> "RoundTimings":
        return replace(self, features=features)

    def layer(self, tokens: float, sequence_length: float, tp: int, *, backward: bool, **_: bool) -> float:
        return 2.0 if backward else 1.0

    def embedding(self, tokens: float, group: TensorGroup, *, backward: bool) -> float:
        return 20.0 if backward else 10.0

    def head(self, tokens: float, group: TensorGroup, *, backward: bool) -> float:
        return 200.0 if backward else 100.0

    def decode_layer(self, sequences: float, context: float, group: TensorGroup) -> float:
        return 3.0

    def optimizer(self, parameters: float) -> float:
        return parameters / 1000

    def collective(
        self, kind: CollectiveKind, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1
    ) -> float:
        return (1.0 if kind == "all_reduce" else 0.5) * size_bytes * (group_size - 1) / 1e6

    def send(self, size_bytes: float, *, crosses_nodes: bool, senders: int | None = None) -> float:
        return 0.5


def seconds(
    definition: ModelFunctionCallDef,
    dp: int,
    tp: int,
    pp: int,
    micro_batches: int,
    features: EngineFeatures = ENGINE,
    dtype: DType = "float32",
    overheads: CallOverheads = NO_OVERHEADS,
    chunks: int = 1,
) -> float:
    cost = call_model(
        call=definition,
        batch_size=16,
        workload=Workload(prompt_tokens=8, new_tokens=5),
        cluster=cpu_cluster(4),
        costs=Costs(CPU, {TINY: RoundTimings(overheads=overheads)}, features),
        dtype=dtype,
    )
    return cost.seconds(ParallelStrategy(dp, tp, pp, chunks), micro_batches)


def test_seconds_of_inference() -> None:
    definition = call("m", TINY, INFERENCE, "x")
    # One stage: 4 layers, embedding and head, for each of 2 micro-batches.
    assert seconds(definition, 1, 1, 1, 2) == 7 + 2 * (4 + 10 + 100)
    # Two stages: 2 + 10 and 2 + 100 + a message; the slower once more.
    assert seconds(definition, 1, 1, 2, 2) == 7 + 12 + 102.5 + 102.5


def test_seconds_of_equal_stages_are_slots() -> None:
    """(micro-batches + stages - 1) slots."""

    @dataclass(frozen=True)
    class LayersOnly(RoundTimings):
        def embedding(self, *args: object, **kwargs: object) -> float:  # type: ignore[override]
            return 0.5  # a message's time: the first stage receives none

        def head(self, *args: object, **kwargs: object) -> float:  # type: ignore[override]
            return 0.0

    cost = call_model(
        call=call("m", TINY, INFERENCE, "x"),
        batch_size=16,
        workload=Workload(prompt_tokens=8),
        cluster=cpu_cluster(4),
        costs=Costs(CPU, {TINY: LayersOnly()}),
        dtype="float32",
    )
    assert cost.seconds(ParallelStrategy(1, 1, 4), 8) == 7 + (8 + 4 - 1) * 1.5


@pytest.mark.parametrize(
    ("zero1", "fully_sharded", "share"), [(True, False, 4), (False, True, 4), (True, True, 4), (False, False, 1)]
)
def test_a_device_updates_what_is_divided(zero1: bool, fully_sharded: bool, share: int) -> None:
    definition = call("m", TINY, TRAIN_STEP, "x")
    work = work_of(
        definition, ParallelStrategy(dp=4), 1, features=replace(ENGINE, zero1=zero1, fully_sharded=fully_sharded)
    )
    found = RankSeconds(work, RoundTimings(), crossings(ParallelStrategy(dp=4), cpu_cluster(4)))._updated()
    assert found == pytest.approx(parameter_count(TINY) / share, rel=0.01)


def test_states_in_host_memory_come_and_go_for_every_optimizer_step() -> None:
    """Two of four bytes of the half of the parameters that a data-parallel rank updates, for two mini-batches."""

    def taken(features: EngineFeatures) -> float:
        cost = call_model(
            call=call("m", TINY, TRAIN_STEP, "x", mini_batches=2),
            batch_size=16,
            workload=Workload(prompt_tokens=8),
            cluster=with_memory(Cluster(devices_per_node=2, hardware=load_hardware("h100")), 2**36),
            costs=load_costs({"m": TINY}, dtype="float32", hardware=load_hardware("h100"), features=features),
            dtype="float32",
        )
        return cost.seconds(ParallelStrategy(dp=2), 1)

    moved = 2 * 2 * (2 * 4) * parameter_count(TINY) / 2
    host_bandwidth = load_hardware("h100").host_bandwidth
    added = taken(EngineFeatures(offloads_states=True)) - taken(EngineFeatures())
    assert added == pytest.approx(moved / host_bandwidth)


def test_chunks_divide_the_bubble_and_multiply_the_messages() -> None:
    inference, train = call("m", TINY, INFERENCE, "x"), call("m", TINY, TRAIN_STEP, "x")
    # Stage 0: 2 layers, the embedding, a message for its second chunk; stage 1: 2 layers, the head, two messages.
    first, last = 2 + 10 + 0.5, 2 + 100 + 2 * 0.5
    assert seconds(inference, 1, 1, 2, 4, chunks=2) == pytest.approx(7 + 4 * last + first / 2)
    # Of three micro-batches, one lacks: all of its time but one chunk's is waited for.
    assert seconds(inference, 1, 1, 2, 3, chunks=2) == pytest.approx(7 + 3.5 * last + first / 2)
    assert seconds(inference, 1, 1, 2, 3) == pytest.approx(7 + 3 * (2 + 100.5) + 2 + 10)
    # Training: a message more in each direction for each of the two stages, the slower one in all four micro-batches.
    elements = 2 * 41088 + 2048 + 64
    update = elements / 1000
    plain = 4 * (102.5 + 204) + (12 + 24.5)
    assert seconds(train, 1, 1, 2, 4) == pytest.approx(7 + plain + update)
    assert seconds(train, 1, 1, 2, 4, chunks=2) == pytest.approx(7 + 4 * (306.5 + 1) + (36.5 + 1) / 2 + update)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 13))
@hypothesis_settings(deadline=None)
def test_the_time_of_equal_stages_is_that_of_the_simulated_schedule(pp: int, chunks: int, micro_batches: int) -> None:
    @dataclass(frozen=True)
    class LayersOnly(RoundTimings):
        hardware: Hardware = FREE

        def embedding(self, *args: object, **kwargs: object) -> float:  # type: ignore[override]
            return 0.0

        head = optimizer = send = embedding  # type: ignore[assignment]

    model = replace(TINY, num_layers=pp * chunks)
    cost = call_model(
        call=call("m", model, TRAIN_STEP, "x"),
        batch_size=16 * micro_batches,
        workload=Workload(prompt_tokens=8),
        cluster=cpu_cluster(5),
        costs=Costs(CPU, {model: LayersOnly()}),
        dtype="float32",
    )
    orders = [training_order(pp, stage, chunks, micro_batches) for stage in range(pp)]
    # A layer of RoundTimings takes as long as a chunk in the simulation.
    assert (FORWARD_TIME, BACKWARD_TIME) == (1, 2)
    expected = max(simulate(orders, chunks).values())
    assert cost.seconds(ParallelStrategy(1, 1, pp, chunks), micro_batches) == pytest.approx(expected)


def test_stages_of_unequal_length() -> None:
    model = replace(TINY, num_layers=6)
    cost = call_model(
        call=call("m", model, INFERENCE, "x"),
        batch_size=16,
        workload=Workload(prompt_tokens=8),
        cluster=cpu_cluster(4),
        costs=Costs(CPU, {model: RoundTimings()}),
        dtype="float32",
    )
    # 2, 2, 1 and 1 layers: the two stages within the pipeline differ.
    assert cost.seconds(ParallelStrategy(1, 1, 4), 1) == 7 + 12 + 2.5 + 1.5 + 101.5


def test_seconds_of_training() -> None:
    definition = call("m", TINY, TRAIN_STEP, "x", mini_batches=2)
    # Stage 0: forward 2 + 10, backward 4 + 20, a gradient received; stage 1: 2 + 100 + 0.5, 4 + 200.
    pipeline = 36.5 + 306.5 + 306.5
    # TINY: a layer has 4 x 64 x 64 + 3 x 64 x 128 + 2 x 64 = 41088 elements; embedding and head 32 x 64, norm 64.
    elements = 2 * 41088 + 2048 + 64  # the last stage has the most
    # Each of the two data-parallel ranks updates half of them.
    expected = 7 + 2 * (pipeline + elements * 4 / 1e6 + elements / 2 / 1000)
    assert seconds(definition, 2, 1, 2, 2) == pytest.approx(expected)


def test_epochs_are_further_optimizer_steps() -> None:
    class Twice(Stub):
        epochs = 2

    once = call("m", TINY, TRAIN_STEP, "x", mini_batches=2)
    twice = replace(once, interface_impl=Twice())
    assert seconds(twice, 2, 1, 2, 2) - 7 == pytest.approx(2 * (seconds(once, 2, 1, 2, 2) - 7))


def test_logits_of_responses_only() -> None:
    """Of 16 samples with 8 + 5 tokens; a scalar head gives a value for every token either way."""

    @dataclass(frozen=True)
    class HeadByTokens(RoundTimings):
        def head(self, tokens: float, group: TensorGroup, *, backward: bool) -> float:
            return tokens

    def head_s(model: DecoderConfig, response_logits: bool) -> float:
        timings = {model: HeadByTokens()}
        cost = call_model(
            call=call("m", model, INFERENCE, "x"),
            batch_size=16,
            workload=Workload(prompt_tokens=8, new_tokens=5),
            cluster=cpu_cluster(4),
            costs=Costs(CPU, timings, EngineFeatures(response_logits=response_logits)),
            dtype="float32",
        )
        return cost.seconds(ParallelStrategy(1, 1, 1), 1) - 7 - 4 - 10

    assert [head_s(TINY, only) for only in (True, False)] == [16 * 5, 16 * 13]
    assert [head_s(TINY.with_head("scalar"), only) for only in (True, False)] == [16 * 13, 16 * 13]


def test_overheads_of_whole_calls() -> None:
    """A call's or mini-batch's once, a micro-batch's in every slot of the pipeline, a message's with every message."""
    overheads = CallOverheads(
        forward_s=1e3, forward_micro_batch_s=1e4, train_s=1e5, train_micro_batch_s=1e6,
        generate_s=1e9, generate_s_per_parameter=1e5, decode_step_s=1e4, message_s=1e7,
    )  # fmt: skip

    def beyond(definition: ModelFunctionCallDef) -> float:
        parts = (definition, 1, 1, 2, 4)
        return seconds(*parts, overheads=overheads) - seconds(*parts)

    # 4 micro-batches on 2 stages: 5 slots, each with a message forward but the first stage's own.
    assert beyond(call("m", TINY, INFERENCE, "x")) == pytest.approx(1e3 + 5 * 1e4 + 4 * 1e7)
    # Backward the first stage receives one too: 5 slots with a message each, for both mini-batches.
    definition = call("m", TINY, TRAIN_STEP, "x", mini_batches=2)
    assert beyond(definition) == pytest.approx(2 * (1e5 + 5 * 1e6 + 5 * 1e7))
    # The prefill is 5 slots with 4 messages; then 4 decode steps of 4 micro-batches, each with a message.
    elements = 2 * 41088 + 2048 + 64  # of the larger stage
    expected = 1e9 + elements * 1e5 + 5 * 1e4 + 4 * 1e7 + 4 * 4 * (1e4 + 1e7)
    assert beyond(call("m", TINY, GENERATE, "x")) == pytest.approx(expected)


def test_recomputation_runs_the_layers_forward_again() -> None:
    definition = call("m", TINY, TRAIN_STEP, "x", mini_batches=2)
    without, recomputed = (
        seconds(definition, 1, 1, 2, 2, EngineFeatures(recomputation=again)) for again in ("off", "full")
    )
    # Two layers of 1 s a stage, in 3 slots of each of the two mini-batches; neither embedding nor head.
    assert recomputed - without == pytest.approx(2 * 3 * 2)


def test_zero1_updates_a_part_of_the_parameters() -> None:
    definition = call("m", TINY, TRAIN_STEP, "x", mini_batches=2)
    without, zero1 = (seconds(definition, 4, 1, 1, 1, EngineFeatures(zero1=zero1)) for zero1 in (False, True))
    assert without - zero1 == pytest.approx(2 * parameter_count(TINY) / 1000 * 3 / 4)


def test_fp32_gradients_of_bf16_parameters_make_the_first_half_of_the_ring_twice_as_long() -> None:
    definition = call("m", TINY, TRAIN_STEP, "x", mini_batches=2)
    narrow, wide = (
        seconds(definition, 4, 1, 1, 1, EngineFeatures(fp32_gradients=wide), "bfloat16") for wide in (False, True)
    )
    # 2 + 4 bytes an element in place of 2 + 2, of which each half of the ring has half.
    assert wide - narrow == pytest.approx(2 * 3 * parameter_count(TINY) * (3 - 2) / 1e6)


def test_blocking_sends_hold_up_the_stage_that_sends() -> None:
    blocking = EngineFeatures(blocking_sends=True)
    inference, train = call("m", TINY, INFERENCE, "x"), call("m", TINY, TRAIN_STEP, "x")
    # Stages of 1 layer; 0: 11 s and a send of 0.5, 1 and 2: 1 s, two messages, 3: 101 s and the receipt.
    assert seconds(inference, 1, 1, 4, 1, blocking) == pytest.approx(7 + 11.5 + 2 * 2 + 101.5)
    assert seconds(inference, 1, 1, 4, 1) == pytest.approx(7 + 11 + 2 * 1.5 + 101.5)
    # Forward and backward: one message more for stages 0 and 3, two for 1 and 2.
    assert seconds(train, 1, 1, 4, 1, blocking) - seconds(train, 1, 1, 4, 1) == pytest.approx(0.5 * (1 + 2 + 2 + 1))
    generate = call("m", TINY, GENERATE, "x")
    more = seconds(generate, 1, 1, 2, 2, blocking) - seconds(generate, 1, 1, 2, 2)
    # Prefill: one for stage 0, whose slot is not the longest; 4 decode steps of two micro-batches: one each.
    assert more == pytest.approx(0.5 + 4 * 2 * 0.5)


def test_ranks_of_a_sequence_parallel_group_send_their_tokens_only() -> None:
    @dataclass(frozen=True)
    class SizedSends(RoundTimings):
        def send(self, size_bytes: float, *, crosses_nodes: bool, senders: int | None = None) -> float:
            return size_bytes

    def cost(definition: ModelFunctionCallDef, sequence_parallel: bool) -> float:
        return call_model(
            call=definition,
            batch_size=16,
            workload=Workload(prompt_tokens=8, new_tokens=5),
            cluster=cpu_cluster(4),
            costs=Costs(CPU, {TINY: SizedSends()}, EngineFeatures(sequence_parallel=sequence_parallel)),
            dtype="float32",
        ).seconds(ParallelStrategy(1, 2, 2), 1)

    train, inference = call("m", TINY, TRAIN_STEP, "x"), call("m", TINY, INFERENCE, "x")
    hidden_bytes = 16 * 13 * 64 * 4
    assert cost(train, False) - cost(train, True) == pytest.approx(2 * hidden_bytes / 2)  # forward and backward
    assert cost(inference, False) == cost(inference, True)  # training only


def test_seconds_of_generation() -> None:
    definition = call("m", TINY, GENERATE, "x")
    prefill = 12 + 102.5 + 102.5 + 0.25
    decode_stage = 2 * 3 + 100 + 0.25 + 0.5  # the last one is the slowest
    assert seconds(definition, 1, 1, 2, 2) == 7 + prefill + 4 * 2 * decode_stage
    assert seconds(definition, 1, 1, 2, 1) == seconds(definition, 1, 1, 2, 2)  # a part for each stage at least
    one_stage = 4 * 3 + 10 + 100 + 0.25
    assert seconds(definition, 1, 1, 1, 1) == 7 + 114 + 0.25 + 4 * one_stage


def test_sequences_without_room_for_their_keys_take_turns() -> None:
    """With room for a quarter of the sequences, four times as many decode steps of a quarter."""

    @dataclass(frozen=True)
    class PerSequence(RoundTimings):
        def decode_layer(self, sequences: float, context: float, group: TensorGroup) -> float:
            return 1 + sequences / 16

    def generation(kv_cache_tokens: int | None) -> float:
        cost = call_model(
            call=call("m", TINY, GENERATE, "x"),
            batch_size=16,
            workload=Workload(prompt_tokens=8, new_tokens=5, kv_cache_tokens=kv_cache_tokens),
            cluster=cpu_cluster(1),
            costs=Costs(CPU, {TINY: PerSequence()}, ENGINE),
            dtype="float32",
        )
        return cost.seconds(ParallelStrategy(), 1)

    prefill = 7 + 114 + 0.25
    assert generation(None) == generation(16 * 16) == prefill + 4 * (4 * 2 + 110.25)  # a page of 16 tokens each
    assert generation(4 * 16) == prefill + 16 * (4 * 1.25 + 110.25)


def test_samples_of_a_prompt_compute_it_once() -> None:
    @dataclass(frozen=True)
    class PerToken(RoundTimings):
        def layer(self, tokens: float, sequence_length: float, tp: int, **_: bool) -> float:
            assert sequence_length == 8
            return tokens

        def head(self, tokens: float, tp: int, **_: bool) -> float:
            assert tokens == 16 // dp, "every sample draws its own first token"
            return 100.0

    def generation(samples_per_prompt: int) -> float:
        cost = call_model(
            call=call("m", TINY, GENERATE, "x"),
            batch_size=16,
            workload=Workload(prompt_tokens=8, new_tokens=5, samples_per_prompt=samples_per_prompt),
            cluster=cpu_cluster(4),
            costs=Costs(CPU, {TINY: PerToken()}, ENGINE),
            dtype="float32",
        )
        return cost.seconds(ParallelStrategy(dp=dp), 1)

    dp = 1
    assert generation(1) - generation(4) == 4 * (16 - 4) * 8
    dp = 4
    assert generation(1) - generation(4) == 4 * (4 - 1) * 8
    assert generation(16) == generation(4), "no rank has more of a group"


@pytest.mark.parametrize("kind", [INFERENCE, TRAIN_STEP])
def test_an_inference_and_a_training_compute_a_prompt_once_on_a_cpu(kind: ModelInterfaceType) -> None:
    @dataclass(frozen=True)
    class PerToken(RoundTimings):
        def layer(self, tokens: float, sequence_length: float, tp: int, **_: bool) -> float:
            assert sequence_length == prompt + 5
            return tokens

    on_cpu = replace(ENGINE, in_host_memory=True)

    def rows(samples_per_prompt: int, features: EngineFeatures = on_cpu) -> float:
        cost = call_model(
            call=call("m", TINY, kind, "x"),
            batch_size=16,
            workload=Workload(prompt_tokens=prompt, new_tokens=5, samples_per_prompt=samples_per_prompt),
            cluster=cpu_cluster(4),
            costs=Costs(CPU, {TINY: PerToken()}, features),
            dtype="float32",
        )
        return cost.seconds(ParallelStrategy(dp=2), 2)

    prompt = 8
    passes = 4 * (2 if kind is TRAIN_STEP else 1)  # layers, forward and backward
    # Two ranks, two micro-batches of four samples each: a group, or a part of one.
    assert rows(1) - rows(4) == rows(1) - rows(16) == 2 * passes * (4 - 1) * prompt
    assert rows(1) - rows(2) == 2 * passes * (4 - 2) * prompt
    assert rows(4, ENGINE) == rows(1, ENGINE) == rows(1), "on a GPU each sample has its own"
    prompt = 7
    assert rows(4) == rows(1), "too short to be shared"
