"""Measures the constants of a hardware description: products, memory, messages, launches."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from realhf.architecture.model import DecoderConfig, DType
from realhf.parallel.groups import ParallelGroups
from realhf.planning.model.measured import MeasuredConstant, Measurement
from realhf.profiling.model_bench import ModelBench, Stopwatch
from realhf.profiling.network_bench import LEAST_PART

# A product and a copy that leave the caches behind.
PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}
MESSAGE_BYTES = (2**10, 2**24)  # for the latency, and for the bandwidth
# Nothing of it takes long but its launches.
SMALL = DecoderConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=2, num_kv_heads=2)
CONTEXT = 16


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
        device: torch.device,
        watch: Stopwatch,
    ):
        self.dtypes, self.groups, self.exchange, self.num_workers = dtypes, groups, exchange, num_workers
        self.device, self.watch = device, watch

    def found(self, measurement: Measurement) -> dict[str, MeasuredConstant]:
        """The constants that a measurement finds, by name; none of links for one worker."""
        match measurement:
            case "products":
                return dict(self._products())
            case "memory":
                return dict(self._memory())
            case "links":
                return dict(self._links()) if self.num_workers > 1 else {}
            case "launches":
                return dict(self._launches())
            case "network":
                raise AssertionError("links between nodes are measured by NetworkBench")

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
        small, large = (self._message_s(size_bytes) for size_bytes in MESSAGE_BYTES)
        yield "intra_node_latency_s", small
        longer_s = max(large.value - small.value, LEAST_PART * large.value)
        rate = (MESSAGE_BYTES[1] - MESSAGE_BYTES[0]) / longer_s
        yield "intra_node_bandwidth", MeasuredConstant(value=rate, spread=large.spread)

    def _message_s(self, size_bytes: int) -> MeasuredConstant:
        buffer = torch.zeros(size_bytes // 4, device=self.device)
        work = None if self.exchange is None else partial(self.exchange, buffer)
        return self._timed(lambda: self.watch.seconds(work, slowest=True) / 2)

    def _launches(self) -> Iterator[tuple[str, MeasuredConstant]]:
        bench = ModelBench(SMALL, "float32", self.groups, self.device, self.watch)
        forward = self._timed(lambda: bench.layer([1])[0])
        yield "layer_launch_s", forward
        # Forward in training is as backward: half of it (`Timings.layer`).
        yield "train_launch_s", self._timed(lambda: sum(bench.layer([1])) / 3)
        yield "decode_launch_s", self._timed(lambda: bench.decode(1, CONTEXT, replays=False))
        if self.device.type == "cuda":
            yield "decode_graph_launch_s", self._timed(lambda: bench.decode(1, CONTEXT))

    def _rate(self, amount: float, work: Callable[[], object]) -> MeasuredConstant:
        taken = self._timed(lambda: self.watch.seconds(work))
        return MeasuredConstant(value=amount / taken.value, spread=taken.spread)

    def _timed(self, seconds: Callable[[], float]) -> MeasuredConstant:
        """Seconds, and the spread of the readings that were taken for them."""
        self.watch.take_spread()
        value = max(seconds(), 1e-9)
        return MeasuredConstant(value=value, spread=self.watch.take_spread())
