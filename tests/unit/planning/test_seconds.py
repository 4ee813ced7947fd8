"""What a rank's work asks its timings for: every part of a call once, with its own sizes, group and place."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec import structs

from realhf.architecture.chunks import OPTIMIZER_ELEMENTS
from realhf.architecture.compute import ModeRules
from realhf.architecture.model import DecoderConfig
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, ModelInterfaceType
from realhf.geometry.layout import ParallelStrategy
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.lengths import DecodePhase, LengthDistribution
from realhf.planning.model.profile import CallOverheads, CollectiveKind
from realhf.planning.model.seconds import Crossings, RankSeconds, _examples_of_stages, crossings
from realhf.planning.model.timings import ProfiledTimings, TensorGroup
from realhf.planning.model.turns import Turns
from realhf.planning.model.workload import Workload
from tests.unit.planning.graphs import TINY, call, cpu_cluster, work_of
from tests.unit.planning.test_profile import profile

CPU = load_hardware("cpu")
HARDWARE = structs.replace(
    CPU, call_overhead_s=1000.0, sampling_s=0.375, mini_batch_s=0.75, decode_launch_s=0.0625, host_bandwidth=1000.0
)
OVERHEADS = CallOverheads(
    forward_s=3.0, forward_micro_batch_s=5.0, train_s=7.0, train_micro_batch_s=11.0, generate_s=13.0,
    generate_s_per_parameter=0.5, decode_step_s=17.0, message_s=19.0,
)  # fmt: skip


def price(name: str, *arguments: float) -> float:
    """A number that belongs to this question alone."""
    return random.Random(f"{name} {[float(each) for each in arguments]}").uniform(1, 2)


@dataclass(frozen=True)
class Priced:
    """Timings whose answers tell apart all that they are asked."""

    hardware: Hardware = HARDWARE
    overheads: CallOverheads = OVERHEADS
    links: Hardware = HARDWARE

    def layer(self, tokens: float, length: float, group: TensorGroup, *, backward: bool, trains: bool = False) -> float:
        return price("layer", tokens, length, group.tp, backward, group.crosses_nodes, trains)

    def recomputed(self, tokens: float, group: TensorGroup) -> float:
        return price("recomputed", tokens, group.tp, group.crosses_nodes)

    def embedding(self, tokens: float, group: TensorGroup, *, backward: bool) -> float:
        return price("embedding", tokens, group.tp, backward, group.crosses_nodes)

    def head(self, tokens: float, group: TensorGroup, *, backward: bool) -> float:
        return price("head", tokens, group.tp, backward, group.crosses_nodes)

    def decode_layer(self, sequences: float, context: float, group: TensorGroup) -> float:
        return price("decode", sequences, context, group.tp, group.crosses_nodes)

    def optimizer(self, parameters: float) -> float:
        return price("optimizer", parameters)

    def collective(
        self, kind: CollectiveKind, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1
    ) -> float:
        return price(kind, size_bytes, group_size, crosses_nodes, per_node)

    def send(self, size_bytes: float, *, crosses_nodes: bool, senders: int | None = None) -> float:
        return price("send", size_bytes, crosses_nodes)


FIVE = replace(TINY, num_layers=5)  # on two stages 3 and 2
STRATEGY = ParallelStrategy(dp=2, tp=2, pp=2)
# 13 tokens of a sequence, attended 13 + 26 / 13 = 15; a prompt of 8, attended 8 + 26 / 8.
LENGTHS = Workload(prompt_tokens=8, new_tokens=5, prompt_variance=26.0)
# 16 samples on two ranks in two micro-batches: 4 sequences of 13 tokens, 5 of them a response's.
ROWS, ATTENDED, WANTED = 4 * 13, 15, 4 * 5
CROSSES = [Crossings(True, False, False), Crossings(False, True, False, 3), Crossings(False, False, True)]


def rank(
    kind: ModelInterfaceType,
    crosses: Crossings,
    strategy: ParallelStrategy = STRATEGY,
    micro_batches: int = 2,
    *,
    model: DecoderConfig = FIVE,
    lengths: Workload = LENGTHS,
    timings: Any = None,
    **features: Any,
) -> RankSeconds:
    definition = call("m", model, kind, "x")
    work = work_of(definition, strategy, micro_batches, lengths, features=replace(ENGINE, **features))
    return RankSeconds(work, timings or Priced(), crosses)


def pipeline(micro_batches: int, *stages: float) -> float:
    return (micro_batches - 1) * max(stages) + sum(stages)


def message(tokens: float, crosses: Crossings, parts: int = 1) -> float:
    return 19 + price("send", tokens * 64 * 4 / parts, crosses.pipeline)


def zero1(elements: float, *place: float) -> float:
    """Gradients of 4 bytes are reduce-scattered, parameters of 4 bytes gathered."""
    return price("reduce_scatter", elements * 4, *place) + price("all_gather", elements * 4, *place)


@pytest.mark.parametrize("crosses", CROSSES)
def test_an_inference(crosses: Crossings) -> None:
    layer = price("layer", ROWS, ATTENDED, 2, False, crosses.tensor, False)
    first = 5 + 3 * layer + price("embedding", ROWS, 2, False, crosses.tensor)
    last = 5 + 2 * layer + price("head", WANTED, 2, False, crosses.tensor) + message(ROWS, crosses)
    expected = pipeline(2, first, last) + 3
    assert rank(INFERENCE, crosses).total_s() == pytest.approx(expected)
    for again in ("selective", "full"):
        assert rank(INFERENCE, crosses, recomputation=again).total_s() == pytest.approx(expected)
    blocking = pipeline(2, first + message(ROWS, crosses), last) + 3
    assert rank(INFERENCE, crosses, blocking_sends=True).total_s() == pytest.approx(blocking)


@pytest.mark.parametrize("crosses", CROSSES)
@pytest.mark.parametrize("recomputation", ["off", "selective", "full"])
@pytest.mark.parametrize("layers", [None, 1])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_training(crosses: Crossings, recomputation: str, layers: int | None, sequence_parallel: bool) -> None:
    """Forward and backward of each layer, the recomputed ones once more in part or whole; what is exchanged; AdamW."""
    tensor = crosses.tensor
    layer = sum(price("layer", ROWS, ATTENDED, 2, backward, tensor, True) for backward in (False, True))
    again = {
        "off": 0.0,
        "selective": price("recomputed", ROWS, 2, tensor),
        "full": price("layer", ROWS, ATTENDED, 2, False, tensor, True),
    }[recomputation]
    [first_again, last_again] = [1, 1] if layers else [3, 2]
    received = message(ROWS, crosses, 2 if sequence_parallel else 1)
    ends = [
        sum(price(name, tokens, 2, backward, tensor) for backward in (False, True))
        for name, tokens in (("embedding", ROWS), ("head", WANTED))
    ]
    first = 11 + 3 * layer + first_again * again + ends[0] + received  # a gradient
    last = 11 + 2 * layer + last_again * again + ends[1] + received
    # 41088 elements a layer, of which the norms' 128 are whole on both ranks, and 32 x 64 of the embedding.
    elements = 3 * (128 + 40960 // 2) + 32 * 64 // 2
    exchanged = zero1(elements, 2, crosses.data, crosses.data_per_node)
    expected = pipeline(2, first, last) + exchanged + price("optimizer", elements / 2) + 7 + 0.75
    found = rank(
        TRAIN_STEP,
        crosses,
        recomputation=recomputation,
        recomputed_layers=layers if recomputation != "off" else None,
        sequence_parallel=sequence_parallel,
    )
    assert found.total_s() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("features", "bytes_by_kind"),
    [
        # Gradients in fp32 and parameters in bf16.
        ({"zero1": True}, {"reduce_scatter": 4, "all_gather": 2}),
        ({"zero1": False}, {"all_reduce": 4}),
        # For two micro-batches two gathers of parameters and a reduction of gradients, each half of a ring.
        ({"fully_sharded": True}, {"all_reduce": 2 * (2 * 2 + 4) / 2}),
    ],
)
def test_what_a_training_exchanges_of_a_bf16_model(features: dict[str, bool], bytes_by_kind: dict[str, float]) -> None:
    crosses = Crossings(False, True, False, 3)
    work = work_of(
        call("m", TINY, TRAIN_STEP, "x"),
        ParallelStrategy(dp=2),
        2,
        dtype="bfloat16",
        features=replace(ENGINE, **features),
    )
    elements = 4 * 41088 + 2 * 32 * 64 + 64
    expected = sum(price(kind, elements * size, 2, True, 3) for kind, size in bytes_by_kind.items())
    assert RankSeconds(work, Priced(), crosses)._exchange_s() == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(("pp", "tied"), [(1, True), (2, True), (2, False)])
def test_gradients_of_a_tied_embedding_are_summed_over_its_two_copies(pp: int, tied: bool) -> None:
    model = replace(FIVE, tied_embeddings=tied)
    strategy, crosses = ParallelStrategy(dp=2, tp=2, pp=pp), Crossings(False, False, True)
    seconds = rank(TRAIN_STEP, crosses, strategy, model=model)
    elements = seconds.placed.elements()
    expected = zero1(elements, 2, False, 1)
    if tied and pp > 1:
        expected += price("all_reduce", 32 * 64 // 2 * 4, 2, True, 1)
    assert seconds._exchange_s() == pytest.approx(expected)


def test_states_in_host_memory_come_and_go() -> None:
    """Two states of 4 bytes, there and back at 500 bytes a second: a chunk's one after the other, and of more chunks
    half of each is hidden, except for the coming of the first and the going of the last."""
    links = structs.replace(HARDWARE, host_bandwidth=500.0)
    timings = Priced(links=links)
    stay, come = (rank(TRAIN_STEP, CROSSES[0], timings=timings, offloads_states=away) for away in (False, True))
    assert stay._optimizer_s(100) == price("optimizer", 100)
    assert come._optimizer_s(100) == pytest.approx(price("optimizer", 100) + 2 * 100 * 8 / 500)
    for chunks, share in ((1, 1.0), (2, 3 / 4), (9, 5 / 9)):
        updated = chunks * OPTIMIZER_ELEMENTS
        alone = price("optimizer", updated) + 2 * updated * 8 / 500
        assert come._optimizer_s(updated) == pytest.approx(share * alone)


@pytest.mark.parametrize("crosses", CROSSES)
def test_a_generation(crosses: Crossings) -> None:
    """Prefill of 4 prompts, logits of their last tokens alone, and 4 further tokens in steps of both micro-batches."""
    tensor, tokens = crosses.tensor, 4 * 8
    layer = price("layer", tokens, 8 + 26 / 8, 2, False, tensor, False)
    first = 5 + 3 * layer + price("embedding", tokens, 2, False, tensor)
    last = 5 + 2 * layer + price("head", 4, 2, False, tensor) + message(tokens, crosses)
    elements = 3 * (128 + 40960 // 2) + 32 * 64 // 2
    prefill = pipeline(2, first, last) + 13 + 0.5 * elements
    step = price("decode", 4, 8 + 5 / 2, 2, tensor)
    steps = (
        17 + 3 * step + price("embedding", 4, 2, False, tensor) + message(4, crosses),
        17 + 2 * step + price("head", 4, 2, False, tensor) + 0.375 + message(4, crosses),
    )
    # Two micro-batches, or with one, one for each stage.
    for micro_batches in (1, 2):
        found = rank(GENERATE, crosses, micro_batches=micro_batches).total_s()
        assert found == pytest.approx(prefill + 0.375 + 4 * 2 * max(steps))


def test_steps_of_more_micro_batches_than_stages() -> None:
    """Of four with two sequences each, two of them in flight, each step takes four times the slowest stage."""
    seconds = rank(GENERATE, CROSSES[2], micro_batches=4)
    steps = (
        17 + 3 * price("decode", 2, 10.5, 2, False) + price("embedding", 2, 2, False, False),
        17 + 2 * price("decode", 2, 10.5, 2, False) + price("head", 2, 2, False, False) + 0.375,
    )
    slowest = max(steps) + message(2, CROSSES[2])
    short = rank(GENERATE, CROSSES[2], micro_batches=4, lengths=replace(LENGTHS, new_tokens=1, max_new_tokens=1))
    assert seconds.generate_s() - short.generate_s() == pytest.approx(4 * 4 * slowest)


def test_fewer_samples_than_stages_leave_stages_idle() -> None:
    """Two samples of a rank on four stages: a step takes as long as for four of one sample."""
    strategy = ParallelStrategy(dp=8, pp=4)
    seconds, short = (
        rank(GENERATE, CROSSES[2], strategy, 1, model=TINY, lengths=replace(LENGTHS, new_tokens=n, max_new_tokens=n))
        for n in (5, 1)
    )
    last = 17 + price("decode", 1, 10.5, 1, False) + price("head", 1, 1, False, False) + 0.375
    first = 17 + price("decode", 1, 10.5, 1, False) + price("embedding", 1, 1, False, False)
    slowest = max(first, last) + message(1, CROSSES[2])
    assert seconds.generate_s() - short.generate_s() == pytest.approx(4 * 4 * slowest)


def test_a_generation_on_one_stage_sends_nothing() -> None:
    seconds = rank(GENERATE, CROSSES[2], ParallelStrategy(dp=2))
    step = 17 + 5 * price("decode", 4, 8 + 2, 1, False) + 0.375
    step += price("embedding", 4, 1, False, False) + price("head", 4, 1, False, False)
    phase = DecodePhase(1.0, 1.0, 2.0)
    assert seconds._decode_stage_s(phase, 0) == pytest.approx(step)
    # A share of 1 / 4 of the sequences that run, with so many tokens more in their caches.
    quarter = 17 + 5 * price("decode", 1, 8 + 3, 1, False) + 0.375
    quarter += price("embedding", 1, 1, False, False) + price("head", 1, 1, False, False)
    assert seconds._decode_stage_s(DecodePhase(9.0, 0.25, 3.0), 0) == pytest.approx(quarter)


def test_preempted_sequences_are_computed_again_in_each_part() -> None:
    """Two parts in flight, on stages of which the slowest counts."""
    seconds = rank(GENERATE, CROSSES[0], lengths=replace(LENGTHS, kv_cache_tokens=2 * 2 * 16))
    assert seconds.work.turns is not None
    assert seconds._again_s() == 0.0, "those that wait have not begun, and nobody is preempted"
    seconds.work.__dict__["turns"] = Turns(phases=(), preemptions=3.0, again_tokens=50.0, again_length=25.0)
    stages = [seconds._stage_s(stage, 50.0, 25.0, train=False, head_tokens=3.0) for stage in (0, 1)]
    assert seconds._again_s() == 2 * max(stages)
    assert seconds._again_s() > 0.0
    whole = rank(GENERATE, CROSSES[0])
    seconds.work.__dict__["decode_phases"] = whole.work.decode_phases
    assert seconds.generate_s() == pytest.approx(whole.generate_s() + seconds._again_s())
    assert rank(GENERATE, CROSSES[0])._again_s() == 0.0


@pytest.mark.parametrize(("blocking", "messages"), [(False, 1), (True, 2)])
def test_a_stage_of_a_decode_step_receives_and_perhaps_sends(blocking: bool, messages: int) -> None:
    plain = rank(GENERATE, CROSSES[2], blocking_sends=blocking)._decode_stage_s(DecodePhase(1.0, 1.0, 2.0), 0)
    computed = 17 + 3 * price("decode", 4, 10, 2, False) + price("embedding", 4, 2, False, False)
    assert plain == pytest.approx(computed + messages * message(4, CROSSES[2]))


@pytest.mark.parametrize(
    ("features", "graphs", "responses", "recorded"),
    [
        ({"cuda_graphs": True}, "call", False, 2 * 1),  # two parts in flight, a graph of 4 rows each
        ({"cuda_graphs": True}, "call", True, 2 * 3),  # of 4, 2 and 1 rows
        ({"cuda_graphs": True}, "kept", False, 0),
        ({"cuda_graphs": True, "fully_sharded": True}, "kept", False, 2 * 1),  # they go with the gathered parameters
        ({"cuda_graphs": True}, "off", False, 0),
        ({"cuda_graphs": False}, "call", False, 0),
    ],
)
def test_graphs_of_one_call_are_recorded(
    features: dict[str, bool], graphs: Any, responses: bool, recorded: int
) -> None:
    """The first step of each is no graph, and the second is recorded: 3 layers, those of the first stage."""
    lengths = replace(LENGTHS, decode_graphs=graphs, responses=LengthDistribution.of([5]) if responses else None)
    work = work_of(call("m", FIVE, GENERATE, "x"), STRATEGY, 3, lengths, features=ENGINE)
    seconds = RankSeconds(work, Priced(), CROSSES[0])  # type: ignore[arg-type]
    seconds.features = replace(ENGINE, **features)
    even = RankSeconds(work_of(call("m", TINY, GENERATE, "x"), STRATEGY, 3, lengths), Priced(), CROSSES[0])  # type: ignore[arg-type]
    even.features = seconds.features
    # Of 4 steps with 3 numbers of rows, one can come up for the second time in each part.
    again = min(recorded, 2 * 1)
    launch_s, replayed_s = HARDWARE.decode_launch_s, HARDWARE.decode_graph_launch_s
    assert even._recording_s == pytest.approx(2 * (recorded * (launch_s - replayed_s) + again * launch_s))
    assert seconds._recording_s == pytest.approx(3 * (recorded * (launch_s - replayed_s) + again * launch_s))
    none = RankSeconds(work, Priced(), CROSSES[0])  # type: ignore[arg-type]
    none.features = replace(ENGINE, cuda_graphs=False)
    assert seconds.generate_s() - none.generate_s() == pytest.approx(seconds._recording_s)


@pytest.mark.parametrize(
    ("head", "response_logits", "new_tokens", "wanted"),
    [("lm", True, 5, 5), ("lm", True, 1, 1), ("lm", False, 5, 13), ("scalar", True, 5, 13), ("lm", True, 0, 8)],
)
def test_tokens_that_the_head_is_wanted_of(head: Any, response_logits: bool, new_tokens: int, wanted: int) -> None:
    lengths = Workload(prompt_tokens=8, new_tokens=new_tokens)
    seconds = rank(INFERENCE, CROSSES[0], model=FIVE.with_head(head), lengths=lengths, response_logits=response_logits)
    assert seconds._head_tokens == 4 * wanted


@pytest.mark.parametrize(
    ("micro_batches", "chunks", "slots", "share"),
    [
        (4, 1, 4, 1.0),
        (3, 1, 3, 1.0),
        (4, 2, 4, 1 / 2),
        (3, 2, 3 + 1 / 2, 1 / 2),  # one lacks of two: all of its time but one chunk's is waited for
        (1, 4, 1 + 3 / 4, 1 / 4),
    ],
)
def test_slots_of_two_stages(micro_batches: int, chunks: int, slots: float, share: float) -> None:
    model = replace(TINY, num_layers=8)
    seconds = rank(INFERENCE, CROSSES[0], ParallelStrategy(pp=2, chunks=chunks), micro_batches, model=model)
    assert seconds._pipeline_s([3.0, 5.0]) == pytest.approx(slots * 5 + 3 * share)
    assert seconds._pipeline_s([5.0, 3.0]) == pytest.approx(slots * 5 + 3 * share)


def test_slots_of_four_stages() -> None:
    """Of six micro-batches in two chunks two lack of a multiple of four; of eight none."""
    for micro_batches, slots in ((6, 6 + 2 / 2), (8, 8), (5, 5 + 3 / 2)):
        strategy, model = ParallelStrategy(pp=4, chunks=2), replace(TINY, num_layers=8)
        seconds = rank(INFERENCE, CROSSES[0], strategy, micro_batches, model=model)
        assert seconds._pipeline_s([1.0, 2.0, 5.0, 4.0]) == pytest.approx(slots * 5 + (1 + 2 + 4) / 2)


def test_pipelines_that_drain_one_by_one() -> None:
    """Stages of 1, 2, 5 and 4 s. Eight micro-batches are two pipelines of four: all stages once and three times the
    slowest each. Five are one of four and one of one. A training is one pipeline, and so is what fits into one."""
    model = replace(TINY, num_layers=8)

    def pipeline_s(kind: ModelInterfaceType, micro_batches: int) -> float:
        parts = rank(kind, CROSSES[0], ParallelStrategy(pp=4), micro_batches, model=model, drains_pipelines=True)
        return parts._pipeline_s([1.0, 2.0, 5.0, 4.0])

    for kind in (INFERENCE, GENERATE):
        assert [pipeline_s(kind, m) for m in (4, 5, 8)] == [12 + 3 * 5, 12 + 3 * 5 + 12, 2 * (12 + 3 * 5)]
    assert pipeline_s(INFERENCE, 3) == 12 + 2 * 5
    assert pipeline_s(TRAIN_STEP, 8) == 12 + 7 * 5


@pytest.mark.parametrize(
    ("blocking", "hops"),
    [(False, {(0, 0, 3): 1, (1, 0, 3): 2, (3, 0, 3): 2, (3, 3, 0): 1, (0, 3, 0): 2}),
     (True, {(0, 0, 3): 3, (1, 0, 3): 4, (3, 0, 3): 3, (3, 3, 0): 3, (0, 3, 0): 3})],
)  # fmt: skip
def test_messages_of_two_rounds(blocking: bool, hops: dict[tuple[int, int, int], int]) -> None:
    """The first stage of a pass receives none in its first round, the last one sends none in its last."""
    model = replace(TINY, num_layers=8)
    seconds = rank(INFERENCE, CROSSES[0], ParallelStrategy(pp=4, chunks=2), model=model, blocking_sends=blocking)
    assert {each: seconds._hops(*each) for each in hops} == hops


def test_stages_that_are_alike_are_computed_once() -> None:
    assert _examples_of_stages(5, 1) == (0,)
    assert _examples_of_stages(4, 2) == (0, 1)
    assert _examples_of_stages(8, 8) == (0, 1, 1, 1, 1, 1, 1, 7)
    assert _examples_of_stages(6, 4) == (0, 1, 2, 3)  # 2, 2, 1 and 1 layers
    assert _examples_of_stages(8, 4) == (0, 1, 1, 3)
    assert _examples_of_stages(11, 5) == (0, 1, 1, 1, 4)  # 3 on the first
    assert _examples_of_stages(13, 6) == (0, 1, 1, 1, 1, 5)
    seconds, asked = rank(INFERENCE, CROSSES[0], ParallelStrategy(pp=4), model=replace(TINY, num_layers=8)), []

    def of(stage: int) -> float:
        asked.append(stage)
        return 10.0 + stage

    assert seconds._stages(of) == [10, 11, 11, 13]
    assert sorted(asked) == [0, 1, 3]


def test_a_measured_layer_waits_more_often_in_sequence_parallelism() -> None:
    """Its two all-reduces, each way, become two collectives each."""
    measured = ProfiledTimings.of(profile(), CPU)
    crosses = Crossings(False, False, False)

    def layer_s(*, sequence_parallel: bool, timings: Any, train: bool = True) -> float:
        seconds = rank(TRAIN_STEP, crosses, timings=timings, sequence_parallel=sequence_parallel)
        return seconds._layer_s(52, 15, train, "off")

    both = [layer_s(sequence_parallel=on, timings=measured) for on in (False, True)]
    assert both[1] - both[0] == pytest.approx(2 * 2 * 0.1)  # of two devices, measured for every size
    assert layer_s(sequence_parallel=True, timings=Priced()) == layer_s(sequence_parallel=False, timings=Priced())
    forward = [layer_s(sequence_parallel=on, timings=measured, train=False) for on in (False, True)]
    assert forward[0] == forward[1]
    across = rank(TRAIN_STEP, Crossings(True, False, False), timings=measured, sequence_parallel=True)._unmeasured_s
    assert across == pytest.approx(2 * CPU.all_reduce_s(0.0, 2, crosses_nodes=True))


@pytest.mark.parametrize(("chunks", "layers"), [(1, None), (1, 2), (2, 1), (2, None)])
def test_layers_that_are_recomputed(chunks: int, layers: int | None) -> None:
    """The first ones of every chunk: with two chunks of two stages, layers 0, 1 (2) and 4, 5 of 8."""
    strategy = ParallelStrategy(pp=2, chunks=chunks)
    seconds = rank(
        TRAIN_STEP,
        CROSSES[0],
        strategy,
        model=replace(TINY, num_layers=8),
        recomputation="full",
        recomputed_layers=layers,
    )
    expected = {
        (1, None): [{0, 1, 2, 3}, {4, 5, 6, 7}],
        (1, 2): [{0, 1}, {4, 5}],
        (2, 1): [{0, 4}, {2, 6}],
        (2, None): [{0, 1, 4, 5}, {2, 3, 6, 7}],
    }[chunks, layers]
    assert [set(seconds.recomputed_layers(stage)) for stage in (0, 1)] == expected


@pytest.mark.parametrize(("prefetch", "on_gpus"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("recomputation", ["off", "selective", "full"])
def test_what_is_exchanged_of_operators(prefetch: bool, on_gpus: bool, recomputation: str) -> None:
    crosses = Crossings(True, True, False, 3)
    seconds = rank(
        TRAIN_STEP, crosses, prefetch=prefetch, on_gpus=on_gpus, recomputation=recomputation, fp32_gradients=True
    )
    for stage in (0, 1):
        exchange = seconds.exchange(stage)
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            assert getattr(exchange, name)(100.0) == price(name, 100, 2, True, 3)
        assert (exchange.micro_batches, exchange.item, exchange.gradient) == (2, 4, 4)
        layers = [{0, 1, 2}, {3, 4}][stage] if recomputation == "full" else set()
        assert exchange.recomputes == layers
        for backward, found in ((False, exchange.forward_s), (True, exchange.backward_s)):
            if not (prefetch and on_gpus):
                assert found == {}
                continue
            # q and o, of 64 x 64 each, k and v as large with a head for each; gate, up and down of 64 x 128.
            layer = price("layer", ROWS, ATTENDED, 2, backward, True, True)
            parts = {"q": 4096, "k": 4096, "v": 4096, "o": 4096, "gate": 8192, "up": 8192, "down": 8192}
            ends = (
                {"embedding": price("embedding", ROWS, 2, backward, True)},
                {"head": price("head", WANTED, 2, backward, True)},
            )
            expected = {kind: layer * size / 40960 for kind, size in parts.items()} | ends[stage]
            assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rules", "updated"),
    [
        ((("*", "zero1"),), "divided"),
        ((("*", "replicated"),), "whole"),
    ],
)
def test_a_device_updates_what_its_modes_leave_it(rules: ModeRules, updated: str) -> None:
    seconds = rank(TRAIN_STEP, CROSSES[0], ParallelStrategy(dp=2), modes=rules)
    elements = 5 * 41088 + 2 * 32 * 64 + 64
    assert seconds._updated() == pytest.approx(elements / (2 if updated == "divided" else 1), rel=1e-3)
    assert seconds._updated() == max(stage.updated for stage in seconds.placed.stages)
    exchanged = max(seconds.exchange(number).mini_batch_s(stage) for number, stage in enumerate(seconds.placed.stages))
    assert seconds._exchange_s() == exchanged


@pytest.mark.parametrize(
    ("features", "share"), [({"zero1": False}, 1), ({}, 4), ({"zero1": False, "fully_sharded": True}, 4)]
)
def test_a_device_updates_its_share_where_states_are_divided(features: dict[str, bool], share: int) -> None:
    seconds = rank(TRAIN_STEP, CROSSES[0], ParallelStrategy(dp=4), **features)
    assert seconds._updated() == (5 * 41088 + 2 * 32 * 64 + 64) / share


def test_the_stage_that_exchanges_and_updates_longest_is_waited_for() -> None:
    """The second one has the head, much larger than a layer."""
    model = replace(TINY, vocab_size=4096)
    seconds = rank(TRAIN_STEP, CROSSES[1], ParallelStrategy(dp=2, pp=2), model=model, modes=(("head", "sharded"),))
    each = [seconds.exchange(number).mini_batch_s(stage) for number, stage in enumerate(seconds.placed.stages)]
    assert each[0] != each[1]
    assert seconds._exchange_s() == max(each)
    updated = [stage.updated for stage in seconds.placed.stages]
    assert seconds._updated() == updated[1] > updated[0]


@dataclass(frozen=True)
class Counted(Priced):
    """Notes how often layers, heads and embeddings are asked for."""

    asked: list[str] = field(default_factory=list)

    def layer(self, *arguments: Any, **named: Any) -> float:
        self.asked.append("layer")
        return super().layer(*arguments, **named)

    def head(self, *arguments: Any, **named: Any) -> float:
        self.asked.append("head")
        return super().head(*arguments, **named)


def test_what_is_known_is_not_asked_for_again() -> None:
    """Layers are alike on all stages; the same option asks for nothing, and one with other stages for no layers."""
    timings, known = Counted(), dict[Any, float]()

    def inference(strategy: ParallelStrategy) -> None:
        seconds = rank(INFERENCE, CROSSES[0], strategy, timings=timings)
        work = structs.replace(seconds.work, known=known)
        RankSeconds(work, timings, CROSSES[0]).total_s()  # type: ignore[arg-type]

    inference(ParallelStrategy(dp=2, pp=2))
    assert timings.asked == ["layer", "head"]
    inference(ParallelStrategy(dp=2, pp=2))
    assert timings.asked == ["layer", "head"]
    inference(ParallelStrategy(dp=2, pp=4))
    assert timings.asked == ["layer", "head", "head"]


def test_what_is_remembered_holds_for_its_own_question_alone() -> None:
    """Options of one call share what they computed: in any order each gets what it gets alone."""
    options: list[tuple[dict[str, Any], Crossings]] = [
        ({"strategy": strategy, "micro_batches": micro_batches, **features}, crosses)
        for strategy in (
            ParallelStrategy(dp=2, tp=2, pp=2), ParallelStrategy(tp=2, pp=2), ParallelStrategy(dp=2, tp=4),
            ParallelStrategy(pp=4), ParallelStrategy(pp=2, chunks=2), ParallelStrategy(pp=2), ParallelStrategy(dp=8),
        )
        for micro_batches in (1, 2, 8)
        for features in (
            {}, {"recomputation": "full"}, {"recomputation": "full", "recomputed_layers": 1},
            {"recomputation": "selective"}, {"sequence_parallel": True},
        )
        for crosses in (CROSSES[0], CROSSES[2])
    ]  # fmt: skip
    rest, lengths = random.Random(1), replace(LENGTHS, samples_per_prompt=4)
    for kind in (INFERENCE, TRAIN_STEP, GENERATE):
        rest.shuffle(options)
        known: dict[Any, float] = {}
        for option, crosses in options[:80]:
            for places in (Crossings(crosses.tensor, False, crosses.pipeline), crosses):
                alone = rank(kind, places, lengths=lengths, **option)
                together = rank(kind, places, lengths=lengths, **option)
                shared = structs.replace(together.work, known=known)
                found = RankSeconds(shared, Priced(), places).total_s()  # type: ignore[arg-type]
                assert found == pytest.approx(alone.total_s(), rel=1e-12)


@pytest.mark.parametrize(
    ("devices_per_node", "strategy", "expected"),
    [
        (12, (3, 2, 2), Crossings(False, False, False, 1)),
        (4, (3, 2, 2), Crossings(False, True, True, 1, senders=4)),
        (4, (6, 2, 1), Crossings(False, True, False, 2)),
        (4, (3, 4, 1), Crossings(False, True, False, 1)),
        (4, (4, 1, 3), Crossings(False, False, True, 1, senders=4)),
        (4, (1, 6, 2), Crossings(True, False, True, 1, senders=4)),
        # Of the last rank of each kind alone: devices 10 and 11, 7 and 9 and 11, 5 and 11.
        (11, (3, 2, 2), Crossings(True, True, True, 1)),
        # Devices 0 to 2 lie in one node, 3 in the same one, 4 and 5 in the next.
        (4, (3, 1, 2), Crossings(False, True, True, 1, senders=2)),
        (4, (1, 3, 2), Crossings(True, False, True, 1, senders=2)),
        # Of the two stages of a node one sends to the next node.
        (4, (1, 2, 6), Crossings(False, False, True, 1, senders=2)),
    ],
)
def test_groups_that_cross_nodes(devices_per_node: int, strategy: tuple[int, int, int], expected: Crossings) -> None:
    """Neighbours are tensor-parallel, then data-parallel, then of one pipeline."""
    cluster = cpu_cluster(devices_per_node, num_nodes=3)
    assert crossings(ParallelStrategy(*strategy), cluster) == expected
