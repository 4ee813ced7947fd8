"""Constants of a description of hardware by name, and how sure it is of them."""

from typing import Any

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.uncertainty import Uncertainty, place_of

H100 = load_hardware("h100")


def test_what_a_description_does_not_say_of_its_constants() -> None:
    found = Uncertainty(spread={"layer_launch_s": 0.1})
    assert (found.correlation, found.call_error, found.profiled_error) == ((), 0.2, 0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spread": {"a": -0.1}}, "uncertainty: a -0.1 is not from 0 to 10"),
        ({"spread": {"a": 10.5}}, "uncertainty: a 10.5 is not from 0 to 10"),
        ({"call_error": -0.1}, "uncertainty: call_error -0.1 is not from 0 to 10"),
        ({"profiled_error": 11.0}, "uncertainty: profiled_error 11.0 is not from 0 to 10"),
        (
            {"correlation": ((0.1,),)},
            r"uncertainty: correlation has rows of \[1\] numbers; it needs 1 to 2, for 3 constants",
        ),
        ({"correlation": ((0.1,), (0.1, 0.1), (0.1, 0.1, 0.1))}, r"rows of \[1, 2, 3\] numbers; it needs 1 to 2"),
        ({"correlation": ((0.1, 0.2), (0.1,))}, r"rows of \[2, 1\] numbers; it needs 1 to 2"),
    ],
)
def test_uncertainties_that_are_none(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Uncertainty(**({"spread": {"a": 0.1, "b": 0.0, "c": 10.0}} | changes))
    assert Uncertainty(spread={"a": 0.1, "b": 0.0, "c": 10.0}, correlation=((0.1,), (0.1, 0.2))).call_error == 0.2


def test_places_of_constants() -> None:
    assert place_of("matmul_flops[float32]") == ("matmul_flops", "float32")
    assert place_of("sampling_s") == ("sampling_s", "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sampling_s", True),
        ("memory_bandwidth", True),
        ("train_launch_s", True),  # may be left out
        ("inter_node_send_bandwidth", True),
        ("matmul_flops[float32]", True),
        ("matmul_flops[float16]", False),
        ("matmul_flops", False),
        ("sampling_s[float32]", False),
        ("device_memory_bytes", False),
        ("communicator_bytes", False),  # a float, and neither a rate nor a delay
        ("threads", False),
        ("name", False),
        ("devices_per_node", False),
        ("send_bandwidth", False),  # a property
        ("nothing_s", False),
    ],
)
def test_names_of_constants(name: str, expected: bool) -> None:
    hardware = structs.replace(H100, communicator_bytes=5.0)
    assert hardware.has_constant(name) == expected


def test_values_of_constants() -> None:
    """An optional one has that which stands for it, or its own."""
    hardware = structs.replace(
        H100, train_launch_s=None, layer_launch_s=0.5, inter_node_send_bandwidth=None, inter_node_bandwidth=7.0
    )
    assert hardware.constant("train_launch_s") == hardware.constant("layer_launch_s") == 0.5
    assert hardware.constant("inter_node_send_bandwidth") == 7.0
    own = structs.replace(hardware, train_launch_s=0.0, inter_node_send_bandwidth=3.0)
    assert (own.constant("train_launch_s"), own.constant("inter_node_send_bandwidth")) == (0.0, 3.0)
    assert own.constant("matmul_flops[bfloat16]") == H100.matmul_flops["bfloat16"]


def test_a_description_with_other_constants() -> None:
    rates = {"float32": 5.0, "bfloat16": 6.0}
    hardware = structs.replace(H100, matmul_flops=rates)
    changed = hardware.with_constants({"matmul_flops[float32]": 7.0, "memory_bandwidth": 2.0})
    assert changed == structs.replace(H100, matmul_flops={"float32": 7.0, "bfloat16": 6.0}, memory_bandwidth=2.0)
    both = hardware.with_constants({"matmul_flops[float32]": 7.0, "matmul_flops[bfloat16]": 8.0})
    assert both.matmul_flops == {"float32": 7.0, "bfloat16": 8.0}
    assert rates == {"float32": 5.0, "bfloat16": 6.0}
    assert hardware.with_constants({}) == hardware


def test_what_is_assumed_of_a_description_that_says_nothing() -> None:
    """All rates and delays are within a factor of 1.6; those that are 0 or left out stay so."""
    hardware = structs.replace(
        H100, uncertainty=None, train_launch_s=None, inter_node_send_bandwidth=None, mini_batch_s=0.0, sampling_s=0.0,
        matmul_flops={"float32": 5.0, "bfloat16": 6.0}, communicator_bytes=5.0,
    )  # fmt: skip
    names = [
        "matmul_flops[float32]", "matmul_flops[bfloat16]", "memory_bandwidth", "intra_node_bandwidth",
        "intra_node_latency_s", "inter_node_bandwidth", "inter_node_latency_s", "layer_launch_s", "decode_launch_s",
        "decode_graph_launch_s", "call_overhead_s", "host_bandwidth",
    ]  # fmt: skip
    assert hardware.sureness == Uncertainty(spread=dict.fromkeys(names, 0.3))
    stated = Uncertainty(spread={"layer_launch_s": 0.1})
    assert structs.replace(hardware, uncertainty=stated).sureness is stated
