"""The passes of every stage: against the schedules' figures and formulas, and carried out by devices that wait."""

import itertools
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.geometry.pipeline_schedule import Pass, forward_steps, simulate, training_order, training_steps

# (pp, chunks, micro-batches)
shapes = st.tuples(st.integers(2, 5), st.integers(1, 4), st.integers(1, 13)) | st.tuples(
    st.just(1), st.just(1), st.integers(1, 5)
)


def text(passes: list[Pass]) -> str:
    """`F0` and `B0` of the first chunk, with a stroke more for each further one."""
    return " ".join(f"{'F' if p.is_forward else 'B'}{p.micro_batch}{chr(39) * p.chunk}" for p in passes)


@pytest.mark.parametrize(
    ("stage", "passes"),
    [
        (0, "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
        (1, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        (2, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"),
    ],
)
def test_one_chunk_is_1f1b(stage: int, passes: str) -> None:
    assert text(training_order(3, stage, 1, 5)) == passes


@pytest.mark.parametrize(
    ("stage", "micro_batches", "passes"),
    [
        (0, 4, "F0 F1 F0' F1' B0' F2 B1' F3 B0 F2' B1 F3' B2' B3' B2 B3"),
        (1, 4, "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3"),
        (0, 3, "F0 F1 F0' F1' B0' F2 B1' B0 F2' B1 B2' B2"),  # as with four, without the last
        (1, 1, "F0 F0' B0' B0"),
    ],
)
def test_two_chunks_on_two_stages(stage: int, micro_batches: int, passes: str) -> None:
    assert text(training_order(2, stage, 2, micro_batches)) == passes


def test_the_times_of_passes_by_hand() -> None:
    """A forward pass takes 1, a backward pass 2; each waits for its stage and for the pass before it."""
    ends = simulate([training_order(2, stage, 1, 2) for stage in range(2)], 1)
    assert {(stage, text([run])): end for (stage, run), end in ends.items()} == {
        (0, "F0"): 1,
        (0, "F1"): 2,
        (1, "F0"): 2,
        (1, "B0"): 4,
        (1, "F1"): 5,
        (0, "B0"): 6,
        (1, "B1"): 7,
        (0, "B1"): 9,
    }


@given(shapes)
def test_every_pass_runs_once_and_backward_after_forward(shape: tuple[int, int, int]) -> None:
    pp, chunks, micro_batches = shape
    wanted = {Pass(k, c, i) for k in ("forward", "backward") for c in range(chunks) for i in range(micro_batches)}
    for stage in range(pp):
        order = training_order(pp, stage, chunks, micro_batches)
        assert len(order) == len(wanted)
        assert set(order) == wanted
        place = {run: i for i, run in enumerate(order)}
        assert all(place[Pass("forward", r.chunk, r.micro_batch)] <= place[r] for r in order)
        assert [step.run for step in training_steps(pp, chunks, micro_batches)[stage]] == order
        forwards = [step.run for step in forward_steps(pp, chunks, micro_batches)[stage]]
        assert Counter(forwards) == Counter(r for r in wanted if r.is_forward)
        for chunk in range(chunks):  # losses and outputs come in the order of the micro-batches
            numbers = list(range(micro_batches))
            assert [r.micro_batch for r in forwards if r.chunk == chunk] == numbers
            assert [r.micro_batch for r in order if r.is_forward and r.chunk == chunk] == numbers


@given(shapes)
def test_graphs_that_live_are_bounded(shape: tuple[int, int, int]) -> None:
    pp, chunks, micro_batches = shape
    for stage in range(pp):
        signs = [1 if run.is_forward else -1 for run in training_order(pp, stage, chunks, micro_batches)]
        live = list(itertools.accumulate(signs))
        assert max(live) <= min((chunks - 1) * pp + pp - stage, chunks * micro_batches)
        assert live[-1] == 0


@given(shapes)
def test_receives_are_those_that_are_sent_and_come_in_time(shape: tuple[int, int, int]) -> None:
    pp, chunks, micro_batches = shape
    for stages in (training_steps(*shape), forward_steps(*shape)):
        sent = Counter(step.send for steps in stages for step in steps if step.send)
        received = Counter(message for steps in stages for step in steps for message in step.receives)
        assert sent == received
        assert max(sent.values(), default=1) == 1
        kinds = len({step.run.kind for step in stages[0]})
        assert len(sent) == kinds * (pp * chunks - 1) * micro_batches
        for stage, steps in enumerate(stages):
            waiting: set[Pass] = set()
            for step in steps:
                assert all(message.receiver == stage for message in step.receives)
                waiting |= {message.target for message in step.receives}
                virtual = step.run.chunk * pp + stage
                is_end = virtual == (0 if step.run.is_forward else pp * chunks - 1)
                assert (step.run in waiting) is not is_end


@given(shapes)
def test_devices_that_wait_for_every_message_at_once_end(shape: tuple[int, int, int]) -> None:
    """The strictest links there are: a device that sends or receives does nothing else until the other end does too."""
    for stages in (training_steps(*shape), forward_steps(*shape)):
        queues = [deque(m for step in steps for m in (*step.receives, step.send) if m) for steps in stages]
        while any(queues):
            heads = Counter(queue[0] for queue in queues if queue)
            passing = [message for message, ends in heads.items() if ends == 2]
            assert passing, f"devices wait for ever: {heads}"
            for message in passing:
                assert queues[message.sender].popleft() == queues[message.receiver].popleft() == message


@given(shapes)
def test_the_bubble_is_divided_by_the_chunks(shape: tuple[int, int, int]) -> None:
    """Narayanan et al., 2021, section 2.2.2: (pp - 1) / chunks times the time of a micro-batch on a stage, for
    micro-batches in multiples of pp; what lacks of the last multiple comes on top, but for a chunk's time each."""
    pp, chunks, micro_batches = shape
    orders = [training_order(pp, stage, chunks, micro_batches) for stage in range(pp)]
    lacking = -micro_batches % pp if chunks > 1 else 0
    makespan = max(simulate(orders, chunks).values()) / chunks  # a chunk takes 1 / chunks of a stage's time, 1 + 2
    assert makespan == pytest.approx(3 * (micro_batches + lacking + (pp - 1 - lacking) / chunks))
    if not lacking:
        assert makespan - 3 * micro_batches == pytest.approx(3 * (pp - 1) / chunks)
