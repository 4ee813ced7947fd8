"""The order of passes of every pipeline stage, and its messages. Numbers only; no torch here.

With one model chunk a stage this is 1F1B (PipeDream-Flush), with more of them interleaved 1F1B (Narayanan et al.,
2021, section 2.2). Chunk c of stage s is *virtual stage* c * pp + s: hidden states go from each to the next, so from
the last stage back to the first, and gradients the other way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

FORWARD_TIME, BACKWARD_TIME = 1, 2  # one chunk, in the simulation; a backward pass has twice the products


@dataclass(frozen=True)
class Pass:
    """A micro-batch through a model chunk of a stage, forward or backward."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro_batch: int

    @property
    def is_forward(self) -> bool:
        return self.kind == "forward"


@dataclass(frozen=True)
class Message:
    """The input of stage `receiver` for its pass `target`: hidden states for a forward pass, gradients for a
    backward."""

    sender: int
    receiver: int
    target: Pass


@dataclass(frozen=True)
class Step:
    """One pass of a stage: post `receives`, run the pass, post `send` if there is one.

    The message that the pass needs is among the receives of this step or of an earlier one.
    """

    run: Pass
    receives: tuple[Message, ...]
    send: Message | None


def forward_order(pp: int, chunks: int, micro_batches: int) -> list[Pass]:
    """The forward passes of every stage: pp micro-batches through each of the chunks, then the next pp."""
    groups = [range(first, min(first + pp, micro_batches)) for first in range(0, micro_batches, pp)]
    return [Pass("forward", chunk, i) for group in groups for chunk in range(chunks) for i in group]


def training_order(pp: int, stage: int, chunks: int, micro_batches: int) -> list[Pass]:
    """The passes of a stage in (interleaved) 1F1B: forwards fill the pipeline, then forwards and backwards alternate,
    and backwards drain it.

    At most (chunks - 1) * pp + pp - stage forward passes wait for their backward pass. This is the least that keeps the
    pipeline full; Megatron-LM starts twice as many ahead for every further stage, to hide slow messages. Interleaving
    needs a multiple of pp micro-batches; missing ones are added for ordering, and left out of the result.
    """
    padded = -(-micro_batches // pp) * pp
    forwards = forward_order(pp, chunks, padded)
    backwards = [Pass("backward", chunks - 1 - run.chunk, run.micro_batch) for run in forwards]
    ahead = min(len(forwards), (chunks - 1) * pp + pp - 1 - stage)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[len(forwards) - ahead :]
    return [run for run in order if run.micro_batch < micro_batches]


@lru_cache(maxsize=256)
def forward_steps(pp: int, chunks: int, micro_batches: int) -> tuple[tuple[Step, ...], ...]:
    """The steps of every stage for forward passes alone."""
    return _steps([forward_order(pp, chunks, micro_batches)] * pp, chunks)


@lru_cache(maxsize=256)
def training_steps(pp: int, chunks: int, micro_batches: int) -> tuple[tuple[Step, ...], ...]:
    """The steps of every stage for forward and backward passes."""
    return _steps([training_order(pp, stage, chunks, micro_batches) for stage in range(pp)], chunks)


def simulate(orders: Sequence[Sequence[Pass]], chunks: int) -> dict[tuple[int, Pass], int]:
    """The end of every pass of every stage, if each starts as soon as possible and messages take no time."""
    pp = len(orders)
    ends: dict[tuple[int, Pass], int] = {}
    free, places = [0] * pp, [0] * pp
    while len(ends) < sum(map(len, orders)):
        known = len(ends)
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                run = order[places[stage]]
                needed = _beside(pp, chunks, stage, run, -1)
                if needed is not None and needed not in ends:
                    break
                start = free[stage] if needed is None else max(free[stage], ends[needed])
                free[stage] = ends[stage, run] = start + (FORWARD_TIME if run.is_forward else BACKWARD_TIME)
                places[stage] += 1
        assert len(ends) > known, f"stages wait for one another at {places} of {orders}"
    return ends


def _beside(pp: int, chunks: int, stage: int, run: Pass, places: int) -> tuple[int, Pass] | None:
    """The stage and pass that is `places` positions after `run` on its micro-batch's way; None beyond either end."""
    virtual = run.chunk * pp + stage + (places if run.is_forward else -places)
    if not 0 <= virtual < pp * chunks:
        return None
    return virtual % pp, Pass(run.kind, virtual // pp, run.micro_batch)


def _steps(orders: Sequence[Sequence[Pass]], chunks: int) -> tuple[tuple[Step, ...], ...]:
    """The steps of every stage; all stages post messages in one order, by their times in the simulation.

    A message may leave only when its receiver asks for it, after all earlier messages between the same two devices.
    With one order no stage waits for ever, although interleaved stages may exchange four kinds of messages.
    """
    pp = len(orders)
    steps: list[list[Step]] = [[] for _ in orders]
    awaited: list[list[Message]] = [[] for _ in orders]
    ends = simulate(orders, chunks)
    for stage, run in sorted(ends, key=lambda place: (ends[place], place[0])):
        after = _beside(pp, chunks, stage, run, 1)
        send = None if after is None else Message(stage, *after)
        steps[stage].append(Step(run, tuple(awaited[stage]), send))
        awaited[stage].clear()
        if send is not None:
            awaited[send.receiver].append(send)
    return tuple(map(tuple, steps))
