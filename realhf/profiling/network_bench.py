"""Times messages and collectives between nodes, while every device of a node uses the network."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import GroupTable, ParallelGroups
from realhf.planning.model.measured import MeasuredConstant
from realhf.profiling.model_bench import Stopwatch

SMALL_BYTES = 2**10
LARGE_BYTES = {"cpu": 2**24, "cuda": 2**27}  # a fast network needs more to be busy
LEAST_PART = 0.25  # the bytes have at least this part of a message's time, despite noise


class NetworkBench:
    """Measures the constants of links between nodes; all ranks of all nodes make it and call it together.

    The cost model counts the network by device, with all devices of a node using it (`Hardware.link`). So nodes work in
    pairs, each device with the device of its number on the other node, and all devices at the same time: devices that
    share a network card share its bandwidth here as well.

    Args:
        num_nodes: at least two; with an odd number the last one is idle.
        per_node: workers of each.
    """

    def __init__(
        self, num_nodes: int, per_node: int, rank: int, device: torch.device, watch: Stopwatch, timeout_s: float
    ):
        self.device, self.watch = device, watch
        meshes = [DeviceMesh(first * per_node, 2 * per_node) for first in range(0, num_nodes - 1, 2)]
        stages, replicas = (
            [Layout(mesh, strategy) for mesh in meshes]
            for strategy in (ParallelStrategy(tp=per_node, pp=2), ParallelStrategy(tp=per_node, dp=2))
        )
        table, pair = GroupTable([*stages, *replicas], rank, timeout_s), rank // (2 * per_node)
        self.message: Callable[[Tensor], object] | None = None
        self.ring: Callable[[Tensor], object] | None = None
        if pair < len(meshes):
            self.message = partial(there_and_back, table.groups(stages[pair]))
            self.ring = partial(dist.all_reduce, group=table.groups(replicas[pair]).data)

    def found(self) -> dict[str, MeasuredConstant]:
        """Latency and bandwidth of a message, and the bandwidth of a device in a collective."""
        large_bytes = LARGE_BYTES[self.device.type]
        latency_s, latency_spread = self.timed(self.message, SMALL_BYTES)
        # There and back are two messages. An all-reduce of two sends all of the data from each to the other, in two
        # hops (`Hardware.all_reduce_s`): both directions are busy.
        rates = {}
        for name, work, turns in (
            ("inter_node_send_bandwidth", self.message, 2),
            ("inter_node_bandwidth", self.ring, 1),
        ):
            small_s, _ = self.timed(work, SMALL_BYTES)
            large_s, spread = self.timed(work, large_bytes)
            longer_s = max(large_s - small_s, LEAST_PART * large_s)
            rates[name] = MeasuredConstant(value=turns * (large_bytes - SMALL_BYTES) / longer_s, spread=spread)
        return {"inter_node_latency_s": MeasuredConstant(value=latency_s / 2, spread=latency_spread), **rates}

    def timed(self, work: Callable[[Tensor], object] | None, size_bytes: int) -> tuple[float, float]:
        """(seconds of the slowest rank, spread of the readings) of `work` on a tensor of this size."""
        buffer = torch.zeros(size_bytes // 4, device=self.device)
        self.watch.take_spread()
        taken = self.watch.seconds(None if work is None else partial(work, buffer), slowest=True)
        return max(taken, 1e-9), self.watch.take_spread()


def there_and_back(pair: ParallelGroups, buffer: Tensor) -> None:
    """Sends a tensor from the first stage of a pipeline of two to the second and back, as stages send messages."""
    peer = pair.stage_rank(1 - pair.stage)
    first, second = (dist.send, dist.recv) if pair.is_first_stage else (dist.recv, dist.send)
    first(buffer, peer, pair.pipeline)
    second(buffer, peer, pair.pipeline)
