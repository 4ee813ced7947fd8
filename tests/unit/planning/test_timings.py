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

CPU = load_hardware("cpu")
H100 = load_hardware("h100")
WEIGHTS = 4 * 64 * 64 + 3 * 64 * 128  # of TINY's products in a layer: 40960
# fp32, tp 1, a token: two norms of 7 passes of 4 bytes and two sums of 3 over 64; 12 passes over q and k (64
# each, grouped heads none) and 5 over 128.
ELEMENTWISE = 2 * (7 * 4 + 3 * 4) * 64 + 4 * (12 * (64 + 64) + 5 * 128)
COMPUTE_BOUND = {"matmul_flops": {"float32": 1e6}, "memory_bandwidth": 1e12, "layer_launch_s": 0.5}


def analytic(features: EngineFeatures | None = None, **fields: object) -> Timings:
    hardware = structs.replace(CPU, **fields)
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
    compute = 10 * (2 * WEIGHTS + 640) / 1e6
    assert layer(timings, 1) == pytest.approx(0.25 + compute + 10 * ELEMENTWISE / 1e6)
    assert layer(timings, 1, backward=True) == pytest.approx(0.5 + 2 * compute + 20 * ELEMENTWISE / 1e6)


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
    # The layer's weights, keys and values of 3 sequences of 7 tokens, and the passes of 3 tokens.
    seconds = (4 * (WEIGHTS + 3 * 7 * 2 * 64) + 3 * ELEMENTWISE) / 1e6
    assert timings.decode_layer(3, 7, 1, tp_crosses_nodes=False) == pytest.approx(0.5 + seconds)
    graphs = analytic(EngineFeatures(cuda_graphs=True), decode_launch_s=0.5, decode_graph_launch_s=0.125, **fields)
    assert graphs.decode_layer(3, 7, 1, tp_crosses_nodes=False) == pytest.approx(0.125 + seconds)


def test_head_passes_over_fp32_logits() -> None:
    fields = {"matmul_flops": {"float32": 1e6, "bfloat16": 1e6}, "memory_bandwidth": 1e3}
    logits_bytes = 10 * 32 * 4

    def head(tp: int, features: EngineFeatures | None = None, *, backward: bool = False) -> float:
        return analytic(features, **fields).head(10, tp, backward=backward, tp_crosses_nodes=False)

    # Bound by reading 32 x 64 weights of 4 bytes, since 2 x 10 x 2048 FLOPs take less.
    projection, passes = 32 * 64 * 4 / 1e3, LOGITS_PASSES * logits_bytes / 1e3
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
    assert half.head(10, 1, backward=False, tp_crosses_nodes=False) == pytest.approx(projection / 2 + passes)


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
    rails = 8 * H100.inter_node_bandwidth
    latency_s = 30 * (H100.inter_node_latency_s + 7 * H100.intra_node_latency_s) / 8
    assert sixteen == pytest.approx(copy_s + 30 / 16 * 1e6 * 8192 * 2 / rails + latency_s)
