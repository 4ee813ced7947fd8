"""Times messages and collectives between nodes, while every device of a node uses the network."""

from collections.abc import Callable
from functools import partial

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

    def __init__(self, num_nodes: int, per_node: int, rank: int, watch: Stopwatch, timeout_s: float):
        self.watch = watch
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
        # There and back are two messages. An all-reduce of two sends all of the data from each to the other, in two
        # hops (`Hardware.all_reduce_s`): both directions are busy.
        sizes_bytes = (SMALL_BYTES, LARGE_BYTES[self.watch.device.type])
        latency, of_message = link(self.watch, self.message, sizes_bytes, turns=2)
        _, of_ring = link(self.watch, self.ring, sizes_bytes)
        return {
            "inter_node_latency_s": latency,
            "inter_node_send_bandwidth": of_message,
            "inter_node_bandwidth": of_ring,
        }


def link(
    watch: Stopwatch, work: Callable[[Tensor], object] | None, sizes_bytes: tuple[int, int], turns: int = 1
) -> tuple[MeasuredConstant, MeasuredConstant]:
    """(seconds of a small message, bytes a second of a large one beyond it), where `work` is `turns` messages."""
    small, large = (watch.constant(partial(watch.buffer_s, work, size_bytes, turns)) for size_bytes in sizes_bytes)
    longer_s = max(large.value - small.value, LEAST_PART * large.value)
    return small, MeasuredConstant(value=(sizes_bytes[1] - sizes_bytes[0]) / longer_s, spread=large.spread)


def there_and_back(pair: ParallelGroups, buffer: Tensor) -> None:
    """Sends a tensor from the first stage of a pipeline of two to the second and back, as stages send messages."""
    peer = pair.stage_rank(1 - pair.stage)
    first, second = (dist.send, dist.recv) if pair.is_first_stage else (dist.recv, dist.send)
    first(buffer, peer, pair.pipeline)
    second(buffer, peer, pair.pipeline)
