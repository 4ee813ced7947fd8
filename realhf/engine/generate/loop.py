"""Rollouts of a batch: continuous batching over a paged KV cache, on the tensor- and pipeline-parallel ranks."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from realhf.architecture.chunks import PREFILL_TOKENS
from realhf.architecture.decoding import LEAST_SHARE
from realhf.base.errors import UserError
from realhf.engine.batch import Batch, check_positions, check_tokens
from realhf.engine.generate.choice import TokenChoice
from realhf.engine.generate.decode_graphs import CacheSizes, DecodeWorkspace, capture_of
from realhf.engine.generate.decode_layers import decode_layers
from realhf.engine.generate.paged_attention import paged_kernels
from realhf.engine.generate.ring import BatchMessages
from realhf.engine.generate.running_batch import RunningBatch
from realhf.engine.interface import GenerationOutput, GenerationRequest
from realhf.geometry.batching import Limits, Scheduler, pages_for
from realhf.models.decoder import Decoder, SelfAttention
from realhf.models.mlp import GatedMLP
from realhf.parallel.tensor import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class GenerationReport:
    """Counts of a call on this rank: steps through the model, preemptions, bytes of the KV cache."""

    steps: int
    preemptions: int
    cache_bytes: int


def generate(
    decoder: Decoder, batch: Batch, request: GenerationRequest, workspace: DecodeWorkspace | None = None
) -> tuple[GenerationOutput, GenerationReport]:
    """Samples a response for every prompt; all ranks of a data-parallel group call it with the same arguments.

    The random number of a token is that of (seed, step, the sample's id, the token's place in its
    sequence): responses depend on neither the other samples, the order in which they are computed nor the
    layout, up to the rounding of the logits. Samples with the same prompt share its computation and its
    keys and values. The KV cache is allocated once. With pp stages the batch is cut into pp parts, which are in flight
    together to keep all stages busy.

    Args:
        decoder: this rank's part of a model with a language-model head.
        batch: the samples of this data-parallel group.
        request: lengths, sampling and the end of responses.
        workspace: of the calls before, for this decoder; else the pages of the KV cache are freed at the end.

    Returns:
        the rollouts in the order of the batch on the rank with `groups.holds_outputs`, an empty output on the others;
        and the counts of this rank.

    Raises:
        ValueError: a prompt is empty, a forced response or a limit is not from 1 to `max_new_tokens`, or a sample has a
            token or (with its response) a length that the model does not have.
        FloatingPointError: naming the sample, logits that are no distribution.
        UserError: the KV cache's budget does not hold the longest sequence, or the layout has model chunks.
        RunError: another pipeline stage did not answer in time.
    """
    check_request(decoder, batch, request)
    groups, pp = decoder.groups, decoder.groups.layout.strategy.pp
    runs = _even_runs(len(batch), pp)
    workspace = workspace or DecodeWorkspace(capture_of(decoder, request.decode_graphs))
    with torch.inference_mode(), packed_weights(decoder):
        batches = [_running_batch(decoder, batch, request, workspace, runs, place) for place in range(len(runs))]
        hidden_like = next(decoder.parameters()).new_empty(0, decoder.config.hidden_size)
        run_in_turns(batches, [BatchMessages(groups, hidden_like, workspace.timeout_s) for _ in batches])
    report = GenerationReport(
        steps=sum(each.steps for each in batches),
        preemptions=sum(each.scheduler.preemptions for each in batches),
        cache_bytes=sum(each.cache.size_bytes for each in batches),
    )
    if not groups.holds_outputs:
        return GenerationOutput(), report
    # Outside of inference mode, so that training may differentiate through results from these.
    prompts = batch.data[request.prompt_key]
    outputs = [each.output(prompts[run.start : run.stop]) for each, run in zip(batches, runs, strict=True)]
    return concatenated(outputs), report


def run_in_turns(batches: Sequence[RunningBatch], messages: Sequence[BatchMessages]) -> None:
    """Takes the batches to their ends, all of them in flight at once: one a stage keeps all stages busy.

    Every stage takes the batches in one order.
    """
    turns = deque(_steps(batch, each) for batch, each in zip(batches, messages, strict=True))
    while turns:
        steps = turns.popleft()
        if next(steps, "ended") is None:
            turns.append(steps)
    for each in messages:
        each.await_sent()


def _steps(batch: RunningBatch, messages: BatchMessages) -> Iterator[None]:
    """The loop of generation: takes a batch to its end, and yields where it is the other batches' turn."""
    while not batch.is_done:
        step = batch.admit()
        messages.expect_hidden(batch.steps, step.rows)
        if not batch.steps or messages.is_last_stage:
            yield  # until all are admitted, or have reached the last stage
        out = batch.forward(messages.hidden())
        if messages.is_last_stage:
            tokens = batch.draw(out)
            messages.send_tokens(tokens)
        else:
            messages.send_hidden(out)
            yield  # until the batch has gone through the later stages
            tokens = messages.receive_tokens(len(step.drawing))
        is_end = batch.accept(tokens)
        batch.release(is_end)


def concatenated(outputs: Sequence[GenerationOutput]) -> GenerationOutput:
    """The rollouts of several parts of a batch, one part behind the other."""
    names = [field.name for field in fields(GenerationOutput) if field.name != "preemptions"]
    joined: dict[str, Any] = {name: [x for o in outputs for x in getattr(o, name)] for name in names}
    return GenerationOutput(**joined, preemptions=sum(output.preemptions for output in outputs))


def _running_batch(
    decoder: Decoder,
    batch: Batch,
    request: GenerationRequest,
    workspace: DecodeWorkspace,
    runs: Sequence[range],
    place: int,
) -> RunningBatch:
    """The samples `runs[place]`, with pages of their own."""
    weight, pp = next(decoder.parameters()), decoder.groups.layout.strategy.pp
    kernels = paged_kernels(weight, decoder.config.head_dim)
    leaves = 0 if decoder.leaves is None else decoder.leaves.own * decoder.groups.layout.strategy.tp
    choice = TokenChoice(batch.select(runs[place]), request.of_samples(runs[place]), weight.device, leaves)
    page = kernels.page
    largest = pages_for(int(choice.longest().max()), page)
    max_running = min(-(-len(batch) // max(request.micro_batches, pp)), len(runs[place]))
    num_pages = enough = _needed_pages(choice, page, max_running)
    budget_tokens = request.room
    if budget_tokens is not None:
        # A plan knows the prompts of training alone: those of an evaluation may be longer, or pages larger.
        num_pages = min(num_pages, budget_tokens // len(runs) // page)
        if request.options.kv_cache_tokens is None:
            num_pages = max(num_pages, largest)
        if num_pages < largest:
            raise UserError(
                f"kv_cache_tokens={budget_tokens} is room for {num_pages} pages of {page} tokens in each of "
                f"{len(runs)} parts of the batch, and one sequence of {int(choice.longest().max())} tokens "
                f"needs {largest}; set it to at least {largest * page * len(runs)}"
            )
    scheduler = Scheduler(
        choice.prompt_lengths.tolist(),
        choice.first_with_prompt(),
        Limits(
            num_pages=num_pages,
            page_size=page,
            max_running=max_running,
            max_prefill_tokens=PREFILL_TOKENS,
            holds_all=num_pages == enough,
            least_share=0.0 if workspace.capture is None else LEAST_SHARE,
        ),
    )
    sizes = CacheSizes(num_pages, max_rows=max_running, width=largest)
    cache, graphs = workspace.of_batch(place, decoder, kernels, sizes)
    return RunningBatch(decoder, choice, scheduler, cache, return_logits=request.return_logits, graphs=graphs)


def check_request(decoder: Decoder, batch: Batch, request: GenerationRequest) -> None:
    """Raises the errors of `generate` for a batch and a request that do not fit the model."""
    prompts, options, forced, limits = batch.data[request.prompt_key], request.options, request.forced, request.limits
    assert decoder.config.head == "lm", "generation needs a language-model head"
    if len(decoder.chunks) > 1:
        raise UserError(
            f"generate in {decoder.groups.layout.strategy}: tokens go round stages of one chunk; reallocate the "
            "parameters to a layout with chunks=1"
        )
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} of the batch is empty; give every prompt at least one token")
    assert request.is_end is not None or not options.stop_strings, "stop strings need `is_end`"
    assert forced is None or len(forced) == len(prompts), f"{len(forced)} responses for {len(prompts)} prompts"
    assert limits is None or len(limits) == len(prompts), f"{len(limits)} limits for {len(prompts)} prompts"
    for i, limit in enumerate(limits or ()):
        if not 1 <= limit <= options.max_new_tokens:
            raise ValueError(f"limit {i} is {limit}; give it 1 to max_new_tokens={options.max_new_tokens}")
    for i, response in enumerate(forced or ()):
        if not 1 <= len(response) <= options.max_new_tokens:
            raise ValueError(
                f"forced response {i} has {len(response)} tokens; give it 1 to max_new_tokens={options.max_new_tokens}"
            )
    check_tokens(batch, request.prompt_key, decoder.config)
    if forced is not None:
        check_tokens(batch.with_data(forced_response=list(forced)), "forced_response", decoder.config)
        limits = [len(response) for response in forced]
    limits = limits or [options.max_new_tokens] * len(prompts)
    longest = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
    check_positions(batch.ids, longest, f"{request.prompt_key} and its response", decoder.config)


def _even_runs(count: int, parts: int) -> list[range]:
    """`range(count)` in at most `parts` runs, none empty, whose lengths differ by one at most: cuts lie between the
    samples of different prompts where `parts` divides the number of prompts."""
    parts = min(parts, count)
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def _needed_pages(choice: TokenChoice, page: int, max_running: int) -> int:
    """Pages for any `max_running` sequences at their longest. Where all run at once, equal prompts are computed once
    and share their full pages; else one may come when those of its group have ended."""
    needs = [pages_for(length, page) for length in choice.longest().tolist()]
    if max_running < len(needs):
        return sum(sorted(needs, reverse=True)[:max_running])
    shared = [length // page for length in choice.prompt_lengths.tolist()]
    return sum(
        need - (shared[i] if first != i else 0)
        for i, (need, first) in enumerate(zip(needs, choice.first_with_prompt(), strict=True))
    )


@contextmanager
def packed_weights(decoder: Decoder) -> Iterator[None]:
    """Linears have their weights in the kernels' order too, as long as many steps use the same ones.

    Those of one input become one product, and the decode step of a layer one kernel (`decode_layers`). It takes the
    memory of the linears' weights once more, and the time of about one decode step.
    """
    joined = [m.joined for m in decoder.modules() if isinstance(m, SelfAttention | GatedMLP)]
    is_joined = {each for group in joined for each in group.linears}
    alone = [m for m in decoder.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    products = [*joined, *(m for m in alone if m not in is_joined)]
    if decoder.leaves is not None and decoder.groups.tensor is not None:
        products = []  # its layers have no kernel, and pack what they need
    before = decoder.infers_layer
    try:
        if decoder.leaves is not None:
            decoder.leaves.packed.keep()
        for product in products:
            product.pack()
        decoder.infers_layer = decode_layers(decoder)
        yield
    finally:
        decoder.infers_layer = before
        for product in products:
            product.unpack()
        if decoder.leaves is not None:
            decoder.leaves.packed.forget()
