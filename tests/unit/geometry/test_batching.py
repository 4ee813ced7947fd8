"""The scheduler against a memory that is only a table: what a sequence reads is what was written for it."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.geometry.batching import Limits, Scheduler, Step, pages_for
from realhf.geometry.block_manager import BlockManager

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


@given(workloads(), st.integers(1, 30), st.sampled_from([0.0, 0.25, 2.0]))
@settings(max_examples=300, deadline=None)
def test_every_sequence_ends_and_reads_what_was_written_for_it(workload, max_prefill_tokens, least_share):
    twins, lengths, responses, num_pages, max_running = workload
    scheduler = scheduler_of(
        lengths,
        twins,
        num_pages=num_pages,
        max_running=max_running,
        max_prefill_tokens=max_prefill_tokens,
        least_share=least_share,
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


def scheduler_of(
    lengths, twins=None, *, num_pages=100, max_running=100, max_prefill_tokens=1000, holds_all=False, least_share=0.0
):
    twins = range(len(lengths)) if twins is None else twins
    return Scheduler(
        lengths,
        twins,
        Limits(
            num_pages=num_pages,
            page_size=PAGE,
            max_running=max_running,
            max_prefill_tokens=max_prefill_tokens,
            holds_all=holds_all,
            least_share=least_share,
        ),
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


def test_the_youngest_gives_way_to_itself():
    scheduler = scheduler_of([1, 3], num_pages=2)
    advance(scheduler)
    advance(scheduler)  # 3 and 5 tokens
    step = advance(scheduler)
    assert ([s.index for s in step.decodes], step.grown, step.prefills) == ([0], [], [])
    assert (scheduler.preemptions, scheduler.waiting, scheduler.blocks.free) == (1, 1, 1)


def test_places_limit_the_batch_and_are_filled_when_a_sequence_ends():
    scheduler = scheduler_of([1, 2, 3], num_pages=100, max_running=2)
    assert [s.index for s in advance(scheduler, ends=[1]).drawing] == [0, 1]
    step = advance(scheduler)
    assert [s.index for s in step.decodes] == [0]
    assert [p.members[0].index for p in step.prefills] == [2]


@pytest.mark.parametrize(
    ("lengths", "most", "by_step"),
    [
        ([5, 5, 5], 10, [2, 1]),
        ([5, 5, 5], 9, [1, 1, 1]),
        ([5, 6, 5], 10, [1, 1, 1]),
        ([12, 3], 10, [1, 1]),  # one prompt may be longer
        ([3, 3, 3], 9, [3]),
    ],
)
def test_the_prompts_of_a_step_are_limited(lengths, most, by_step):
    scheduler = scheduler_of(lengths, num_pages=100, max_prefill_tokens=most)
    assert [len(advance(scheduler).prefills) for _ in by_step] == by_step


@pytest.mark.parametrize(
    ("twins", "pages", "holds_all", "admitted"),
    [
        ([0, 0, 0, 0, 4], 5, False, 4),
        ([0, 0, 0, 0, 4], 6, False, 5),
        ([0, 0, 0, 0, 4], 5, True, 5),
        ([0, 0, 0, 0, 4], 4, True, 4),
        ([0, 0, 0, 3], 4, False, 4),
        ([0] * 8 + [8], 10, False, 8),
        ([0] * 8 + [8], 11, False, 9),
    ],
)
def test_a_page_for_every_four_that_run_is_kept_back_where_not_all_can_grow(twins, pages, holds_all, admitted):
    scheduler = scheduler_of([1] * len(twins), twins, num_pages=pages, holds_all=holds_all)
    step = scheduler.plan()
    assert len(step.drawing) == admitted
    assert [sequence.slot for sequence in step.drawing] == list(range(admitted))
    assert scheduler.waiting == len(twins) - admitted
    with pytest.raises(AssertionError, match="the last step has not ended"):
        scheduler.plan()


def test_twins_beyond_the_pages_or_places_wait_in_front_of_the_next_prompt():
    for scheduler in (
        scheduler_of([8, 8, 8, 1], [0, 0, 0, 3], num_pages=4),  # two full pages, and one each
        scheduler_of([8, 8, 8, 1], [0, 0, 0, 3], num_pages=100, max_running=2),
    ):
        step = scheduler.plan()
        assert [s.index for s in step.drawing] == [0, 1]
        assert [(p.length, len(p.members)) for p in step.prefills] == [(8, 2)]
        assert (step.rows, scheduler.waiting, scheduler.is_done) == (8, 2, False)


def test_a_step_that_takes_pages_away_admits_nobody():
    """What was just taken away would be given to another."""
    scheduler = scheduler_of([4, 3, 1], num_pages=4, max_running=2, holds_all=True)
    assert [s.index for s in advance(scheduler).drawing] == [0, 1]  # 2 and 1 pages
    step = advance(scheduler)  # 1 has 4 tokens
    assert ([s.index for s in step.decodes], step.grown) == ([0, 1], [])
    step = advance(scheduler)
    assert [s.index for s in step.grown] == [1]  # the last page
    assert (scheduler.preemptions, scheduler.blocks.free) == (0, 0)
    advance(scheduler)
    advance(scheduler)
    step = advance(scheduler)  # 0 has 9 tokens
    assert ([s.index for s in step.decodes], [s.index for s in step.grown], step.prefills) == ([0], [0], [])
    assert (scheduler.preemptions, scheduler.waiting, scheduler.blocks.free) == (1, 2, 1)


def test_newcomers_wait_until_there_is_room_for_a_share_of_those_that_run():
    scheduler = scheduler_of([1] * 8, max_running=4, least_share=0.5)
    assert [s.index for s in advance(scheduler, ends=[0]).drawing] == [0, 1, 2, 3]
    step = advance(scheduler, ends=[2])  # room for one beside three
    assert ([s.index for s in step.decodes], step.prefills) == ([1, 2, 3], [])
    step = advance(scheduler)
    assert [p.members[0].index for p in step.prefills] == [4, 5]
    at_once = scheduler_of([1] * 8, max_running=4)
    advance(at_once, ends=[0])
    assert [p.members[0].index for p in advance(at_once).prefills] == [4]


def test_newcomers_wait_for_room_alone():
    """Not for others: these may be all that wait, and a step takes no more prompts than it may."""
    last = scheduler_of([1] * 5, max_running=4, least_share=0.5)
    advance(last, ends=[0])
    assert [p.members[0].index for p in advance(last).prefills] == [4]
    many = scheduler_of([5] * 9, max_prefill_tokens=5, least_share=0.5)
    assert [len(advance(many).prefills) for _ in range(9)] == [1] * 9
    large = scheduler_of([8, 8], num_pages=4, least_share=2.0)
    assert [s.index for s in advance(large, ends=[0]).drawing] == [0]
    assert [s.index for s in advance(large).drawing] == [1], "nothing runs that could make room"


def test_a_group_that_waits_computes_its_prompt_once():
    prompts = []
    for least_share in (0.0, 0.5):
        scheduler, tokens = scheduler_of([8] * 8, [0] * 4 + [4] * 4, max_running=4, least_share=least_share), 0
        for end in range(8):
            step = advance(scheduler, ends=[end])
            tokens += sum(prefill.length for prefill in step.prefills)
        prompts.append(tokens)
    assert prompts == [8 + 4 * 8, 8 + 2 * 8]


def test_pages_that_a_sequence_needs():
    assert [pages_for(length, 4) for length in (0, 1, 3, 4, 7, 8)] == [1, 1, 1, 2, 2, 3]


def test_pages_are_counted_by_their_holders():
    for wrong in (BlockManager(1).share, BlockManager(1).release):
        with pytest.raises(AssertionError, match="page 0 is free"):
            wrong(0)
    blocks = BlockManager(2)
    assert [blocks.allocate(), blocks.allocate(), blocks.free, blocks.size] == [0, 1, 0, 2]
    blocks.release(0)
    blocks.release(1)
    with pytest.raises(AssertionError, match="page 1 is free"):
        blocks.share(1)
    page = blocks.allocate()
    blocks.share(page)
    blocks.release(page)
    assert blocks.free == 1
    blocks.release(page)
    assert blocks.free == 2
    with pytest.raises(AssertionError, match="is free"):
        blocks.release(page)
