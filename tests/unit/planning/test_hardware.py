"""Messages and collectives against numbers worked out by hand."""

import re

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import GIB, Hardware, in_gib, mismatch
from realhf.planning.model.uncertainty import Uncertainty

ROUND = structs.replace(
    load_hardware("cpu"),
    intra_node_bandwidth=100.0,
    intra_node_latency_s=1.0,
    inter_node_bandwidth=10.0,
    inter_node_latency_s=5.0,
)


def test_a_message() -> None:
    assert ROUND.send_s(50, crosses_nodes=False) == 1.5
    assert ROUND.send_s(50, crosses_nodes=True) == 10.0


def test_a_ring_for_much_data() -> None:
    # Six messages of a quarter: 6 x (1 + 2,500 / 100), below 2 x (2 + 10,000 / 100).
    assert ROUND.all_reduce_s(10_000, 4, crosses_nodes=False) == 6 * 26
    assert ROUND.all_gather_s(10_000, 4, crosses_nodes=False) == 3 * 26
    assert ROUND.all_reduce_s(10_000, 1, crosses_nodes=False) == 0.0


def test_a_tree_for_little_data() -> None:
    # Eight devices: three levels up and down, not fourteen messages.
    assert ROUND.all_reduce_s(8, 8, crosses_nodes=False) == pytest.approx(2 * (3 + 0.08))


@pytest.mark.parametrize(("devices", "levels"), [(5, 3), (6, 3), (7, 3), (8, 3), (9, 4), (33, 6)])
def test_a_tree_has_as_many_levels_as_its_leaves_need(devices: int, levels: int) -> None:
    assert ROUND.all_reduce_s(1, devices, crosses_nodes=False) == pytest.approx(2 * (levels * 1 + 0.01))
    assert ROUND.all_reduce_s(1, devices, crosses_nodes=True) == pytest.approx(2 * (levels * 5 + 0.1))


def test_of_two_devices_a_ring_is_the_tree_with_half_of_the_bytes() -> None:
    assert ROUND.all_reduce_s(50, 2, crosses_nodes=False) == pytest.approx(2 * (1 + 0.25))


def test_between_a_ring_and_a_tree_the_faster_one_counts() -> None:
    """Of 4 devices, ring 6 (1 + x / 400), tree 2 (2 + x / 100): equal at 400 bytes."""
    for size in (396, 404):
        ring, tree = 6 * (1 + size / 400), 2 * (2 + size / 100)
        assert (ring < tree) is (size > 400)
        assert ROUND.all_reduce_s(size, 4, crosses_nodes=False) == pytest.approx(min(ring, tree))
    assert ROUND.all_reduce_s(8, 2, crosses_nodes=False) == pytest.approx(2 * (1 + 0.04))


def test_every_member_in_a_node_brings_a_link() -> None:
    # Two nodes of four: rings with one hop of four between nodes, four links of 10 a node.
    latency = (5 + 3 * 1) / 4
    together = ROUND.all_gather_s(8_000, 8, crosses_nodes=True, per_node=4)
    assert together == pytest.approx(7 * (latency + 1_000 / 40))
    alone = ROUND.all_gather_s(8_000, 8, crosses_nodes=True)
    assert alone == pytest.approx(7 * (5 + 1_000 / 10))
    # Never faster than a device can send within its node.
    many = ROUND.all_gather_s(32_000, 32, crosses_nodes=True, per_node=16)
    assert many == pytest.approx(31 * ((5 + 15) / 16 + 1_000 / 100))


def test_one_member_in_each_node_sends_as_fast_as_its_network() -> None:
    """Also where that is faster than the links within a node, which no message takes."""
    fast = structs.replace(ROUND, inter_node_bandwidth=200.0, intra_node_latency_s=3.0)
    assert fast.link(True, 1) == (5.0, 200.0)
    assert fast.link(True, 2) == ((5 + 3) / 2, 100.0)
    assert ROUND.link(True, 3) == ((5 + 2) / 3, 30.0)
    assert ROUND.link(False, 3) == (1.0, 100.0)


# Four devices whose cards reach 10 each, in a node whose network carries 20 in all.
SHARED = structs.replace(ROUND, devices_per_node=4, inter_node_shared_bandwidth=20.0)


def test_devices_share_the_network_of_their_node() -> None:
    """Four rings of one member, two of two, one of four: each node sends 20 in all."""
    assert [SHARED.link(True, k) for k in (1, 2, 4)] == [(5, 5), (3, 10), (2, 20)]
    assert SHARED.all_gather_s(8_000, 8, crosses_nodes=True, per_node=4) == pytest.approx(7 * (2 + 1_000 / 20))
    assert SHARED.all_reduce_s(800, 2, crosses_nodes=True) == pytest.approx(2 * (5 + 400 / 5))
    assert SHARED.link(False, 4) == ROUND.link(False, 4)


def test_a_message_shares_the_network_with_those_that_are_sent_beside_it() -> None:
    """All devices of the node send, unless their number is given; a card's own rate is never exceeded."""
    assert SHARED.send_s(50, crosses_nodes=True) == 5 + 50 / 5
    assert [SHARED.send_s(60, crosses_nodes=True, senders=n) for n in (1, 2, 3, 4)] == [11, 11, 14, 17]
    slow = structs.replace(SHARED, inter_node_send_bandwidth=2.0)
    assert (slow.send_bandwidth, slow.send_s(50, crosses_nodes=True)) == (2, 30)
    assert SHARED.send_s(50, crosses_nodes=False, senders=1) == ROUND.send_s(50, crosses_nodes=False)
    assert ROUND.send_s(50, crosses_nodes=True, senders=3) == ROUND.send_s(50, crosses_nodes=True)


@pytest.mark.parametrize(("devices", "crosses_nodes"), [(1, False), (1, True)])
def test_one_device_sends_nothing(devices: int, crosses_nodes: bool) -> None:
    assert ROUND.all_reduce_s(1e9, devices, crosses_nodes=crosses_nodes) == 0.0
    assert ROUND.all_gather_s(1e9, devices, crosses_nodes=crosses_nodes) == 0.0


def test_a_message_between_nodes_has_a_rate_of_its_own_where_the_description_says_so() -> None:
    slow = structs.replace(ROUND, inter_node_send_bandwidth=2.0)
    assert ROUND.send_bandwidth == 10.0
    assert slow.send_s(50, crosses_nodes=True) == 5 + 25
    assert slow.send_s(50, crosses_nodes=False) == 1.5
    assert slow.all_gather_s(100, 2, crosses_nodes=True) == 5 + 5


def test_a_layer_of_a_training_has_a_launch_of_its_own_where_the_description_says_so() -> None:
    given = structs.replace(ROUND, layer_launch_s=2.0, train_launch_s=7.0)
    assert (given.launch_s(trains=False), given.launch_s(trains=True)) == (2.0, 7.0)
    none = structs.replace(given, train_launch_s=None)
    assert (none.launch_s(trains=False), none.launch_s(trains=True)) == (2.0, 2.0)
    free = structs.replace(given, train_launch_s=0.0)
    assert (free.launch_s(trains=False), free.launch_s(trains=True)) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 GiB"),
        (2**27, "0.12 GiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**30, "1.0 GiB"),
        (2**30 - 1, "1 GiB"),
        (2**40, "1024.0 GiB"),
    ],
)
def test_sizes_as_text(size_bytes: float, text: str) -> None:
    assert in_gib(size_bytes) == text


LEAST = Hardware(
    name="least", description="what a description has to say", matmul_flops={"float32": 1.0}, memory_bandwidth=1.0,
    device_memory_bytes=1, devices_per_node=1, intra_node_bandwidth=1.0, intra_node_latency_s=0.0,
    inter_node_bandwidth=1.0, inter_node_latency_s=0.0, layer_launch_s=0.0, decode_launch_s=0.0,
    decode_graph_launch_s=0.0, call_overhead_s=0.0, sampling_s=0.0,
)  # fmt: skip


def test_what_a_description_leaves_out() -> None:
    """A GPU of an H100's size whose kernels keep the order of weights, on PCIe 4 with 16 lanes; all else is free, or
    not known."""
    assert LEAST.is_gpu
    assert not LEAST.packs_weights
    assert (LEAST.host_bandwidth, LEAST.multiprocessors) == (24e9, 132)
    assert (LEAST.mini_batch_s, LEAST.communicator_bytes, LEAST.threads) == (0.0, 0.0, 1)
    assert (LEAST.inter_node_send_bandwidth, LEAST.train_launch_s) == (None, None)
    assert LEAST.inter_node_shared_bandwidth is None
    assert (LEAST.uncertainty, LEAST.host_memory_bytes, LEAST.host_cores) == (None, None, None)
    assert LEAST.device_names == ()


RATE, DELAY, MEMORY, CORES = (1, 1e24), (0, 1e4), (1, 2**50), (1, 2**20)
LIMITS: dict[str, tuple[float, float]] = {
    "memory_bandwidth": RATE,
    "intra_node_bandwidth": RATE,
    "inter_node_bandwidth": RATE,
    "inter_node_send_bandwidth": RATE,
    "inter_node_shared_bandwidth": RATE,
    "host_bandwidth": RATE,
    "intra_node_latency_s": DELAY,
    "inter_node_latency_s": DELAY,
    "layer_launch_s": DELAY,
    "train_launch_s": DELAY,
    "mini_batch_s": DELAY,
    "decode_launch_s": DELAY,
    "decode_graph_launch_s": DELAY,
    "call_overhead_s": DELAY,
    "sampling_s": DELAY,
    "device_memory_bytes": MEMORY,
    "host_memory_bytes": MEMORY,
    "communicator_bytes": (0, 2**40),
    "devices_per_node": (1, 4096),
    "multiprocessors": CORES,
    "threads": CORES,
    "host_cores": CORES,
}


def test_every_number_of_a_description_has_its_limits() -> None:
    """A PiB of memory, a million cores, a TiB for communicators."""
    numbers = {name for name, kind in Hardware.__annotations__.items() if re.search(r"\b(int|float)\b", str(kind))}
    assert numbers == {*LIMITS, "matmul_flops"}
    for field, (low, high) in LIMITS.items():
        for value in (low, high):
            assert getattr(structs.replace(LEAST, **{field: value}), field) == value
        for value in (low - 1, high * 1.001):
            with pytest.raises(UserError, match=re.escape(f"{field} {value} is not from {low:,.12g} to {high:,.12g}")):
                structs.replace(LEAST, **{field: value})
    for rate in RATE:
        assert structs.replace(LEAST, matmul_flops={"bfloat16": rate}).flops("bfloat16") == rate
    with pytest.raises(UserError, match="matmul_flops 0 is not from 1"):
        structs.replace(LEAST, matmul_flops={"bfloat16": 0})


@pytest.mark.parametrize("name", ["", "-fast", "a/b", "..", "my gpu"])
def test_a_name_that_no_folder_could_have_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"name {name!r} is no name of a folder, where profiles lie")):
        structs.replace(LEAST, name=name)


def test_a_description_needs_a_rate_and_knows_the_constants_that_it_is_unsure_of() -> None:
    with pytest.raises(UserError, match="matmul_flops must give a rate for at least one dtype"):
        structs.replace(LEAST, matmul_flops={})
    sure = Uncertainty(spread={"matmul_flops[float32]": 0.1, "sampling_s": 0.2})
    assert structs.replace(LEAST, uncertainty=sure).uncertainty == sure
    with pytest.raises(UserError, match="uncertainty: spread has 'threads', which is no constant"):
        structs.replace(LEAST, uncertainty=Uncertainty(spread={"sampling_s": 0.2, "threads": 0.1}))


GPU = structs.replace(LEAST, name="gpu", description="a GPU", device_memory_bytes=3 * GIB, device_names=("NVIDIA A1",))
HOST = structs.replace(LEAST, name="host", description="a CPU", shares_host_memory=True)


@pytest.mark.parametrize(
    ("planned", "device", "memory_bytes", "text"),
    [
        (GPU, "NVIDIA A1", 3 * GIB, ""),
        (GPU, "a1", 4 * GIB, ""),
        (GPU, "NVIDIA A1", 3 * GIB - 1, "the plan is for gpu (a GPU) and counts on 3.0 GiB a device, and NVIDIA A1 has "
         "3.0 GiB"),
        (GPU, "NVIDIA A1", GIB / 2, "the plan is for gpu (a GPU) and counts on 3.0 GiB a device, and NVIDIA A1 has "
         "0.5 GiB"),
        (GPU, "NVIDIA A10", 3 * GIB, "the plan is for gpu (a GPU), and the device is NVIDIA A10"),
        (GPU, None, 0, "the plan is for gpu (a GPU), and there is no GPU"),
        (structs.replace(GPU, device_names=()), "NVIDIA A10", 3 * GIB, ""),
        (structs.replace(GPU, device_names=("NVIDIA A2", "NVIDIA A10")), "A10", 3 * GIB, ""),
        (HOST, None, 0, ""),
        (HOST, "NVIDIA A1", 3 * GIB, "the plan is for host (a CPU), and the device is NVIDIA A1"),
    ],
)  # fmt: skip
def test_why_a_device_is_not_the_one_that_was_planned_for(
    planned: Hardware, device: str | None, memory_bytes: int, text: str
) -> None:
    assert mismatch(planned, device, memory_bytes) == text


@pytest.mark.parametrize("name", ["a100-80g", "h100", "h200", "cpu"])
def test_descriptions_are_of_this_world(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.decode_graph_launch_s <= hardware.decode_launch_s
    assert hardware.intra_node_latency_s < hardware.inter_node_latency_s
    peaks = {"a100-80g": (312e12, 2.04e12, 300e9, 25e9), "h100": (989e12, 3.35e12, 450e9, 50e9)}
    peaks["h200"] = (989e12, 4.8e12, 450e9, 50e9)
    if name in peaks:
        reached = (
            hardware.flops("bfloat16"),
            hardware.memory_bandwidth,
            hardware.intra_node_bandwidth,
            hardware.inter_node_bandwidth,
        )
        assert all(rate < peak for rate, peak in zip(reached, peaks[name], strict=True))


def test_an_unknown_dtype() -> None:
    only_half = structs.replace(ROUND, matmul_flops={"bfloat16": 1.0}, uncertainty=None)
    with pytest.raises(UserError, match="no matmul_flops for dtype 'float32'; it has bfloat16"):
        only_half.flops("float32")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("decode_graph_launch_s", -1.0, "is not from 0 to 10,000"),
        ("inter_node_bandwidth", 0.0, "is not from 1 to 1e+24"),
        ("device_memory_bytes", -1, "is not from 1 to"),
    ],
)
def test_impossible_figures_are_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"{field} {value} {message}")):
        structs.replace(ROUND, **{field: value}).__post_init__()
