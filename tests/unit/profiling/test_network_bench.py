"""Links between nodes: constants, worked out of the times that the cost model says, and who works with whom."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from realhf.base.errors import UserError
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import Hardware
from realhf.profiling.model_bench import Stopwatch
from realhf.profiling.network_bench import NetworkBench
from realhf.profiling.nodes import check_alike
from tests.distributed.pool import run_distributed

H100 = load_hardware("h100")  # whose messages reach less than its collectives


class Timed(Stopwatch):
    """A stopwatch to which works tell what they take."""

    def __init__(self) -> None:
        self.device, self.told_s = torch.device("cpu"), 0.0

    def buffer_s(self, work: Callable[[Tensor], object] | None, size_bytes: int, turns: int = 1) -> float:
        assert work is not None
        work(torch.zeros(size_bytes // 4))
        return self.told_s / turns

    def take_spread(self) -> float:
        return 0.1


class Modelled(NetworkBench):
    """A bench whose works take the times that the cost model says of one device a node; no process is needed."""

    def __init__(self, hardware: Hardware, watch: Timed) -> None:
        self.message, self.ring = self._message, self._ring
        self.hardware, self.watch = hardware, watch

    def _message(self, buffer: Tensor) -> None:
        self.watch.told_s = 2 * self.hardware.send_s(buffer.nbytes, crosses_nodes=True)  # there and back

    def _ring(self, buffer: Tensor) -> None:
        self.watch.told_s = self.hardware.all_reduce_s(buffer.nbytes, 2, crosses_nodes=True)


def test_the_constants_are_those_of_the_cost_model() -> None:
    found = Modelled(H100, Timed()).found()
    assert found["inter_node_bandwidth"].value == pytest.approx(H100.inter_node_bandwidth, rel=1e-6)
    assert found["inter_node_send_bandwidth"].value == pytest.approx(H100.send_bandwidth, rel=1e-6)
    # A kilobyte takes some time too.
    assert found["inter_node_latency_s"].value == pytest.approx(H100.inter_node_latency_s, rel=0.01)
    assert {constant.spread for constant in found.values()} == {0.1}
    assert H100.send_bandwidth < H100.inter_node_bandwidth


def test_noise_makes_no_network_faster_than_four_times_what_was_seen() -> None:
    class Noisy(Timed):
        def buffer_s(self, *_: object) -> float:
            return 1.0

    assert Modelled(H100, Noisy()).found()["inter_node_bandwidth"].value == pytest.approx(4 * (2**24 - 2**10))


def paired(rank: int) -> tuple[list[float], list[float], bool]:
    """What a worker of three nodes with two workers each is given by its partner, and whether it has one."""
    bench = NetworkBench(3, 2, rank, Stopwatch(torch.device("cpu"), 1), 300.0)
    message, summed = torch.full((2,), float(rank)), torch.full((2,), 10.0**rank)
    if bench.message is not None and bench.ring is not None:
        bench.message(message)
        bench.ring(summed)
    found = bench.found()
    assert min(constant.value for constant in found.values()) > 0
    return message.tolist(), summed.tolist(), bench.ring is not None


@pytest.mark.distributed
def test_workers_of_a_number_are_partners_across_nodes() -> None:
    """0 and 1 are the first node, 2 and 3 the second; the third node has none beside it."""
    assert run_distributed(paired, 6) == [
        ([0.0, 0.0], [101.0, 101.0], True),
        ([1.0, 1.0], [1010.0, 1010.0], True),
        ([0.0, 0.0], [101.0, 101.0], True),
        ([1.0, 1.0], [1010.0, 1010.0], True),
        ([4.0, 4.0], [1e4, 1e4], False),
        ([5.0, 5.0], [1e5, 1e5], False),
    ]


def test_nodes_of_several_kinds_are_named() -> None:
    check_alike([("a", "H100"), ("b", "H100")])
    text = "a has H100, and c has A100: a profile is of nodes of one kind; choose them by --gpu-type"
    with pytest.raises(UserError, match=re.escape(text)):
        check_alike([("a", "H100"), ("b", "H100"), ("c", "A100")])
