"""Continuous batching: which sequences compute in the next step, and in which pages their keys and values lie.

This file decides with plain numbers; `realhf.engine.generate.running_batch` computes. All ranks of a data-parallel
group decide the same, because they see the same prompts and tokens.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from realhf.geometry.block_manager import BlockManager


@dataclass(eq=False)
class RunningSequence:
    """A sequence that has a place in the batch.

    `length` counts its tokens; the last one is not in the cache yet. `slot` is its row of the page table while it runs.
    """

    index: int
    length: int
    slot: int
    pages: list[int]


@dataclass(frozen=True)
class Prefill:
    """Computes `length` tokens once for all `members`, which share its full pages."""

    members: list[RunningSequence]
    length: int


@dataclass(frozen=True)
class Step:
    """One pass through the model: the next token of `decodes`, and all tokens of `prefills`.

    `grown` are the decodes that have a new page since the last step. After the pass `copies` are made, (from, to): the
    last page of a prefill is copied for each further member, because they will write into it.
    """

    decodes: list[RunningSequence]
    prefills: list[Prefill] = field(default_factory=list)
    grown: list[RunningSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def drawing(self) -> list[RunningSequence]:
        """The sequences that get a token from this step, in the order of the logits."""
        return [*self.decodes, *(member for prefill in self.prefills for member in prefill.members)]

    @property
    def rows(self) -> int:
        """Tokens that are computed."""
        return len(self.decodes) + sum(prefill.length for prefill in self.prefills)


@dataclass
class _Waiting:
    """Sequences of the same tokens that wait for a place."""

    indices: deque[int]
    length: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a scheduler has to keep to.

    num_pages: of the cache.
    page_size: tokens in a page.
    max_running: sequences in the batch at most.
    max_prefill_tokens: of one step, where it is more than one prompt.
    holds_all: the pages are enough for any `max_running` sequences at their longest; none are kept back for growth.
    least_share: sequences for which there is no room wait until newcomers would be this share of those that run.
    """

    num_pages: int
    page_size: int
    max_running: int
    max_prefill_tokens: int
    holds_all: bool
    least_share: float = 0.0


class Scheduler:
    """Admits sequences in order while there are slots and pages, and preempts the last admitted ones when pages run
    out.

    A preempted sequence loses its pages and waits in front; it is then computed anew, with the tokens it has.

    Args:
        lengths: tokens of every prompt.
        first_with_prompt: for every sequence the first one with the same prompt.
    """

    def __init__(self, lengths: Sequence[int], first_with_prompt: Sequence[int], limits: Limits):
        self.limits, self.page_size = limits, limits.page_size
        self.blocks = BlockManager(limits.num_pages)
        self.running: list[RunningSequence] = []
        self.preemptions = 0
        groups: dict[int, _Waiting] = {}
        for index, (length, first) in enumerate(zip(lengths, first_with_prompt, strict=True)):
            groups.setdefault(first, _Waiting(deque(), length)).indices.append(index)
        self._waiting = deque(groups.values())
        self._slots = list(reversed(range(limits.max_running)))
        self._step: Step | None = None

    @property
    def waiting(self) -> int:
        """Sequences that have no place."""
        return sum(len(group.indices) for group in self._waiting)

    @property
    def is_done(self) -> bool:
        return not (self.running or self._waiting)

    def plan(self) -> Step:
        """Decides the next step; `advance` must follow before the next plan."""
        assert self._step is None, "the last step has not ended"
        before = self.preemptions
        grown = self._grow()
        step = Step(list(self.running), grown=grown)
        if self.preemptions == before:  # else the freed pages would go to another sequence
            self._admit(step)
        assert step.rows, "a budget that holds the longest sequence lets at least one run"
        self._step = step
        return step

    def advance(self, is_end: Iterable[bool]) -> None:
        """Every drawing sequence of the last plan got a token, with which it ended or not."""
        assert self._step is not None
        for sequence, ended in zip(self._step.drawing, is_end, strict=True):
            sequence.length += 1
            if ended:
                self._release(sequence)
        self.running = [sequence for sequence in self.running if sequence.pages]
        self._step = None

    def _grow(self) -> list[RunningSequence]:
        """Gives a page to everyone whose next token begins one; the oldest take from the youngest."""
        grown = []
        for sequence in list(self.running):  # the oldest first
            if not sequence.pages or (sequence.length - 1) // self.page_size < len(sequence.pages):
                continue
            while not self.blocks.free:
                self._preempt(self.running.pop())  # perhaps this one itself; it gives its last page back at least
            if sequence.pages:
                sequence.pages.append(self.blocks.allocate())
                grown.append(sequence)
        return grown

    def _preempt(self, sequence: RunningSequence) -> None:
        self.preemptions += 1
        self._release(sequence)
        self._waiting.appendleft(_Waiting(deque([sequence.index]), sequence.length))

    def _release(self, sequence: RunningSequence) -> None:
        for page in sequence.pages:
            self.blocks.release(page)
        sequence.pages = []
        self._slots.append(sequence.slot)

    def _admit(self, step: Step) -> None:
        chosen: list[tuple[_Waiting, int]] = []  # how many of which group
        tokens, count, free = 0, 0, self.blocks.free
        for group in self._waiting:
            tokens += group.length
            if chosen and tokens > self.limits.max_prefill_tokens:
                break
            # A page each beyond the full ones that they share: the next token has its place. A quarter of the running
            # sequences may need a page within the next quarter of a page, so one page is kept back for every four.
            full = group.length // self.page_size
            room = free - full - (0 if self.limits.holds_all else (len(self.running) + count) // 4)
            admitted = max(0, min(len(group.indices), len(self._slots) - count, room))
            if admitted:
                chosen.append((group, admitted))
                count, free = count + admitted, free - full - admitted
            if admitted < len(group.indices):
                if count < self.limits.least_share * len(step.decodes):
                    return
                break
        for group, admitted in chosen:
            self._start(step, group, admitted, group.length // self.page_size)
            if not group.indices:
                self._waiting.popleft()

    def _start(self, step: Step, group: _Waiting, count: int, full: int) -> None:
        """Takes the first `count` of a group into the batch."""
        shared = [self.blocks.allocate() for _ in range(full)]
        members = []
        for place in range(count):
            if place:
                for page in shared:
                    self.blocks.share(page)
            pages = [*shared, self.blocks.allocate()]
            members.append(RunningSequence(group.indices.popleft(), group.length, self._slots.pop(), pages))
        if group.length % self.page_size:
            step.copies.extend((members[0].pages[-1], member.pages[-1]) for member in members[1:])
        step.prefills.append(Prefill(members, group.length))
        self.running.extend(members)


def pages_for(length: int, page_size: int) -> int:
    """The pages that a sequence needs to be admitted with `length` tokens, or to grow to that many."""
    return length // page_size + 1
