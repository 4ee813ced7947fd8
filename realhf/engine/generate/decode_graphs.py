"""Decode steps as graphs: of a few numbers of rows, over buffers that stay where they are, from call to call.

A decode step of a few billion parameters is some hundreds of kernels of microseconds each; launching them one by one
takes longer than running them. A CUDA graph is launched at once, but repeats only the recorded kernels on the same
addresses. So rows are padded to a *bucket*, inputs are copied into buffers that belong to it, and the pages of the KV
cache stay allocated as long as the graphs live.

Recording costs about as much as launching the kernels one by one, so it pays from a bucket's third step on. The first
step is launched, and prepares libraries for the recording; the second is recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from realhf.architecture.decoding import GraphLife, graphs_refusal, power_of_two, rows_bucket
from realhf.engine.generate.kv_cache import KVCache, StepAttention
from realhf.engine.generate.paged_attention import DecodeRows, PagedKernels
from realhf.models.decoder import Decoder
from realhf.parallel.vocabulary import Logits

Compute = Callable[[], None]  # on tensors that stay in place


class Capture(Protocol):
    """Records computations, to repeat them on the present values of their tensors."""

    def run(self, compute: Compute) -> None:
        """Computes where it would be recorded: libraries make their handles and workspaces now, which they must not
        while recording."""

    def record(self, compute: Compute, size: int = 0) -> Compute:
        """Returns what repeats `compute`, which has been run before; `size` grows with the memory that it takes."""


def capture_of(decoder: Decoder, graphs: GraphLife) -> Capture | None:
    """The recorder of decode steps for this rank's part of a model; None where they are not recorded."""
    on_gpu = next(decoder.parameters()).is_cuda
    if graphs == "off" or graphs_refusal(decoder.config, on_gpu=on_gpu):
        return None
    return CudaCapture()


class CudaCapture:
    """Records CUDA graphs. Those that live share a pool of memory: a graph may overwrite the values that another has
    left there. A pool ends with its last graph, and the next one gets a new pool.

    `torch.cuda.graph` would empty the caches of the device and of pinned memory for every graph.
    """

    def __init__(self) -> None:
        self._sizes: WeakKeyDictionary[torch.cuda.CUDAGraph, int] = WeakKeyDictionary()

    def run(self, compute: Compute) -> None:
        present, stream = torch.cuda.current_stream(), _recording_stream(torch.cuda.current_device())
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            compute()
        present.wait_stream(stream)

    def record(self, compute: Compute, size: int = 0) -> Compute:
        if size > max(self._sizes.values(), default=-1):
            torch.cuda.empty_cache()  # the pool grows, and while recording no cached memory makes room for it
        pool = next((other.pool() for other in self._sizes), None)
        graph = torch.cuda.CUDAGraph()

        def recorded() -> None:
            # Other threads, such as NCCL's watchdog, may ask the device for something meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                compute()
            finally:
                graph.capture_end()

        self.run(recorded)
        self._sizes[graph] = size
        return graph.replay


@lru_cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """The stream of all recordings on a device: cuBLAS keeps a workspace of up to 32 MiB for every stream, for ever."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class _Step:
    """The buffers of one bucket, and the computation on them.

    x: tokens [rows] int64, or the previous stage's hidden states [rows, hidden]. The other two: see `DecodeRows`.
    """

    x: Tensor
    lengths: Tensor
    table: Tensor

    def fill(self, x: Tensor, lengths: np.ndarray, table: np.ndarray, spare: int) -> None:
        """Takes the rows of a step; those that are padding have one token each, in the spare page."""
        rows, pages = table.shape
        all_lengths = np.zeros(len(self.lengths), dtype=lengths.dtype)
        all_lengths[:rows] = lengths
        all_pages = np.full(self.table.shape, spare, dtype=np.int32)
        all_pages[:rows, :pages] = table
        self.x[:rows].copy_(x)
        self.lengths.copy_(torch.from_numpy(all_lengths))
        self.table.copy_(torch.from_numpy(all_pages))


@dataclass(frozen=True)
class CacheSizes:
    """`pages` of a KV cache, without the spare one of graphs; `max_rows` and `width` are the most sequences of a decode
    step, and the most pages of a sequence."""

    pages: int
    max_rows: int
    width: int


class DecodeGraphs:
    """The decode steps of one batch. A graph is made when its bucket comes up for the second time.

    Padding writes into the last page of the cache. The width of the page table is a bucket too: a power of two.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, max_rows: int, width: int, capture: Capture, timeout_s: float):
        """`max_rows`, `width`: rows and pages of a row at most."""
        self.decoder, self.cache, self.capture, self.timeout_s = decoder, cache, capture, timeout_s
        self.max_rows, self.width = rows_bucket(max_rows), power_of_two(width)
        config, self._like = decoder.config, next(decoder.parameters())
        size = config.vocab_size if decoder.groups.is_last_stage else config.hidden_size
        self._out = self._like.new_empty(self.max_rows, size)
        self._addresses = _addresses(decoder)
        self._steps: dict[tuple[int, int], _Step] = {}
        self._replays: dict[tuple[int, int], Compute] = {}

    def __call__(self, x: Tensor, lengths: np.ndarray, table: np.ndarray) -> Tensor:
        """One step of the model's stage.

        Args:
            x: tokens [rows] int64 on the first stage, else hidden states [rows, hidden].
            lengths: [rows], the tokens in the cache, without the new one.
            table: [rows, pages] int32, the pages of each.

        Returns:
            logits [rows, vocab] on the last stage, complete on every tensor-parallel rank, else hidden states
            [rows, hidden]; the next step overwrites them.
        """
        rows, pages = table.shape
        width = power_of_two(pages) if self.cache.kernels.gathers else self.width
        shape = rows_bucket(rows), width
        if is_first := shape not in self._steps:
            self._steps[shape] = self._buffers(*shape, x)
        step = self._steps[shape]
        step.fill(x, lengths, table, spare=self.cache.pages - 1)
        compute = partial(self._compute, step)
        if is_first:
            self.capture.run(compute)
            return self._out[:rows]
        if shape not in self._replays:
            self._replays[shape] = self.capture.record(compute, shape[0] * shape[1])
        self._replays[shape]()
        groups = self.decoder.groups
        if groups.tensor is not None:  # torch's watchdog knows nothing of collectives in a graph
            groups.waits.watch(
                self.timeout_s,
                lambda: f"generate: rank {groups.rank} waited for the other tensor-parallel ranks in a decode step",
            )
        return self._out[:rows]

    def fits(self, kernels: PagedKernels, sizes: CacheSizes) -> bool:
        """Whether it serves steps of these sizes, on the parameters where they are now."""
        is_large = self.cache.pages > sizes.pages and self.max_rows >= sizes.max_rows and self.width >= sizes.width
        is_same = self.cache.kernels.page == kernels.page and self._addresses == _addresses(self.decoder)
        return is_large and is_same

    def _buffers(self, rows: int, width: int, x: Tensor) -> _Step:
        return _Step(
            self._like.new_zeros(rows, *x.shape[1:], dtype=x.dtype),
            self._like.new_zeros(rows, dtype=self.cache.kernels.lengths_dtype),
            self._like.new_zeros(rows, width, dtype=torch.int32),
        )

    def _compute(self, step: _Step) -> None:
        attend = StepAttention(self.cache, DecodeRows(step.table, step.lengths), None)
        out = self.decoder(step.x, step.lengths, attend)  # the new token's place is the length without it
        self._out[: len(step.lengths)].copy_(out.full() if isinstance(out, Logits) else out)


def _addresses(decoder: Decoder) -> list[int]:
    """Addresses of the parameters: a replayed graph reads the values that lie there."""
    return [parameter.data_ptr() for parameter in decoder.parameters()]


class DecodeWorkspace:
    """The pages and graphs of generation, for each of the batches that are in flight together.

    Where steps are captured they stay from call to call, as long as a call needs no more than is there; else every call
    gets pages of its own.
    """

    def __init__(self, capture: Capture | None, timeout_s: float = 600.0):
        """`timeout_s`: how long a step may wait for tensor-parallel ranks."""
        self.capture, self.timeout_s = capture, timeout_s
        self._kept: dict[int, DecodeGraphs] = {}

    def of_batch(
        self, index: int, decoder: Decoder, kernels: PagedKernels, sizes: CacheSizes
    ) -> tuple[KVCache, DecodeGraphs | None]:
        """Pages of at least `sizes` for batch `index`, and its decode steps as graphs (None: not captured)."""
        config, tp = decoder.config, decoder.groups.layout.strategy.tp
        like = next(decoder.parameters())
        (layers,) = decoder.chunks

        def new_cache(pages: int) -> KVCache:
            return KVCache(layers, pages, config.num_kv_heads // tp, config.head_dim, like, kernels)

        if self.capture is None:
            return new_cache(sizes.pages), None
        kept = self._kept.pop(index, None)
        if kept is not None and kept.fits(kernels, sizes):
            kept.cache.clear()
        else:
            if kept is not None:  # sizes only grow, so that they settle after a few calls
                sizes = CacheSizes(
                    max(sizes.pages, kept.cache.pages - 1),
                    max(sizes.max_rows, kept.max_rows),
                    max(sizes.width, kept.width),
                )
            del kept  # its pages are free before there are new ones
            cache = new_cache(sizes.pages + 1)
            kept = DecodeGraphs(decoder, cache, sizes.max_rows, sizes.width, self.capture, self.timeout_s)
        self._kept[index] = kept
        return kept.cache, kept


class KeptWorkspace:
    """The workspace of the calls so far, where these ask to keep it (`GenerationOptions.decode_graphs`)."""

    def __init__(self, *, is_possible: bool, timeout_s: float):
        """`is_possible`: whether the parameters lie at the same place in every call."""
        self._is_possible, self._timeout_s = is_possible, timeout_s
        self.workspace: DecodeWorkspace | None = None

    def of_call(self, decoder: Decoder, graphs: GraphLife) -> DecodeWorkspace:
        """The workspace for a call whose graphs live so long."""
        if graphs != "kept":
            self.forget()
        if self.workspace is not None:
            return self.workspace
        workspace = DecodeWorkspace(capture_of(decoder, graphs), self._timeout_s)
        if graphs == "kept" and self._is_possible:
            self.workspace = workspace
        return workspace

    def forget(self) -> None:
        """Gives pages and graphs back."""
        self.workspace = None
