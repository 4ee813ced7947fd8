"""Measures the constants of a hardware description: products, memory, messages, launches, a communicator."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.architecture.model import DecoderConfig, DType
from realhf.parallel.groups import ParallelGroups, group_of_all_ranks
from realhf.planning.model.measured import MeasuredConstant, Measurement
from realhf.profiling.model_bench import ModelBench, Stopwatch
from realhf.profiling.network_bench import link

# A product and a copy that leave the caches behind.
PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}
MESSAGE_BYTES = (2**10, 2**24)  # for the latency, and for the bandwidth
# Nothing of it takes long but its launches.
SMALL = DecoderConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=2, num_kv_heads=2)
CONTEXT = 16
# NCCL takes other algorithms for small than for large tensors, and buffers for each.
COMMUNICATOR_BYTES = (2**10, 2**24)


class ConstantsBench:
    """Measures constants on all ranks at the same time, as a run loads the machine; all ranks make the same calls.

    Args:
        groups: process groups of a layout with data parallelism alone, over all ranks.
        exchange: sends a tensor to a neighbour and back; None where this rank has none.
        num_workers: of the world.
    """

    def __init__(
        self,
        dtypes: tuple[DType, ...],
        groups: ParallelGroups,
        exchange: Callable[[Tensor], object] | None,
        num_workers: int,
        watch: Stopwatch,
    ):
        self.dtypes, self.groups, self.exchange, self.num_workers = dtypes, groups, exchange, num_workers
        self.device, self.watch = watch.device, watch

    def found(self, measurement: Measurement) -> dict[str, MeasuredConstant]:
        """The constants that a measurement on one node finds, by name; none of links for one worker."""
        works = {
            "products": self._products, "memory": self._memory, "links": self._links, "launches": self._launches,
        }  # fmt: skip
        return dict(works[measurement]())

    def _products(self) -> Iterator[tuple[str, MeasuredConstant]]:
        size = PRODUCT_SIZE[self.device.type]
        for dtype in self.dtypes:
            a, b = (torch.randn(size, size, device=self.device).to(getattr(torch, dtype)) for _ in range(2))
            out = torch.empty_like(a)
            yield f"matmul_flops[{dtype}]", self._rate(2 * size**3, partial(torch.mm, a, b, out=out))

    def _memory(self) -> Iterator[tuple[str, MeasuredConstant]]:
        count = COPY_BYTES[self.device.type]
        source = torch.ones(count, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        # A copy reads and writes every byte.
        yield "memory_bandwidth", self._rate(2 * count, partial(target.copy_, source))
        if self.device.type == "cuda":
            host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
            yield "host_bandwidth", self._rate(count, partial(target.copy_, host, non_blocking=True))

    def _links(self) -> Iterator[tuple[str, MeasuredConstant]]:
        if self.num_workers > 1:
            latency, bandwidth = link(self.watch, self.exchange, MESSAGE_BYTES, turns=2)
            yield "intra_node_latency_s", latency
            yield "intra_node_bandwidth", bandwidth

    def _launches(self) -> Iterator[tuple[str, MeasuredConstant]]:
        bench = ModelBench(SMALL, "float32", self.groups, self.watch)
        forward = self.watch.constant(lambda: bench.layer([1])[0])
        yield "layer_launch_s", forward
        # Forward in training is as backward: half of it (`Timings.layer`).
        yield "train_launch_s", self.watch.constant(lambda: sum(bench.layer([1])) / 3)
        yield "decode_launch_s", self.watch.constant(lambda: bench.decode(1, CONTEXT, replays=False))
        if self.device.type == "cuda":
            yield "decode_graph_launch_s", self.watch.constant(lambda: bench.decode(1, CONTEXT))

    def _rate(self, amount: float, work: Callable[[], object]) -> MeasuredConstant:
        taken = self.watch.constant(lambda: self.watch.seconds(work))
        return MeasuredConstant(value=amount / taken.value, spread=taken.spread)


def communicator_bytes(device: torch.device, timeout_s: float) -> int | None:
    """The most bytes that a communicator of all ranks takes on one of their devices; None with one rank, and on a CPU.
    All ranks call it together. Nothing else may use the devices meanwhile, because it compares their free memory.
    """
    if device.type != "cuda" or dist.get_world_size() == 1:
        return None
    tensors = [torch.zeros(size_bytes // 4, device=device) for size_bytes in COMMUNICATOR_BYTES]
    taken = torch.zeros(1, dtype=torch.int64, device=device)
    before = _free_bytes(device)
    group = group_of_all_ranks(device, timeout_s)
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    taken.fill_(max(before - _free_bytes(device), 0))
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    return int(taken)


def _free_bytes(device: torch.device) -> int:
    """Free memory of the device, by CUDA: torch does not know NCCL's allocations."""
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]
