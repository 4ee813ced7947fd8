"""The work of one data-parallel rank in a call, its samples in micro-batches through a placed model, and what it
allocates."""

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property, lru_cache

import msgspec

from realhf.architecture.chunks import GATHERED_ELEMENTS, PREFILL_TOKENS, RING_BYTES, SHORTEST_SHARED
from realhf.architecture.compute import Recomputed
from realhf.architecture.decoding import LEAST_SHARE, PAGE_TOKENS
from realhf.base.kept import kept
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import ParallelStrategy, chunk_layers
from realhf.geometry.pipeline_schedule import training_order
from realhf.planning.model.activations import (
    InFlight,
    activation_elements,
    beyond_kept_bytes,
    kept_bytes,
    repeated_bytes,
)
from realhf.planning.model.gpu_generation import DrawOptions, split_bytes
from realhf.planning.model.gpu_memory import GpuPass
from realhf.planning.model.lengths import DecodePhase
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.osdp.units import StageUnits
from realhf.planning.model.sizes import largest_units, largest_weight
from realhf.planning.model.turns import Turns, Waiting, spread, take_turns
from realhf.planning.model.workload import Workload

# Memory of a worker on a CPU beside its tensors. Measured: 12 MiB that torch and oneDNN take when they first compute,
# and 4 MiB that it shares with the workers of its tensor-parallel group.
WORKER_BYTES = 16 << 20
# Of what malloc gave: between tensors of different sizes that come and go there are holes, of at most an eighth of them
# where a hole's size fits again (`csrc/memory`); measured 4 to 9 %.
HOLES = 1 / 8


class RankWork(msgspec.Struct, frozen=True, kw_only=True, dict=True, eq=False):
    """The work of one rank in a call under one option: as in `CallModel`, but `samples` are of one rank. The plan
    counts on `expected` of them to be computed; 0: on all."""

    call: ModelFunctionCallDef
    samples: int
    lengths: Workload
    placed: PlacedModel
    micro_batches: int
    expected: int = 0
    known: dict[Hashable, float] = msgspec.field(default_factory=dict)

    def once(self, what: Hashable, compute: Callable[[], float]) -> float:
        """`compute()`, which does not depend on how data parallelism divides the model, on where its states lie, nor,
        beyond `what`, on chunks: options that differ in these alone share what is known of a training."""
        if not self.call.trains:
            return compute()
        strategy, features = self.placed.strategy, self.placed.features
        degrees = (strategy.dp, strategy.tp, strategy.pp, self.micro_batches)
        key = (what, degrees, features.recomputed, features.sequence_parallel)
        if key not in self.known:
            self.known[key] = compute()
        return self.known[key]

    @cached_property
    def parts(self) -> int:
        """Micro-batches; of a generation one for every stage at least, none empty."""
        pp = self.placed.strategy.pp
        return min(max(self.micro_batches, pp), self.samples) if self.call.generates else self.micro_batches

    @property
    def parts_in_flight(self) -> int:
        """Parts of a generation that are under way at once; the others wait without a cache."""
        return min(self.parts, self.placed.strategy.pp)

    @cached_property
    def sharing(self) -> int:
        """How many samples of a part have one prompt, which is computed once for them: a group, or what the partition
        over ranks and the cuts between parts leave together of it (`realhf.master.data.partition`)."""
        return math.gcd(self.lengths.samples_per_prompt, self.samples, max(self.samples // self.parts, 1))

    @property
    def prompts(self) -> float:
        """Prompts that a generation computes in one part."""
        return self.samples / self.parts / self.sharing

    @cached_property
    def computed(self) -> int:
        """Samples that are computed: those expected, and at least the samples of one prompt in every part."""
        return min(self.samples, max(self.expected, self.parts * self.sharing)) if self.expected else self.samples

    @property
    def rows(self) -> float:
        """Tokens that an inference or a training computes in one part: on a CPU a prompt once for those of its samples
        that are together."""
        lengths, samples = self.lengths, self.computed / self.parts
        repeated = (1 - 1 / self.sharing) * lengths.prompt_tokens if self._shares(lengths.prompt_tokens) else 0.0
        return samples * (lengths.tokens - repeated)

    @property
    def most_rows(self) -> float:
        """As `rows`, where all lengths are the largest."""
        longest = self.lengths.max_prompt_tokens
        prompt = max(longest / self.sharing, SHORTEST_SHARED - 1) if self._shares(longest) else longest
        return self._most_samples * (prompt + self.lengths.max_new_tokens)

    @property
    def _most_samples(self) -> int:
        """Samples of the largest part."""
        return math.ceil(self.computed / self.parts / self.sharing) * self.sharing

    def _shares(self, prompt_tokens: float) -> bool:
        """Whether an inference or a training computes a prompt of so many tokens once for neighbouring samples."""
        in_host_memory, window = self.placed.features.in_host_memory, self.placed.model.sliding_window
        is_rollout = self.lengths.new_tokens > 0
        return in_host_memory and is_rollout and prompt_tokens >= SHORTEST_SHARED and window is None

    @cached_property
    def room_tokens(self) -> float:
        """Places for keys and values: what the sequences in flight need at their longest, or what the call was given
        for them where that is less, in whole pages of each part."""
        given, parts = self.lengths.kv_cache_tokens, self.parts_in_flight
        if given is None:
            return self.needed_tokens
        return min(self.needed_tokens, parts * max(given // parts // PAGE_TOKENS, 1) * PAGE_TOKENS)

    @property
    def waits(self) -> bool:
        """Whether there is no room for all sequences in flight at their longest."""
        return self.room_tokens < self.needed_tokens

    @cached_property
    def turns(self) -> Turns | None:
        """The turns that the sequences of a part take; None where there is room for all in flight."""
        if not self.waits:
            return None
        lengths, parts, dp = self.lengths, self.parts_in_flight, self.placed.strategy.dp
        replays = self.placed.features.replays(self.placed.model, lengths.decode_graphs)
        return take_turns(
            Waiting(
                room=round(self.room_tokens / parts),
                sequences=math.ceil(self.samples / parts),
                running=math.ceil(self.samples / self.parts),
                sharing=self.sharing,
                prompt_tokens=round(lengths.prompt_tokens),
                responses=lengths.responses or spread(lengths.new_tokens, lengths.max_new_tokens),
                longest=round(lengths.longest_response(self.samples * dp)),
                least_share=LEAST_SHARE if replays else 0.0,
            )
        )

    @property
    def preemptions(self) -> float:
        """Expected number in a generation, of all parts."""
        return self.parts_in_flight * self.turns.preemptions if self.turns else 0.0

    @cached_property
    def decode_phases(self) -> tuple[DecodePhase, ...]:
        """The decode steps of a generation, each of all its micro-batches; those that are simulated where sequences
        wait for room.

        Without a distribution there are steps up to the limit, in which as many sequences run as the mean response
        says. With one, sequences that wait for the stages of a pipeline take the places of those that end, so that the
        batch stays full; the last of them shrink to the longest response of all ranks, which the call waits for.
        """
        responses, rounds = self.lengths.responses, self.parts / self.parts_in_flight
        if self.turns:
            return tuple(replace(each, steps=each.steps / rounds) for each in self.turns.phases)
        if responses is None:
            limit = self.lengths.max_new_tokens
            share = (self.lengths.new_tokens - 1) / (limit - 1) if limit > 1 else 1.0
            return (DecodePhase(max(limit - 1, 0), share, limit / 2),)
        at_once = self.samples / rounds * self.placed.strategy.dp
        phases = [replace(each, steps=each.steps / rounds) for each in responses.decode_phases(at_once)]
        if rounds > 1 and responses.mean > 1:
            middle = (responses.mean_square - responses.mean) / (2 * (responses.mean - 1))
            phases.insert(0, DecodePhase((rounds - 1) / rounds * (responses.mean - 1), 1.0, middle))
        return tuple(phases)

    @cached_property
    def needed_tokens(self) -> float:
        """Places for keys and values, in whole pages, of all sequences in flight at their longest.

        Samples of a prompt share its full pages where no part waits for another one to end. What lies behind those
        pages is largest where the prompt ends a place before the end of a page.
        """
        lengths, page = self.lengths, PAGE_TOKENS
        per_part = math.ceil(self.samples / self.parts)
        sharing = self.sharing if self.parts == self.parts_in_flight else 1
        prompts = {lengths.max_prompt_tokens}
        if lengths.prompt_tokens != lengths.max_prompt_tokens:
            prompts.add(max((lengths.max_prompt_tokens + 1) // page * page - 1, 1))

        def of_group(prompt: int) -> int:
            shared = prompt // page
            return shared + sharing * (math.ceil((prompt + lengths.max_new_tokens) / page) - shared)

        return self.parts_in_flight * per_part / sharing * max(map(of_group, prompts)) * page

    @kept
    def dynamic_bytes(self) -> float:
        """The most that the call allocates on a device while it runs, without a reallocated copy of its parameters, and
        without what an inference or a generation gathers (`gathered_bytes`); lengths are the maxima.

        - Training: activations of the layers in flight on a stage (`layers_in_flight`), what the backward pass has
          beyond them, the product for the largest weight's gradient, three fp32 arrays of logits on the last stage
          (logits, probabilities, gradient), and what it gathers.
        - Inference: one layer's activations and two arrays of logits.
        - Generation: the KV cache of the parts in flight in whole pages, those of a prompt once for its samples, or the
          room that the call was given for it where that is less; prefill's activations of one layer, what a decode step
          takes (`_step_bytes`), and on a CPU the linears' weights once more.
        - Columns with many numbers for a response token (`Workload.wide_bytes`), of all mini-batches and, where the
          call makes them or reads them packed, of a micro-batch once more.

        In host memory also HOLES, WORKER_BYTES and, with several stages, the RING_BYTES of their messages. A call that
        does not use its model: nothing.
        """
        if not self.call.uses_model:
            return 0.0
        allocated = self._generation_bytes() if self.call.generates else self._passes_bytes()
        if self.lengths.wide_bytes:
            columns = self.call.mini_batches + 1 / self.micro_batches
            allocated += columns * self.samples * self.lengths.max_new_tokens * self.lengths.wide_bytes
        if not self.placed.features.in_host_memory:
            return allocated
        return WORKER_BYTES + (RING_BYTES if self.placed.strategy.pp > 1 else 0) + allocated * (1 + HOLES)

    def kept_cache_bytes(self) -> float:
        """The part of `dynamic_bytes` that outlives the call at its home: the KV cache, where its graphs are kept."""
        placed, generates = self.placed, self.call.uses_model and self.call.generates
        if not generates or not placed.features.keeps_cache(placed.model, self.lengths.decode_graphs):
            return 0.0
        return self._cache_bytes()

    def gathered_bytes(self) -> int:
        """Parameters that the call gathers at a fully sharded home: a generation all of the device's stage, any other
        one unit at a time or, with prefetch, two that follow one another; for training also gradients of one unit, once
        as the backward pass gives them and once as a vector to reduce."""
        placed = self.placed
        if not placed.is_divided:
            return 0
        if placed.stages:
            return max(map(self._gathered_on, placed.stages))
        if self.call.generates:
            return placed.parameter_bytes()
        first, second = largest_units(placed.model, placed.strategy.tp)
        # The head and an embedding that is tied to it are needed together.
        units = first + second if placed.features.prefetch or placed.model.tied_embeddings else first
        return units * placed.item + self._reduced_bytes(first)

    def _gathered_on(self, stage: StageUnits) -> int:
        """On a device of one stage, where operators have modes of their own."""
        if self.call.generates:
            return stage.sharded * self.placed.item
        one, two = stage.in_use
        return (two if self.placed.features.prefetch else one) * self.placed.item + self._reduced_bytes(one)

    def _reduced_bytes(self, elements: int) -> int:
        return 2 * elements * self.placed.features.gradient_bytes(self.placed.dtype) if self.call.trains else 0

    def _generation_bytes(self) -> float:
        placed, per_part = self.placed, math.ceil(self.samples / self.parts)
        activations = activation_elements(placed.model, placed.strategy.tp) * placed.item
        longest = self.lengths.max_prompt_tokens
        prefill = min(per_part / self.sharing * longest, max(PREFILL_TOKENS, longest))
        if self.waits:  # sequences that were preempted are computed again with their responses, in the room there is
            room = self.room_tokens / self.parts_in_flight
            prefill = min(room, max(PREFILL_TOKENS, self.lengths.max_tokens))
            per_part = min(per_part, int(room) // PAGE_TOKENS)
        return self._cache_bytes() + prefill * activations + self._step_bytes(per_part) + placed.packed_bytes()

    def _step_bytes(self, rows: int) -> float:
        """A decode step beside activations: two arrays of logits; on a GPU all that a draw makes of them, and
        attention's sums, which a graph keeps."""
        placed, lengths = self.placed, self.lengths
        model, features = placed.model, placed.features
        if not features.on_gpus or not features.full_logits:
            return 2 * self._logits_bytes(rows)
        drawing = DrawOptions.of(self.call.interface_impl).drawing_bytes(rows, model.vocab_size, placed.dtype)
        longest, is_graph = lengths.max_tokens, features.replays(model, lengths.decode_graphs)
        return drawing + split_bytes(model, placed.dtype, placed.strategy.tp, rows, longest, is_graph=is_graph)

    def _cache_bytes(self) -> float:
        """The KV cache of the sequences in flight, and for each part the page that padding of graphs is written to."""
        placed = self.placed
        replays = placed.features.replays(placed.model, self.lengths.decode_graphs)
        spare = self.parts_in_flight * PAGE_TOKENS if replays else 0
        return placed.cache_bytes(self.room_tokens + spare)

    def _passes_bytes(self) -> float:
        """An inference, or the passes of a training with what they gather, or its optimizer's step."""
        passes = self.once(("bytes", self.placed.strategy.chunks), self._pass_bytes)
        if self.call.trains and self.placed.features.ordered:
            passes = self._with_parts_bytes(passes)
        return max(passes + self.gathered_bytes(), self.placed.chunk_bytes()) if self.call.trains else passes

    def _with_parts_bytes(self, passes: float) -> float:
        """Passes whose micro-batches are parts with gradients of their own (`realhf.engine.train.ordered`).

        While one is computed, those before it wait as the sums of a binary tree; then its own is copied, when only the
        other micro-batches in flight keep activations. At the end ranks gather chunks, and add them up.
        """
        placed, strategy = self.placed, self.placed.strategy
        elements, gradient = placed.gradient_elements(), placed.features.gradient_bytes(placed.dtype)
        waiting = (self.micro_batches - 1).bit_length() * elements * gradient
        in_flight = min(self.micro_batches, strategy.pp)
        copied = passes * (1 - 1 / in_flight) + waiting + elements * gradient
        gathered = 2 * strategy.dp * min(elements, GATHERED_ELEMENTS) * gradient if strategy.dp > 1 else 0
        return max(passes + waiting, copied, gathered)

    def _pass_bytes(self) -> float:
        """An inference, or a forward and a backward pass."""
        placed, model, strategy = self.placed, self.placed.model, self.placed.strategy
        tokens, whole_tokens = self.most_rows, self._most_samples * self.lengths.max_tokens
        logits = self._logits_bytes(whole_tokens)
        if not self.call.trains and placed.features.on_gpus:
            return max(map(self._gpu_inference_bytes, {0, strategy.pp - 1}))
        if not self.call.trains:
            return tokens * (activation_elements(model, strategy.tp) * placed.item) + 2 * logits

        features, item_and_tp = placed.features, (placed.dtype, strategy.tp)
        if features.on_gpus:
            return max(map(self._gpu_training_bytes, {0, strategy.pp - 1}))
        gradient = largest_weight(model, strategy.tp) * placed.item

        def stage_bytes(stage: int) -> float:
            pipeline = (strategy.pp, strategy.chunks, stage)
            in_flight = layers_in_flight(model.num_layers, *pipeline, self.micro_batches, features.recomputed)
            kept = max(kept_bytes(model, *item_and_tp, layers, features) for layers in in_flight)
            sizes = map(len, chunk_layers(model.num_layers, strategy, stage))
            whole = min(size - features.recomputed.count(size) for size in sizes)
            beyond = tokens * beyond_kept_bytes(model, *item_and_tp, whole, features)
            kept_again = max(repeated_bytes(model, *item_and_tp, layers, features) for layers in in_flight)
            beyond += (whole_tokens - tokens) * kept_again
            return tokens * kept + (beyond + gradient) + (3 * logits if stage == strategy.pp - 1 else 0)

        # The first stage has the most layers and micro-batches in flight, the last one the logits.
        return max(stage_bytes(0), stage_bytes(strategy.pp - 1))

    def _gpu_training_bytes(self, stage: int) -> float:
        """A forward and a backward pass on a stage of GPUs."""
        placed, strategy, features = self.placed, self.placed.strategy, self.placed.features
        layers = layers_in_flight(
            placed.model.num_layers, strategy.pp, strategy.chunks, stage, self.micro_batches, features.recomputed
        )
        sizes = [len(chunk) for chunk in chunk_layers(placed.model.num_layers, strategy, stage)]
        sent = self._sent(1 if strategy.chunks == 1 else 2)  # with several chunks also the ends send both ways
        ends = {"is_first": stage == 0, "is_last": stage == strategy.pp - 1}
        return self._gpu_pass().training_bytes(layers, sizes, **ends, sent=sent)

    def _gpu_inference_bytes(self, stage: int) -> float:
        """A forward pass on a stage of GPUs; the last one sends only where another chunk follows."""
        strategy, is_last = self.placed.strategy, stage == self.placed.strategy.pp - 1
        sent = 0 if is_last and strategy.chunks == 1 else self._sent(1)
        messages = sent + 2 if strategy.pp > 1 else 0  # and two that have come, or are about to
        return self._gpu_pass().inference_bytes(is_last=is_last, messages=messages)

    def _sent(self, ways: int) -> int:
        """Messages that an end of the pipeline holds at most until they have come (`realhf.engine.pipeline`)."""
        pp, chunks = self.placed.strategy.pp, self.placed.strategy.chunks
        return 0 if pp == 1 else min(self.micro_batches * chunks * ways, 2 * pp)

    def _gpu_pass(self) -> GpuPass:
        """The passes of one micro-batch; tensor-parallel ranks that divide its tokens pad them."""
        placed, lengths, samples = self.placed, self.lengths, self._most_samples
        answers = placed.features.response_logits and lengths.max_new_tokens
        return GpuPass(
            placed.model,
            placed.dtype,
            placed.strategy.tp,
            placed.features,
            tokens=math.ceil(self.most_rows / placed.strategy.tp) * placed.strategy.tp,
            sequences=samples * lengths.sequences,
            rows=samples * (lengths.max_new_tokens if answers else lengths.max_tokens),
            micro_batches=self.micro_batches,
        )

    def _logits_bytes(self, tokens: float) -> float:
        """One array of the logits of `tokens` tokens that exist at once, fp32 at least: of the whole vocabulary, or 1 /
        tp of it. A value is one number."""
        placed, features = self.placed, self.placed.features
        item = max(placed.item, 4)
        if placed.model.head == "scalar":
            return tokens * item
        size_bytes = tokens * (placed.model.vocab_size / (1 if features.full_logits else placed.strategy.tp) * item)
        chunk = None if features.full_logits else features.logits_chunk_bytes
        return size_bytes if chunk is None else min(size_bytes, chunk)


@lru_cache(maxsize=4096)
def layers_in_flight(
    num_layers: int, pp: int, chunks: int, stage: int, micro_batches: int, recomputed: Recomputed
) -> tuple[InFlight, ...]:
    """The most layers that wait on a stage for their backward pass: no moment has more of one kind and no less of the
    other than each of these.

    (Interleaved) 1F1B: without chunks those of pp - stage micro-batches, at most of all (Narayanan et al., 2021,
    section 2.2); with chunks those of pp micro-batches on the first stage too, but more on the others.
    """
    sizes = [len(chunk) for chunk in chunk_layers(num_layers, ParallelStrategy(pp=pp, chunks=chunks), stage)]
    again = [recomputed.count(size) for size in sizes]
    moments, whole, computed_again = set[InFlight](), 0, 0
    # The third pp micro-batches find as many in flight as the second.
    for run in training_order(pp, stage, chunks, min(micro_batches, 2 * pp)):
        sign = 1 if run.is_forward else -1
        whole += sign * (sizes[run.chunk] - again[run.chunk])
        computed_again += sign * again[run.chunk]
        moments.add(InFlight(whole, computed_again))
    most, found = -1, []
    for moment in sorted(moments, reverse=True):
        if moment.recomputed > most:
            most = moment.recomputed
            found.append(moment)
    return tuple(found)
