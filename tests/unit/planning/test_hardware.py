"""Messages and collectives against numbers worked out by hand."""

import re

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.planning.model.descriptions import load_hardware

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
