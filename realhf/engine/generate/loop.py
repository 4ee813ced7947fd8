"""Rollouts of a batch: continuous batching over a paged KV cache, on the tensor- and pipeline-parallel ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from realhf.api.generation import GenerationOptions
from realhf.base.errors import UserError
from realhf.engine.batch import Batch, check_positions, check_tokens
from realhf.engine.generate.batching import Scheduler, pages_for
from realhf.engine.generate.choice import TokenChoice
from realhf.engine.generate.decode_graphs import DecodeWorkspace, capture_of
from realhf.engine.generate.decode_layers import decode_layers
from realhf.engine.generate.lane import Lane
from realhf.engine.generate.paged_attention import paged_kernels
from realhf.engine.generate.ring import Ring
from realhf.engine.interface import EndCheck, GenerationOutput
from realhf.models.decoder import Decoder, SelfAttention
from realhf.models.mlp import GatedMLP
from realhf.parallel.tensor import ColumnParallelLinear, RowParallelLinear

# Prompts are computed in steps of about so many tokens: enough for full speed, and activations stay small.
MAX_PREFILL_TOKENS = 4096


@dataclass(frozen=True)
class GenerationReport:
    """What happened in a call on this rank: steps through the model, preemptions, bytes of the KV cache."""

    steps: int
    preemptions: int
    cache_bytes: int


def generate(
    decoder: Decoder,
    batch: Batch,
    prompt_key: str,
    options: GenerationOptions,
    *,
    sample_key: tuple[int, int],
    micro_batches: int,
    forced: Sequence[Tensor] | None = None,
    limits: Sequence[int] | None = None,
    return_logits: bool = False,
    is_end: EndCheck | None = None,
    workspace: DecodeWorkspace | None = None,
    timeout_s: float = 600.0,
) -> GenerationOutput:
    """Samples a response for every prompt; all ranks of a data-parallel group call it with the same arguments.

    The random number of a token is that of (seed, step, the sample's id, the token's place in its
    sequence): responses depend on neither the other samples, the order in which they are computed nor the
    layout, up to the rounding of the logits. Samples with the same prompt share its computation and its
    keys and values. The KV cache is allocated once.

    Args:
        decoder: this rank's part of a model with a language-model head.
        batch: the samples of this data-parallel group; `batch.data[prompt_key][i]` is a prompt [length] int64.
        prompt_key: see `batch`.
        options: how tokens are drawn.
        sample_key: (seed, step).
        micro_batches: at most 1 / micro_batches of the samples are computed together (pp such parts are in flight at
            once to keep all stages busy); the others wait and take the places of those that end.
        forced: responses to replay, in the order of the batch: they take the place of the draws, their
            log-probabilities are computed.
        limits: the longest response of each sample, where it is below `max_new_tokens`.
        return_logits: also give back the logits of every drawn token.
        is_end: finds `options.stop_strings` in a response (`realhf.algorithms.rollout.stop_strings`).
        workspace: of the calls before, for this decoder; else the pages of the KV cache are freed at the end.
        timeout_s: how long to wait for a pipeline stage.

    Returns:
        the rollouts in the order of the batch on the rank with `groups.holds_outputs`, an empty
        output on the others.

    Raises:
        ValueError: a prompt is empty, a forced response or a limit is not from 1 to `max_new_tokens`, or a sample has a
            token or (with its response) a length that the model does not have.
        FloatingPointError: naming the sample, logits that are no distribution.
        UserError: the KV cache's budget does not hold the longest sequence, or the layout has model chunks.
        RunError: another pipeline stage did not answer in time.
    """
    return generate_and_report(
        decoder, batch, prompt_key, options, sample_key=sample_key, micro_batches=micro_batches, forced=forced,
        limits=limits, return_logits=return_logits, is_end=is_end, workspace=workspace, timeout_s=timeout_s,
    )[0]  # fmt: skip


def generate_and_report(
    decoder: Decoder,
    batch: Batch,
    prompt_key: str,
    options: GenerationOptions,
    *,
    sample_key: tuple[int, int],
    micro_batches: int,
    forced: Sequence[Tensor] | None = None,
    limits: Sequence[int] | None = None,
    return_logits: bool = False,
    is_end: EndCheck | None = None,
    workspace: DecodeWorkspace | None = None,
    timeout_s: float = 600.0,
) -> tuple[GenerationOutput, GenerationReport]:
    """See `generate`."""
    prompts = batch.data[prompt_key]
    _check(decoder, batch, prompt_key, options, forced, limits)
    assert is_end is not None or not options.stop_strings, "stop strings need `is_end`: the engine knows no text"
    groups, pp = decoder.groups, decoder.groups.layout.strategy.pp
    weight = next(decoder.parameters())  # for its dtype and device
    runs = _even_runs(len(batch), pp)
    workspace = workspace or DecodeWorkspace(capture_of(decoder, options), timeout_s)
    with torch.inference_mode(), packed_weights(decoder):
        lanes = [
            _lane(
                decoder,
                TokenChoice(
                    prompts[run.start : run.stop],
                    options,
                    sample_key,
                    batch.ids[run.start : run.stop],
                    None if forced is None else forced[run.start : run.stop],
                    None if limits is None else limits[run.start : run.stop],
                    weight.device,
                    is_end,
                ),
                max_running=-(-len(batch) // max(micro_batches, pp)),
                budget_tokens=options.kv_cache_tokens,
                workspace=workspace,
                place=place,
                num_lanes=len(runs),
                return_logits=return_logits,
            )
            for place, run in enumerate(runs)
        ]
        Ring(groups, lanes, weight.new_empty(0, decoder.config.hidden_size), timeout_s).run()
    report = GenerationReport(
        steps=sum(lane.steps for lane in lanes),
        preemptions=sum(lane.scheduler.preemptions for lane in lanes),
        cache_bytes=sum(lane.cache.size_bytes for lane in lanes),
    )
    if not groups.holds_outputs:
        return GenerationOutput(), report
    # Outside of inference mode, so that training may differentiate through what it computes from these.
    outputs = [lane.output(prompts[run.start : run.stop]) for lane, run in zip(lanes, runs, strict=True)]
    names = [field.name for field in fields(GenerationOutput)]
    return GenerationOutput(**{name: [x for o in outputs for x in getattr(o, name)] for name in names}), report


def _lane(
    decoder: Decoder,
    choice: TokenChoice,
    *,
    max_running: int,
    budget_tokens: int | None,
    workspace: DecodeWorkspace,
    place: int,
    num_lanes: int,
    return_logits: bool,
) -> Lane:
    """The part of the batch at `place` of `num_lanes`, with its own pages."""
    kernels = paged_kernels(next(decoder.parameters()), decoder.config.head_dim)
    page = kernels.page
    needs = sorted((pages_for(length, page) for length in choice.longest().tolist()), reverse=True)
    max_running = min(max_running, len(needs))
    num_pages = enough = sum(needs[:max_running])
    if budget_tokens is not None:
        num_pages = min(num_pages, budget_tokens // num_lanes // page)
        if num_pages < needs[0]:
            raise UserError(
                f"kv_cache_tokens={budget_tokens} is room for {num_pages} pages of {page} tokens in each of "
                f"{num_lanes} parts of the batch, and one sequence of {int(choice.longest().max())} tokens "
                f"needs {needs[0]}; set it to at least {needs[0] * page * num_lanes}"
            )
    scheduler = Scheduler(
        choice.prompt_lengths.tolist(),
        choice.twins(),
        num_pages=num_pages,
        page_size=page,
        max_running=max_running,
        max_prefill_tokens=MAX_PREFILL_TOKENS,
        holds_all=num_pages == enough,
    )
    (layers,) = decoder.chunks
    cache, graphs = workspace.lane(place, decoder, kernels, layers, num_pages, max_rows=max_running, width=needs[0])
    return Lane(decoder, choice, scheduler, cache, return_logits=return_logits, graphs=graphs)


def _check(
    decoder: Decoder,
    batch: Batch,
    prompt_key: str,
    options: GenerationOptions,
    forced: Sequence[Tensor] | None,
    limits: Sequence[int] | None,
) -> None:
    prompts = batch.data[prompt_key]
    assert decoder.config.head == "lm", "generation needs a language-model head"
    if len(decoder.chunks) > 1:
        raise UserError(
            f"generate in {decoder.groups.layout.strategy}: tokens go round stages of one chunk; reallocate the "
            "parameters to a layout with chunks=1"
        )
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} of the batch is empty; give every prompt at least one token")
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
    check_tokens(batch, prompt_key, decoder.config)
    if forced is not None:
        check_tokens(batch.with_data(forced_response=list(forced)), "forced_response", decoder.config)
        limits = [len(response) for response in forced]
    limits = limits or [options.max_new_tokens] * len(prompts)
    longest = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
    check_positions(batch.ids, longest, f"{prompt_key} and its response", decoder.config)


def _even_runs(count: int, parts: int) -> list[range]:
    """`range(count)` in at most `parts` runs, none empty, whose lengths differ by one at most."""
    parts = min(parts, count)
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


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
    try:
        for product in products:
            product.pack()
        decoder.infers_layer = decode_layers(decoder)
        yield
    finally:
        decoder.infers_layer = None
        for product in products:
            product.unpack()
