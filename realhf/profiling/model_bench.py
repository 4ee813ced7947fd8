"""Times the parts of a model type: embedding, layer, head, one layer of a decode step."""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import Reproducible
from realhf.architecture.decoding import DECODE_GRAPHS
from realhf.architecture.model import DecoderConfig, DType
from realhf.engine import build
from realhf.engine.arena import Arena
from realhf.engine.batch import Batch
from realhf.engine.generate.choice import TokenChoice
from realhf.engine.generate.decode_graphs import capture_of
from realhf.engine.generate.kv_cache import KVCache, StepAttention
from realhf.engine.generate.loop import packed_weights
from realhf.engine.generate.paged_attention import DecodeRows, PagedKernels, paged_kernels
from realhf.engine.generate.running_batch import RunningBatch
from realhf.engine.interface import GenerationRequest
from realhf.engine.packing import pack_micro_batch
from realhf.engine.train.optimizer import gradient_dtype
from realhf.geometry.batching import Limits, Scheduler, pages_for
from realhf.geometry.reproducible import tensor_leaves
from realhf.models.attention import Attention
from realhf.models.ordered_layers import check_kernels, compute_in_order
from realhf.models.rotary import rotary_tables
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.vocabulary import Logits
from realhf.planning.model.measured import MeasuredConstant

WARM_UPS = 2
LAYERS = 4  # in the timed model, unless it is given
# Short work is repeated within one reading of the clock, long work is read fewer times.
SHORTEST_READING_S = 0.002
LONGEST_POINT_S = 2.0
FEWEST_READINGS = 3
# More decode steps than are ever read.
_MOST_STEPS = 10_000

Work = Callable[[], object]


class Stopwatch:
    """Times work that all ranks start together; every rank gets the same result.

    Collective: all ranks of the world make the same calls, with None where a rank has no work. `device`: where they
    work. `clock` tells seconds.
    """

    def __init__(self, device: torch.device, repetitions: int, clock: Callable[[], float] = time.perf_counter):
        self.device, self._repetitions, self._clock = device, repetitions, clock
        self._spreads: list[float] = []

    def take_spread(self) -> float:
        """How much readings of the same work differed since this was last asked for: the mean (of squares) of their
        standard deviations in logarithms; 0 if nothing was read."""
        spreads, self._spreads = self._spreads, []
        return math.sqrt(statistics.fmean(spread**2 for spread in spreads)) if spreads else 0.0

    def seconds(self, work: Work | None, *, slowest: bool = False, before: Work | None = None) -> float:
        """Median seconds of one `work`, the mean over the ranks that work, or their maximum (`slowest`). `before` runs
        before each reading, untimed: what `work` then finds in the caches is what a call leaves there."""
        loops, readings = self._effort(work)
        taken = [self._read(work, 1 if before else loops, before) for _ in range(readings)]
        self._spreads.append(spread_of(taken))
        return self._combine(statistics.median(taken), work, slowest)

    def seconds_and_rest(self, part: Work | None, whole: Work | None, *, slowest: bool = False) -> tuple[float, float]:
        """(seconds of `part`, seconds of `whole` beyond it), means over the ranks that work, or maxima (`slowest`).

        The two are read in turns, and the rest is the median of the differences: other work of the machine comes and
        goes, and disturbs both readings of a turn alike. On a busy machine the rest may still be lost in noise, even
        negative; `measured_curves` measures it again.
        """
        loops, readings = self._effort(whole)
        turns = [(self._read(part, loops), self._read(whole, loops)) for _ in range(readings)]
        self._spreads.append(spread_of([both for _, both in turns]))
        part_s = statistics.median(one for one, _ in turns)
        rest_s = statistics.median(both - one for one, both in turns)
        return self._combine(part_s, part, slowest), self._combine(rest_s, whole, slowest)

    def buffer_s(self, work: Callable[[Tensor], object] | None, size_bytes: int, turns: int = 1) -> float:
        """Seconds of the slowest rank for `work` on float32 numbers of this size, a part of `turns` equal ones."""
        buffer = torch.zeros(size_bytes // 4, device=self.device)
        return self.seconds(None if work is None else partial(work, buffer), slowest=True) / turns

    def constant(self, seconds: Callable[[], float]) -> MeasuredConstant:
        """The `seconds`, and the spread of the readings that were taken for them."""
        self.take_spread()
        value = max(seconds(), 1e-9)
        return MeasuredConstant(value=value, spread=self.take_spread())

    def largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        return self._over_ranks(value, dist.ReduceOp.MAX)

    def _effort(self, work: Work | None) -> tuple[int, int]:
        """(how often to repeat `work` within a reading, how many readings to take), after warming it up."""
        estimate = 0.0
        for _ in range(WARM_UPS):
            estimate = self._read(work, 1)
        estimate = self._over_ranks(estimate, dist.ReduceOp.MAX)
        loops = max(1, min(20, math.ceil(SHORTEST_READING_S / max(estimate, 1e-6))))
        readings = self._repetitions
        if readings * estimate > LONGEST_POINT_S:
            readings = min(readings, max(FEWEST_READINGS, int(LONGEST_POINT_S / estimate)))
        return loops, readings

    def _combine(self, median: float, work: Work | None, slowest: bool = False) -> float:
        if slowest:
            return self._over_ranks(median, dist.ReduceOp.MAX)
        return self._over_ranks(median) / self._over_ranks(float(work is not None))

    def _read(self, work: Work | None, loops: int, before: Work | None = None) -> float:
        self._over_ranks(0.0)  # a barrier
        if work is None:
            return 0.0
        if before is not None:
            before()
            self._wait()
        start = self._clock()
        for _ in range(loops):
            work()
        self._wait()
        return (self._clock() - start) / loops

    def _wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _over_ranks(self, value: float, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, op)
        return total.item()


def spread_of(readings: list[float]) -> float:
    """The standard deviation of the logarithms of readings, estimated from their middle half, so that a disturbed
    reading does not count."""
    logarithms = [math.log(reading) for reading in readings if reading > 0]
    if len(logarithms) < 2:
        return 0.0
    low, _, high = statistics.quantiles(logarithms, method="inclusive")
    return (high - low) / 1.349


class ModelBench:
    """The parts of a model type with `layers` layers, at the tensor parallelism of `groups`.

    Layers are timed one after the other: in a pass, too, each finds the weights and activations of the others in the
    caches, and not its own. Every method measures on all ranks of the layout; a rank outside of it (`groups` is None)
    keeps step.
    """

    def __init__(
        self,
        model: DecoderConfig,
        dtype: DType,
        groups: ParallelGroups | None,
        watch: Stopwatch,
        *,
        layers: int = LAYERS,
        reproducible: Reproducible = "plan",
    ):
        self.model, self.dtype, self.groups, self.watch = model, getattr(torch, dtype), groups, watch
        self.layers = layers
        self.device = device = watch.device
        if groups is None:
            return
        config = replace(model, num_layers=layers)
        if reproducible == "layout":
            check_kernels(config, self.dtype, device)
        arena = build.build_arena(config, groups, self.dtype, device)
        self.decoder = build.decoder_on(config, groups, arena.views())
        if reproducible == "layout":
            compute_in_order(self.decoder)
        arena.flat.normal_(std=0.02)  # zeros would draw less power, hence run faster, on a GPU
        build.attach_gradients(self.decoder, Arena(arena.layout, gradient_dtype(self.dtype, OptimizerConfig()), device))

    def embedding(self, tokens: int) -> tuple[float, float]:
        """(forward, backward) seconds."""
        return self._seconds(lambda: self._embedding(tokens))

    def layer(self, lengths: list[int]) -> tuple[float, float]:
        """(forward, backward) seconds, on packed sequences of the given lengths."""
        forward_s, backward_s = self._seconds(lambda: self._packed(lengths))
        return forward_s / self.layers, backward_s / self.layers

    def head(self, tokens: int) -> tuple[float, float]:
        """(forward, backward) seconds: the final norm, then values, or log-probabilities from the logits."""
        return self._seconds(lambda: self._head(tokens))

    def parts(self, lengths: list[int]) -> tuple[Work, Work]:
        """(inference, training) of one micro-batch of sequences of these lengths: embedding, layers and head, each by
        itself, as they are timed. For ranks of the layout alone."""
        tokens = sum(lengths)
        inferences, trainings = zip(*(self._embedding(tokens), self._packed(lengths), self._head(tokens)), strict=True)
        return partial(_run_all, inferences), partial(_run_all, trainings)

    @torch.inference_mode()
    def decode(self, sequences: int, context: int, *, replays: bool = True) -> float:
        """Seconds of one layer for one token of `sequences` sequences with `context` tokens in their caches; as a
        replayed graph where the device has such, unless `replays` is false."""
        if self.groups is None:
            return self.watch.seconds(None)
        kernels = self._kernels()
        pages = pages_for(context, kernels.page)  # per sequence
        cache = self._cache(sequences * pages)
        table = torch.arange(sequences * pages, dtype=torch.int32, device=self.device).view(sequences, pages)
        lengths = torch.full((sequences,), context, dtype=kernels.lengths_dtype, device=self.device)
        attend = StepAttention(cache, DecodeRows(table, lengths), None, in_order=self.decoder.leaves is not None)
        cos, sin = rotary_tables(lengths, self.model, self.dtype)
        x = self._hidden(sequences)

        def step() -> None:
            self._layers(x, cos, sin, attend)

        capture = capture_of(self.decoder, DECODE_GRAPHS) if replays else None
        with packed_weights(self.decoder):
            if capture is None:
                return self.watch.seconds(step) / self.layers
            capture.run(step)
            return self.watch.seconds(capture.record(step)) / self.layers

    @torch.inference_mode()
    def sampling(self, sequences: int, context: int) -> float:
        """Seconds of the work of a decode step that does not grow with the layers: deciding, inputs, draws, ends."""
        if self.groups is None:
            return self.watch.seconds(None)
        options = GenerationOptions(max_new_tokens=_MOST_STEPS, eos_token=-1)
        batch = Batch(tuple(range(sequences)), {"prompt": [self._tokens(context)] * sequences})
        leaves = 0 if self.decoder.leaves is None else tensor_leaves(self.model)
        choice = TokenChoice(batch, GenerationRequest(options, sample_key=(0, 0)), self.device, leaves)
        page = self._kernels().page
        scheduler = Scheduler(
            [context] * sequences,
            range(sequences),  # as if the prompts were different
            Limits(
                num_pages=sequences * pages_for(context + _MOST_STEPS, page),
                page_size=page,
                max_running=sequences,
                max_prefill_tokens=sequences * context,
                holds_all=True,
            ),
        )
        running = RunningBatch(self.decoder, choice, scheduler, self._cache(1), return_logits=False)
        logits = torch.randn(sequences, self.model.vocab_size, dtype=self.dtype, device=self.device)

        def step() -> None:
            running.admit()
            rotary_tables(running.inputs().positions, self.model, self.dtype)
            running.release(running.accept(running.draw(logits)))

        step()  # the prompts
        return self.watch.seconds(step)

    def _layers(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention) -> Tensor:
        replacement = self.decoder.trains_layer if torch.is_grad_enabled() else self.decoder.infers_layer
        for layer in self.decoder.model.layers.values():
            run = layer if replacement is None else partial(replacement, layer)
            x = run(x, cos, sin, attend)
        return x

    def _cache(self, pages: int) -> KVCache:
        assert self.groups is not None
        kv_heads = self.model.num_kv_heads // self.groups.layout.strategy.tp
        return KVCache(range(self.layers), pages, kv_heads, self.model.head_dim, self._hidden(0))

    def _kernels(self) -> PagedKernels:
        return paged_kernels(self._hidden(0), self.model.head_dim)

    def _seconds(self, passes: Callable[[], tuple[Work, Work]]) -> tuple[float, float]:
        """Seconds of a forward pass in inference, and of a pass with gradients beyond that."""
        return self.watch.seconds_and_rest(*((None, None) if self.groups is None else passes()))

    def _embedding(self, tokens: int) -> tuple[Work, Work]:
        return self._passes(self.decoder.model.embed_tokens, self._tokens(tokens))

    def _packed(self, lengths: list[int]) -> tuple[Work, Work]:
        """The passes of all layers."""
        in_order = self.decoder.leaves is not None
        packed = pack_micro_batch(list(self._tokens(sum(lengths)).split(lengths)), self.device, in_order=in_order)
        # Not timed: a stage makes the tables once for all of its layers.
        cos, sin = rotary_tables(packed.positions, self.model, self.dtype)
        run = partial(self._layers, cos=cos, sin=sin, attend=packed.attend)
        return self._passes(run, self._hidden(len(packed.tokens)))

    def _head(self, tokens: int) -> tuple[Work, Work]:
        labels = self._tokens(tokens)

        def run(x: Tensor) -> Tensor:
            output = self.decoder.output(x)
            return output.of_tokens(labels).logprob if isinstance(output, Logits) else output

        return self._passes(run, self._hidden(tokens))

    def _passes(self, run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Work, Work]:
        """`run` in inference, and with the gradients of x and of the weights."""
        if x.is_floating_point():
            x.requires_grad_(True)

        @torch.no_grad()
        def infer() -> Tensor:
            return run(x)

        def train() -> None:
            x.grad = None
            torch.autograd.backward(run(x), gradient)

        gradient = torch.ones_like(infer())
        return infer, train

    def _tokens(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device) % self.model.vocab_size

    def _hidden(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.model.hidden_size, dtype=self.dtype, device=self.device)


def _run_all(works: Iterable[Work]) -> None:
    for work in works:
        work()
