"""The analytic model's terms against numbers worked out by hand."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from realhf.architecture.model import DecoderConfig, DType, Experts
from realhf.architecture.named import LLAMA
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.profile import CollectiveKind
from realhf.planning.model.timings import LOGITS_PASSES, TensorGroup, Timings, kv_bytes_per_token_layer
from tests.unit.planning.graphs import TINY

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")

CPU = structs.replace(load_hardware("cpu"), uncertainty=None)  # its constants are replaced
H100 = load_hardware("h100")
WEIGHTS = 4 * 64 * 64 + 3 * 64 * 128  # of TINY's products in a layer: 40960
# fp32, tp 1, a token: two norms of 7 passes of 4 bytes and two sums of 3 over 64; 12 passes over q and k (64
# each, grouped heads none) and 5 over 128.
ELEMENTWISE = 2 * (7 * 4 + 3 * 4) * 64 + 4 * (12 * (64 + 64) + 5 * 128)
# What its products read and write beside weights, a token: the inputs of q, k and v, and of gate and up, the outputs of
# o and down (64 each); q, k, v and o's input (64, 64 in all, 64); gate, up and down's input (128 each).
PRODUCTS = 4 * 64 + (64 + 64 + 64 + 64) + 3 * 128
COMPUTE_BOUND = {"matmul_flops": {"float32": 1e6}, "memory_bandwidth": 1e12, "layer_launch_s": 0.5}


def analytic(features: EngineFeatures | None = None, **fields: object) -> Timings:
    hardware = structs.replace(CPU, uncertainty=None, **fields)
    return Timings(model=TINY, dtype="float32", hardware=hardware, features=features or EngineFeatures())


def layer(timings: Timings, tp: int, *, backward: bool = False, crosses: bool = False) -> float:
    return timings.layer(10, 5, TensorGroup(tp, crosses), backward=backward, trains=False)


def reduce_s(hardware: Hardware, size_bytes: float) -> float:
    """Ring all-reduce of two devices: two messages of half of it."""
    return 2 * (hardware.intra_node_latency_s + size_bytes / 2 / hardware.intra_node_bandwidth)


def test_layer_bound_by_compute() -> None:
    timings = analytic(**COMPUTE_BOUND)
    # 10 tokens in sequences of 5: 2 x 40960 weights and 2 x 5 x 64 for attention a token, at 1e6 FLOP/s.
    compute = 10 * (2 * WEIGHTS + 640) / 1e6
    assert layer(timings, 1) == pytest.approx(0.5 + compute)
    assert layer(timings, 1, backward=True) == pytest.approx(1.0 + 2 * compute)
    # tp 2: half the compute; two all-reduces of 10 x 64 x 4 bytes, forward and backward.
    assert layer(timings, 2) == pytest.approx(0.5 + compute / 2 + 2 * reduce_s(CPU, 2560))
    assert layer(timings, 2, backward=True) == pytest.approx(1.0 + compute + 2 * reduce_s(CPU, 2560))
    assert layer(timings, 2, crosses=True) > layer(timings, 2)


def test_launches_passes_and_compute_add_up() -> None:
    timings = analytic(matmul_flops={"float32": 1e6}, memory_bandwidth=1e6, layer_launch_s=0.25)
    compute = 10 * (2 * WEIGHTS + 640) / 1e6 + 4 * (WEIGHTS + 10 * PRODUCTS) / 1e6
    assert layer(timings, 1) == pytest.approx(0.25 + compute + 10 * ELEMENTWISE / 1e6)
    assert layer(timings, 1, backward=True) == pytest.approx(0.5 + 2 * compute + 20 * ELEMENTWISE / 1e6)


def test_training_launches_by_itself() -> None:
    timings = analytic(**COMPUTE_BOUND, train_launch_s=2.0)
    forward = timings.layer(10, 5, TensorGroup(1), backward=False, trains=False)
    trained = timings.layer(10, 5, TensorGroup(1), backward=False, trains=True)
    assert trained - forward == pytest.approx(2.0 - 0.5)
    backward = layer(timings, 1, backward=True)
    assert backward == pytest.approx(2 * trained)


def test_narrow_products_reach_less() -> None:
    """The same FLOPs take longer on more tensor-parallel ranks: more bytes a FLOP."""
    timings = Timings(model=LLAMA["llama70b"], dtype="bfloat16", hardware=structs.replace(H100, layer_launch_s=0.0))
    timings = replace(timings, hardware=structs.replace(timings.hardware, intra_node_latency_s=0.0))

    def products_s(tp: int) -> float:
        moved = timings._layer_weights(1) / tp + 4096 * timings._product_elements(tp)
        return tp * timings._products(4096 * 2 * timings._layer_weights(1) / tp, 2 * moved)

    assert products_s(1) < products_s(2) < products_s(8) < 1.5 * products_s(1)


def test_inputs_that_are_gathered_again() -> None:
    """Half of an all-reduce for each of a layer's two inputs of column-parallel products, in the backward pass."""
    fields = {"sequence_parallel": True}
    kept, again = (analytic(EngineFeatures(**fields, regathers_inputs=regathers)) for regathers in (False, True))
    assert layer(again, 2) == layer(kept, 2)
    assert layer(again, 2, backward=True) - layer(kept, 2, backward=True) == pytest.approx(reduce_s(CPU, 2560))
    assert layer(analytic(EngineFeatures(regathers_inputs=True)), 2, backward=True) == pytest.approx(
        layer(analytic(), 2, backward=True)
    )


def test_elementwise_bytes() -> None:
    assert analytic().elementwise_bytes(1) == ELEMENTWISE == 13824
    # Every rank has whole hidden states beside the products: 40 bytes x 2 x 64; sequence parallelism divides them.
    assert analytic().elementwise_bytes(2) == 5120 + (13824 - 5120) / 2
    assert analytic(EngineFeatures(sequence_parallel=True)).elementwise_bytes(2) == 13824 / 2
    # bf16 widened in the norms: 4 x 2 + 7 x 4 bytes.
    half = Timings(model=TINY, dtype="bfloat16", hardware=CPU)
    assert half.elementwise_bytes(1) == 2 * (36 + 6) * 64 + (13824 - 5120) / 2


def test_decode_is_bound_by_memory() -> None:
    fields = {"matmul_flops": {"float32": 1e15}, "memory_bandwidth": 1e6}
    eager = EngineFeatures(cuda_graphs=False)
    timings = analytic(eager, decode_launch_s=0.5, decode_graph_launch_s=0.125, **fields)
    # The layer's weights, keys and values of 3 sequences of 7 tokens, and inputs, outputs and passes of 3 tokens.
    seconds = (4 * (WEIGHTS + 3 * 7 * 2 * 64 + 3 * PRODUCTS) + 3 * ELEMENTWISE) / 1e6
    assert timings.decode_layer(3, 7, TensorGroup(1)) == pytest.approx(0.5 + seconds)
    graphs = analytic(EngineFeatures(cuda_graphs=True), decode_launch_s=0.5, decode_graph_launch_s=0.125, **fields)
    assert graphs.decode_layer(3, 7, TensorGroup(1)) == pytest.approx(0.125 + seconds)


def test_head_passes_over_fp32_logits() -> None:
    fields = {"matmul_flops": {"float32": 1e6, "bfloat16": 1e6}, "memory_bandwidth": 1e3}
    logits_bytes = 10 * 32 * 4

    def head(tp: int, features: EngineFeatures | None = None, *, backward: bool = False) -> float:
        return analytic(features, **fields).head(10, TensorGroup(tp), backward=backward)

    # Reading 32 x 64 weights of 4 bytes, and 2 x 10 x 2048 FLOPs.
    flops_s = 2 * 10 * 2048 / 1e6
    projection, passes = 32 * 64 * 4 / 1e3 + flops_s, LOGITS_PASSES * logits_bytes / 1e3
    assert head(1) == pytest.approx(projection + passes)
    assert head(1, backward=True) == pytest.approx(2 * projection + passes)
    gather = CPU.intra_node_latency_s + logits_bytes / 2 / CPU.intra_node_bandwidth
    assert head(2, EngineFeatures(full_logits=True)) == pytest.approx(projection / 2 + passes + gather)
    assert head(2) == pytest.approx((projection + passes) / 2)
    chunks = EngineFeatures(logits_chunk_bytes=logits_bytes - 1)
    assert head(1, chunks) == pytest.approx(projection + passes)
    assert head(1, chunks, backward=True) == pytest.approx(3 * projection + passes)
    # bf16 logits are widened before the passes: half the weights to read, as many bytes of logits.
    half = Timings(model=TINY, dtype="bfloat16", hardware=structs.replace(CPU, **fields))
    assert half.head(10, TensorGroup(1), backward=False) == pytest.approx(32 * 64 * 2 / 1e3 + flops_s + passes)


def test_a_scalar_head_has_no_logits() -> None:
    critic = Timings(model=TINY.with_head("scalar"), dtype="float32", hardware=CPU)
    seconds = critic.head(10, TensorGroup(2), backward=False)
    assert seconds == pytest.approx(2 * 10 * 64 * 4 / CPU.memory_bandwidth)


def test_optimizer() -> None:
    # fp32: three passes over the gradient, two over the parameter, four over the two states; bf16: 3 x 4 + 2 x 2 +
    # 4 x 4 and a master copy, or 5 x 2 where gradients are bf16 as well.
    assert analytic(memory_bandwidth=1.0).optimizer(10) == 10 * 36
    half = Timings(model=TINY, dtype="bfloat16", hardware=structs.replace(CPU, memory_bandwidth=1.0))
    assert half.optimizer(10) == 10 * (16 + 16 + 8)
    narrow = replace(half, features=EngineFeatures(fp32_gradients=False))
    assert narrow.optimizer(10) == 10 * (10 + 16 + 8)


def test_a_tensor_group_over_nodes_uses_the_links_of_all_its_members() -> None:
    timings = Timings(model=LLAMA["llama70b"], dtype="bfloat16", hardware=H100)
    sixteen = timings.embedding(1e6, TensorGroup(16, True), backward=False)
    copy_s = 2 * 1e6 * 8192 * 2 / H100.memory_bandwidth
    # As fast as a device can send within its node, since its eight links together are faster.
    rails = min(8 * H100.inter_node_bandwidth, H100.intra_node_bandwidth)
    latency_s = 30 * (H100.inter_node_latency_s + 7 * H100.intra_node_latency_s) / 8
    assert sixteen == pytest.approx(copy_s + 30 / 16 * 1e6 * 8192 * 2 / rails + latency_s)


def test_gathers_and_scatters_are_half_of_a_ring() -> None:
    timings = analytic()
    for kind in KINDS[1:]:
        assert timings.collective(kind, 2560, 2, crosses_nodes=False) == pytest.approx(reduce_s(CPU, 2560) / 2)
        assert timings.collective(kind, 2560, 1, crosses_nodes=False) == 0.0


# --- with every term at once

SLOW = structs.replace(
    CPU, matmul_flops={"float32": 1e6, "bfloat16": 2e6}, memory_bandwidth=1e5, intra_node_bandwidth=1e4,
    intra_node_latency_s=0.5, inter_node_bandwidth=2e3, inter_node_latency_s=3.0, layer_launch_s=0.25,
    train_launch_s=0.75, decode_launch_s=0.125, decode_graph_launch_s=0.0625, devices_per_node=2,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Worked:
    """A model with its numbers, worked out by hand, of a layer and token.

    weights: of the products that a token goes through. whole, divided: elements that products read and write beside
    them, on every rank and over tp. passes: bytes of element-wise passes, whole and divided. touched: weights that 10
    and that 3 tokens read together.
    """

    model: DecoderConfig
    dtype: DType
    item: int
    flops: float
    query: int
    weights: int
    whole: int
    divided: int
    passes: tuple[int, int]
    touched: dict[int, int]
    cache_bytes: int


GROUPED = replace(TINY, num_kv_heads=2, attention_head_dim=32)  # queries of 128, keys and values of 64
ATTENTION = 64 * (2 * 128 + 2 * 64)
WORKED = [
    Worked(
        model=GROUPED, dtype="bfloat16", item=2, flops=2e6, query=128, weights=ATTENTION + 3 * 64 * 128,
        whole=4 * 64, divided=2 * 128 + 2 * 64 + 3 * 128,
        passes=(2 * (7 * 4 + 4 * 2 + 3 * 2) * 64, 2 * (12 * (128 + 64) + 5 * 128)),
        touched=dict.fromkeys((10, 3), ATTENTION + 3 * 64 * 128), cache_bytes=2 * 64 * 2,
    ),
    Worked(
        model=replace(GROUPED, mlp="plain"), dtype="float32", item=4, flops=1e6, query=128,
        weights=ATTENTION + 2 * 64 * 128, whole=4 * 64, divided=2 * 128 + 2 * 64 + 2 * 128,
        passes=(2 * (7 * 4 + 3 * 4) * 64, 4 * (12 * (128 + 64) + 5 * 128)),
        touched=dict.fromkeys((10, 3), ATTENTION + 2 * 64 * 128), cache_bytes=2 * 64 * 4,
    ),
    # Two of eight experts a token: 10 tokens read all eight, 3 tokens six.
    Worked(
        model=replace(GROUPED, experts=Experts(count=8, per_token=2)), dtype="float32", item=4, flops=1e6, query=128,
        weights=ATTENTION + 2 * 3 * 64 * 128, whole=4 * 64, divided=2 * 128 + 2 * 64 + 3 * 256,
        passes=(2 * (7 * 4 + 3 * 4) * 64, 4 * (12 * (128 + 64) + 5 * 256)),
        touched={10: ATTENTION + 8 * 3 * 64 * 128, 3: ATTENTION + 6 * 3 * 64 * 128}, cache_bytes=2 * 64 * 4,
    ),
]  # fmt: skip
PLACES = [(1, False), (2, False), (2, True), (4, True)]


def slow(worked: Worked, **features: Any) -> Timings:
    return Timings(model=worked.model, dtype=worked.dtype, hardware=SLOW, features=EngineFeatures(**features))


def reduced_s(size_bytes: float, tp: int, crosses: bool) -> float:
    """Of four ranks on nodes of two devices, two are in each."""
    return SLOW.all_reduce_s(size_bytes, tp, crosses_nodes=crosses, per_node=2 if tp == 4 else 1)


@pytest.mark.parametrize("worked", WORKED, ids=["grouped", "plain", "experts"])
@pytest.mark.parametrize(("tp", "crosses"), PLACES)
@pytest.mark.parametrize(("backward", "trains"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("parallel", ["off", "on", "regathers"])
def test_all_terms_of_a_layer(
    worked: Worked, tp: int, crosses: bool, backward: bool, trains: bool, parallel: str
) -> None:
    timings = slow(worked, sequence_parallel=parallel != "off", regathers_inputs=parallel == "regathers")
    passes = 2 if backward else 1
    flops = 10 * (2 * worked.weights + 2 * 5 * worked.query) / tp
    moved = worked.item * (worked.touched[10] / tp + 10 * (worked.whole + worked.divided / tp))
    whole, divided = worked.passes
    elementwise = 10 * (whole / (1 if parallel == "off" else tp) + divided / tp)
    launch = 0.75 if trains or backward else 0.25
    reduces = 3 if backward and parallel == "regathers" else 2
    expected = passes * (launch + flops / worked.flops + (moved + elementwise) / 1e5)
    expected += reduces * reduced_s(10 * 64 * worked.item, tp, crosses)
    found = timings.layer(10, 5, TensorGroup(tp, crosses), backward=backward, trains=trains)
    assert found == pytest.approx(expected)
    again = timings.recomputed(10, TensorGroup(tp, crosses))
    assert again == pytest.approx(0.75 + elementwise / 1e5 + 2 * reduced_s(10 * 64 * worked.item, tp, crosses))


@pytest.mark.parametrize("worked", WORKED, ids=["grouped", "plain", "experts"])
@pytest.mark.parametrize(("tp", "crosses"), PLACES)
@pytest.mark.parametrize("graphs", [False, True])
def test_all_terms_of_a_decode_step(worked: Worked, tp: int, crosses: bool, graphs: bool) -> None:
    """Of 3 sequences with 7 tokens each: scores and values over all of these, not over half of them."""
    flops = 3 * (2 * worked.weights + 4 * 7 * worked.query) / tp
    moved = worked.item * (worked.touched[3] / tp + 3 * (worked.whole + worked.divided / tp))
    moved += 3 * 7 * worked.cache_bytes / tp + 3 * (worked.passes[0] + worked.passes[1] / tp)
    expected = (0.0625 if graphs else 0.125) + flops / worked.flops + moved / 1e5
    expected += 2 * reduced_s(3 * 64 * worked.item, tp, crosses)
    found = slow(worked, cuda_graphs=graphs).decode_layer(3, 7, TensorGroup(tp, crosses))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("tp", "crosses"), PLACES)
@pytest.mark.parametrize("backward", [False, True])
def test_all_terms_of_an_embedding(tp: int, crosses: bool, backward: bool) -> None:
    """Rows are read and written; their parts are summed over tp forward alone."""
    expected = 2 * 10 * 64 * 2 / 1e5 + (0.0 if backward else reduced_s(10 * 64 * 2, tp, crosses))
    found = slow(WORKED[0]).embedding(10, TensorGroup(tp, crosses), backward=backward)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("tp", "crosses"), PLACES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("chunks", ["one", "just one", "more", "none"])
def test_all_terms_of_a_head(tp: int, crosses: bool, backward: bool, full: bool, chunks: str) -> None:
    """32 logits of 10 tokens, widened to 4 bytes; backward, those of more than one chunk are projected once more."""
    logits_bytes = 10 * 32 * 4
    chunk = {"one": 10**6, "just one": logits_bytes // tp, "more": logits_bytes // tp - 1, "none": None}[chunks]
    timings = slow(WORKED[0], full_logits=full, logits_chunk_bytes=chunk)
    projection = 2 * 10 * 32 * 64 / tp / 2e6 + 32 * 64 * 2 / tp / 1e5
    projections = (2 if backward else 1) + (backward and not full and chunks == "more")
    expected = projections * projection + 4 * logits_bytes / (1 if full else tp) / 1e5
    if backward:
        expected += reduced_s(10 * 64 * 2, tp, crosses)
    elif full:
        per_node = 2 if tp == 4 else 1
        expected += SLOW.all_gather_s(10 * 32 * 2, tp, crosses_nodes=crosses, per_node=per_node)
    assert timings.head(10, TensorGroup(tp, crosses), backward=backward) == pytest.approx(expected)


@pytest.mark.parametrize(("backward", "passes"), [(False, 1), (True, 2)])
def test_a_scalar_head_reads_and_writes_hidden_states(backward: bool, passes: int) -> None:
    critic = Timings(model=GROUPED.with_head("scalar"), dtype="bfloat16", hardware=SLOW)
    found = critic.head(10, TensorGroup(2, True), backward=backward)
    assert found == pytest.approx(passes * 2 * 10 * 64 * 2 / 1e5)


@pytest.mark.parametrize(("crosses", "per_node"), [(False, 1), (True, 1), (True, 2)])
def test_collectives_are_those_of_the_hardware(crosses: bool, per_node: int) -> None:
    timings, group = slow(WORKED[0]), {"crosses_nodes": crosses, "per_node": per_node}
    found = {kind: timings.collective(kind, 1e4, 4, **group) for kind in KINDS}  # type: ignore[arg-type]
    assert found["all_reduce"] == SLOW.all_reduce_s(1e4, 4, **group)  # type: ignore[arg-type]
    gathered_s = SLOW.all_gather_s(1e4, 4, **group)  # type: ignore[arg-type]
    assert found["all_gather"] == found["reduce_scatter"] == gathered_s
    assert timings.send(1e4, crosses_nodes=crosses) == SLOW.send_s(1e4, crosses_nodes=crosses)
    for kind in KINDS:  # a member in each node, if nobody says how many
        collective = partial(timings.collective, kind, 1e4, 4, crosses_nodes=crosses)
        assert collective() == collective(per_node=1)


def test_an_optimizer_step_reads_and_writes() -> None:
    """In bf16 three passes over gradients of 4 bytes, two over 2 bytes, two over 12 bytes of states and master copy."""
    assert slow(WORKED[0]).optimizer(1000) == pytest.approx(1000 * (3 * 4 + 2 * 2 + 2 * 12) / 1e5)
    assert slow(WORKED[0], fp32_gradients=False).optimizer(1000) == pytest.approx(1000 * (3 * 2 + 4 + 24) / 1e5)


def test_timings_under_other_features_are_of_the_same_model() -> None:
    timings = slow(WORKED[0])
    other = timings.under(EngineFeatures(full_logits=True))
    assert other == slow(WORKED[0], full_logits=True)
    assert timings.links == SLOW


def test_keys_and_values_of_a_token() -> None:
    assert kv_bytes_per_token_layer(GROUPED, "bfloat16") == 2 * 2 * 32 * 2
    assert kv_bytes_per_token_layer(TINY, "float32") == 2 * 64 * 4
