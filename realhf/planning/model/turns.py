"""A generation whose KV cache has no room for all of its sequences, simulated with the engine's own scheduler: its
decode steps, the sequences that are preempted, and the tokens that are computed again."""

import math
import random
from dataclasses import dataclass
from functools import lru_cache

from realhf.architecture.chunks import PREFILL_TOKENS
from realhf.architecture.decoding import PAGE_TOKENS
from realhf.geometry.batching import Limits, Scheduler, pages_for
from realhf.planning.model.lengths import DecodePhase, LengthDistribution

# Larger generations are simulated in small: a part of the sequences in as large a part of the room, and several tokens
# at a time. This many sequences, and steps of one sequence, take some ten milliseconds.
MOST_SEQUENCES, MOST_STEPS = 256, 16_384


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The sequences of one part of a generation's batch.

    room: tokens of its KV cache. running: sequences at once, at most. sharing: neighbours with one prompt.
    longest: tokens of the longest response of all ranks, expected. least_share: see `Limits`.
    """

    room: int
    sequences: int
    running: int
    sharing: int
    prompt_tokens: int
    responses: LengthDistribution
    longest: int
    least_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Sequences that take turns.

    phases: the decode steps of one part, whose shares are of the `running` sequences of `Waiting`.
    preemptions: expected number. again_tokens: computed as prompts, beyond every prompt once for those that share it,
    in sequences of `again_length` tokens.
    """

    phases: tuple[DecodePhase, ...]
    preemptions: float
    again_tokens: float
    again_length: float


@lru_cache(maxsize=4096)
def take_turns(waiting: Waiting) -> Turns:
    """Runs the scheduler on responses of the expected lengths, in random order; large generations in small."""
    w = waiting
    groups = max(min(w.sequences, MOST_SEQUENCES) // w.sharing, 1)
    scale = w.sequences / (groups * w.sharing)
    lengths = _lengths(w, groups * w.sharing)
    unit = 1 << max(math.ceil(math.log2(sum(lengths) / MOST_STEPS)), 0)  # tokens that are simulated as one
    page = max(PAGE_TOKENS // unit, 1)
    prompt = math.ceil(w.prompt_tokens / unit)
    lengths = [round((length - 1) / unit) + 1 for length in lengths]
    scheduler = Scheduler(
        [prompt] * len(lengths),
        [index - index % w.sharing for index in range(len(lengths))],
        Limits(
            num_pages=max(int(w.room / scale) // unit // page, pages_for(prompt + max(lengths) - 1, page)),
            page_size=page,
            max_running=max(round(w.running / scale), 1),
            max_prefill_tokens=max(PREFILL_TOKENS // unit, 1),
            holds_all=False,
            least_share=w.least_share,
        ),
    )
    sums, prefills = _run(scheduler, prompt, lengths)
    again = sum(prefills) - prompt * groups
    phases = tuple(
        DecodePhase(steps * unit, running / steps / scheduler.limits.max_running, tokens / running * unit)
        for steps, running, tokens in sums
    )
    return Turns(
        phases=phases,
        preemptions=scheduler.preemptions * scale,
        again_tokens=again * unit * scale,
        again_length=unit * sum(length * length for length in prefills) / sum(prefills),
    )


def _run(scheduler: Scheduler, prompt: int, lengths: list[int]) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Steps, running sequences and their responses' tokens, summed over the steps of each phase, and the lengths of
    all that was computed as a prompt. A phase has the steps in which as many sequences run, up to a factor of two."""
    sums: dict[int, tuple[int, int, int]] = {}
    prefills = []
    while not scheduler.is_done:
        step = scheduler.plan()
        prefills += [prefill.length for prefill in step.prefills]
        if running := len(step.decodes):
            phase = int(math.log2(scheduler.limits.max_running / running))
            steps, sequences, tokens = sums.get(phase, (0, 0, 0))
            more = sum(sequence.length for sequence in step.decodes) - running * prompt
            sums[phase] = (steps + 1, sequences + running, tokens + more)
        scheduler.advance([each.length + 1 - prompt == lengths[each.index] for each in step.drawing])
    return [sums[phase] for phase in sorted(sums)], prefills


def _lengths(waiting: Waiting, number: int) -> list[int]:
    """The responses of `number` sequences: evenly spread over the distribution, the last one the longest of all."""
    responses, lengths, below, index = waiting.responses, list[int](), 0.0, 0
    for length, share in zip(responses.lengths, responses.shares, strict=True):
        below += share
        while index < number and (index + 0.5) / number <= below:
            lengths.append(length)
            index += 1
    lengths += [responses.longest] * (number - len(lengths))
    lengths[-1] = max(lengths[-1], waiting.longest)
    random.Random(0).shuffle(lengths)
    return lengths


@lru_cache(maxsize=256)
def spread(mean: float, limit: int) -> LengthDistribution:
    """Responses with this mean and limit, where no more is known: all lengths within the same distance of the mean."""
    distance = math.ceil(min(mean - 1, limit - mean))
    middle = round(mean)
    return LengthDistribution.of(range(max(middle - distance, 1), min(middle + distance, limit) + 1))
