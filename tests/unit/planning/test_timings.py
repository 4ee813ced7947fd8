"""The analytic model's terms against numbers worked out by hand."""

from dataclasses import replace

import pytest
from msgspec import structs

from realhf.architecture.model import LLAMA
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.timings import LOGITS_PASSES, Timings
from tests.unit.planning.graphs import TINY

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
    return timings.layer(10, 5, tp, backward=backward, tp_crosses_nodes=crosses)


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
    forward = timings.layer(10, 5, 1, backward=False, tp_crosses_nodes=False)
    trained = timings.layer(10, 5, 1, backward=False, tp_crosses_nodes=False, trains=True)
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
    assert timings.decode_layer(3, 7, 1, tp_crosses_nodes=False) == pytest.approx(0.5 + seconds)
    graphs = analytic(EngineFeatures(cuda_graphs=True), decode_launch_s=0.5, decode_graph_launch_s=0.125, **fields)
    assert graphs.decode_layer(3, 7, 1, tp_crosses_nodes=False) == pytest.approx(0.125 + seconds)


def test_head_passes_over_fp32_logits() -> None:
    fields = {"matmul_flops": {"float32": 1e6, "bfloat16": 1e6}, "memory_bandwidth": 1e3}
    logits_bytes = 10 * 32 * 4

    def head(tp: int, features: EngineFeatures | None = None, *, backward: bool = False) -> float:
        return analytic(features, **fields).head(10, tp, backward=backward, tp_crosses_nodes=False)

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
    assert half.head(10, 1, backward=False, tp_crosses_nodes=False) == pytest.approx(
        32 * 64 * 2 / 1e3 + flops_s + passes
    )


def test_a_scalar_head_has_no_logits() -> None:
    critic = Timings(model=TINY.with_head("scalar"), dtype="float32", hardware=CPU)
    seconds = critic.head(10, 2, backward=False, tp_crosses_nodes=False)
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
    sixteen = timings.embedding(1e6, 16, backward=False, tp_crosses_nodes=True)
    copy_s = 2 * 1e6 * 8192 * 2 / H100.memory_bandwidth
    # As fast as a device can send within its node, since its eight links together are faster.
    rails = min(8 * H100.inter_node_bandwidth, H100.intra_node_bandwidth)
    latency_s = 30 * (H100.inter_node_latency_s + 7 * H100.intra_node_latency_s) / 8
    assert sixteen == pytest.approx(copy_s + 30 / 16 * 1e6 * 8192 * 2 / rails + latency_s)


def test_gathers_and_scatters_are_half_of_a_ring() -> None:
    timings = analytic()
    for collective in (timings.all_gather, timings.reduce_scatter):
        assert collective(2560, 2, crosses_nodes=False) == pytest.approx(reduce_s(CPU, 2560) / 2)
        assert collective(2560, 1, crosses_nodes=False) == 0.0
