"""The scheduler against a memory that is only a table: what a sequence reads is what was written for it."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.engine.generate.batching import Scheduler, Step, pages_for
from realhf.engine.generate.block_manager import BlockManager

PAGE = 4


class Memory:
    """Plays the part of the model: cells (page, place) hold which token's keys were written there."""

    def __init__(self, prompt_lengths: list[int], twins: list[int]):
        self.prompt_lengths, self.twins = prompt_lengths, twins
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}

    def token(self, index: int, position: int) -> tuple[int, int]:
        """Twins have the same tokens in their prompts and others behind them."""
        return (self.twins[index] if position < self.prompt_lengths[index] else index), position

    def run(self, step: Step) -> None:
        for sequence in step.decodes:
            new = sequence.length - 1
            self._write(sequence.pages, sequence.index, [new])
            for position in range(sequence.length):
                cell = sequence.pages[position // PAGE], position % PAGE
                assert self.cells[cell] == self.token(sequence.index, position)
        for prefill in step.prefills:
            first = prefill.members[0]
            self._write(first.pages, first.index, range(prefill.length))
        for source, target in step.copies:
            for place in range(PAGE):
                if (source, place) in self.cells:
                    self.cells[target, place] = self.cells[source, place]

    def _write(self, pages, index, positions) -> None:
        for position in positions:
            self.cells[pages[position // PAGE], position % PAGE] = self.token(index, position)


@st.composite
def workloads(draw):
    count = draw(st.integers(1, 14))
    twins = [draw(st.integers(0, i)) for i in range(count)]
    twins = [t if twins[t] == t else twins[t] for t in twins]
    for i, twin in enumerate(twins):  # the first of its kind stands for itself
        twins[i] = twins[twin]
    lengths = [draw(st.integers(1, 11)) for _ in range(count)]
    lengths = [lengths[t] for t in twins]
    responses = [draw(st.integers(1, 12)) for _ in range(count)]
    longest = max(pages_for(p + r - 1, PAGE) for p, r in zip(lengths, responses, strict=True))
    return twins, lengths, responses, longest + draw(st.integers(0, 10)), draw(st.integers(1, count))


@given(workloads(), st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_every_sequence_ends_and_reads_what_was_written_for_it(workload, max_prefill_tokens):
    twins, lengths, responses, num_pages, max_running = workload
    scheduler = Scheduler(
        lengths,
        twins,
        num_pages=num_pages,
        page_size=PAGE,
        max_running=max_running,
        max_prefill_tokens=max_prefill_tokens,
    )
    memory = Memory(lengths, twins)
    drawn: Counter[int] = Counter()
    while not scheduler.is_done:
        step = scheduler.plan()
        held = [page for sequence in scheduler.running for page in sequence.pages]
        assert scheduler.blocks.free == num_pages - len(set(held))
        assert len(step.drawing) == len({s.slot for s in step.drawing}) <= max_running
        assert len(step.prefills) <= 1 or sum(p.length for p in step.prefills) <= max_prefill_tokens
        memory.run(step)
        drawn.update(s.index for s in step.drawing)
        scheduler.advance([drawn[s.index] == responses[s.index] for s in step.drawing])
        assert sum(drawn.values()) <= sum(responses)  # what is computed anew is not drawn anew
    assert [drawn[i] for i in range(len(lengths))] == responses
    assert scheduler.blocks.free == num_pages


def scheduler_of(lengths, twins=None, *, num_pages, max_running=100):
    twins = range(len(lengths)) if twins is None else twins
    return Scheduler(
        lengths, twins, num_pages=num_pages, page_size=PAGE, max_running=max_running, max_prefill_tokens=1000
    )


def advance(scheduler, ends=()):
    step = scheduler.plan()
    scheduler.advance([s.index in ends for s in step.drawing])
    return step


def test_twins_are_computed_once_and_share_full_pages():
    step = advance(scheduler_of([9, 9, 9], [0, 0, 0], num_pages=100))
    (prefill,) = step.prefills
    assert [m.index for m in prefill.members] == [0, 1, 2]
    assert step.rows == 9
    pages = [m.pages for m in prefill.members]
    assert pages[0][:2] == pages[1][:2] == pages[2][:2]  # 8 of 9 tokens
    assert len({p[2] for p in pages}) == 3
    assert step.copies == [(pages[0][2], pages[1][2]), (pages[0][2], pages[2][2])]


def test_twins_with_full_pages_need_no_copies():
    step = advance(scheduler_of([8, 8], [0, 0], num_pages=100))
    assert not step.copies


def test_the_youngest_gives_its_pages_to_the_oldest_and_comes_back_with_its_tokens():
    scheduler = scheduler_of([3, 3], num_pages=2)
    assert [s.index for s in advance(scheduler).drawing] == [0, 1]  # now 4 tokens each, the fourth not computed
    assert [s.index for s in advance(scheduler).decodes] == [0, 1]  # 5 tokens: the next step needs new pages
    step = advance(scheduler)
    assert [s.index for s in step.decodes] == [0]
    assert (scheduler.preemptions, scheduler.waiting) == (1, 1)
    advance(scheduler, ends=[0])
    (prefill,) = advance(scheduler).prefills
    assert [(m.index, prefill.length) for m in prefill.members] == [(1, 5)]


def test_places_limit_the_batch_and_are_filled_when_a_sequence_ends():
    scheduler = scheduler_of([1, 2, 3], num_pages=100, max_running=2)
    assert [s.index for s in advance(scheduler, ends=[1]).drawing] == [0, 1]
    step = advance(scheduler)
    assert [s.index for s in step.decodes] == [0]
    assert [p.members[0].index for p in step.prefills] == [2]


def test_pages_are_counted_by_their_holders():
    blocks = BlockManager(2)
    page = blocks.allocate()
    blocks.share(page)
    blocks.release(page)
    assert blocks.free == 1
    blocks.release(page)
    assert blocks.free == 2
    with pytest.raises(AssertionError, match="is free"):
        blocks.release(page)
