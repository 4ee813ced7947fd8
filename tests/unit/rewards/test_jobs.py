"""What is still to be scored, what came of it, and who is to blame for the end of a process."""

from typing import Any

import pytest

from realhf.rewards.jobs import Failure, Job, Open, Part, RewardError, after_end, halves
from realhf.rewards.messages import Function, Value
from tests.unit.rewards.samples import of, sample

FUNCTIONS = [
    Function("f", "f (r.py:1)", 1.0, False, False, False),
    Function("g", "g (r.py:9)", 2.0, False, False, False),
]
VALUE = Value(0, 0, 0.5, 0.0)


def job(responses: str = "abcdefgh", *, is_strict: bool = False) -> Job:
    return Job(FUNCTIONS, of(responses), is_strict=is_strict)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [("a\n b", "'a b'"), ("x" * 60, repr("x" * 60)), ("x" * 61, repr("x" * 60 + "..."))],
)
def test_a_failure_says_all_that_it_is_of(prompt: str, shown: str) -> None:
    failure = Failure("f", sample(7, prompt=prompt), "value", "it returned nan", "f (r.py:1)")
    assert failure.text == f"reward f (r.py:1) of step 3, sample 7, prompt {shown}: it returned nan"


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is\n2 + 2?"}]


@pytest.mark.parametrize(
    ("row", "messages", "shown"),
    [
        (
            {"question": "What is 2 + 2?", "answer": "2", "id": 7, "solution": "so it is four"},
            None,
            "What is 2 + 2?",
        ),
        ({"messages": CHAT}, CHAT, "What is 2 + 2?"),
        ({"solution": "four", "note": ""}, None, "system Be brief. user What is 2 + 2?"),
    ],
)
def test_a_failure_shows_the_part_of_the_prompt_that_is_the_row_s(row: Any, messages: Any, shown: str) -> None:
    """What a template puts before it is alike for all rows."""
    prompt = "system\nBe brief.\nuser\nWhat is 2 + 2?\n" if messages is None else "Be brief. What is\n2 + 2?"
    failure = Failure("f", sample(7, prompt=prompt, row=row, messages=messages), "value", "it returned nan", "f")
    assert failure.question == shown
    assert f"prompt {shown!r}: " in failure.text


def test_a_job_names_its_function_and_its_sample() -> None:
    one = job()
    assert one.failure(1, 2, "end", "gone") == Failure("g", one.samples[2], "end", "gone", "g (r.py:9)")


def test_a_job_is_done_with_the_last_value() -> None:
    one = job("ab")
    places = [(0, 0), (1, 1), (0, 1), (1, 0)]
    for reward, index in places:
        assert not one.is_done
        assert not one.wait(0)
        one.put(reward, index, Value(0, 0, 10 * reward + index, 0.0))
    assert one.is_done
    assert one.wait(0)
    assert [[getattr(value, "value", None) for value in row] for row in one.values] == [[0, 1], [10, 11]]


def test_the_first_answer_counts() -> None:
    one = job("a")
    one.put(0, 0, VALUE)
    one.put(0, 0, Value(0, 0, 9.0, 0.0))
    assert not one.is_done
    assert one.values == [[VALUE], [None]]


@pytest.mark.parametrize(("rewards", "responses"), [(FUNCTIONS, ""), ([], "ab")])
def test_a_job_without_anything_to_do_is_done(rewards: Any, responses: str) -> None:
    assert Job(rewards, of(responses), is_strict=True).wait(0)


def test_a_failure_is_the_end_of_a_strict_job_alone() -> None:
    strict, other = job("ab", is_strict=True), job("ab")
    failure = strict.failure(0, 1, "value", "it returned nan")
    for one in (strict, other):
        one.put(0, 0, VALUE)
        assert not one.is_done
        one.put(0, 1, failure)
        assert one.values[0] == [VALUE, failure]
    assert not other.is_done
    assert strict.is_done
    with pytest.raises(RewardError) as caught:
        strict.wait(0)
    assert (
        str(caught.value)
        == f"{failure.text}; correct the function, or let such samples count with --reward.on-error zero, or drop"
    )


def test_a_job_raises_its_first_error() -> None:
    one = job()
    one.fail(OSError("first"))
    one.fail(OSError("second"))
    assert one.is_done
    with pytest.raises(OSError, match="first"):
        one.wait(0)


def test_answers_leave_what_is_open() -> None:
    one = Open(Part(job(), 1, (3, 5, 7), 2))
    assert one.rest == one.part
    assert one.answer([2, 0]) == [7, 3]
    assert one.rest == Part(one.part.job, 1, (5,), 2)
    with pytest.raises(RewardError, match=r"^a reward process answered twice for sample 2 of its work$"):
        one.answer([2])
    with pytest.raises(RewardError, match="sample 3"):
        one.answer([3])
    assert one.answer([1]) == [5]
    assert not one.places


@pytest.mark.parametrize(
    ("indices", "runs"),
    [((4, 5, 6, 7), [(4, 5), (6, 7)]), ((4, 5, 6), [(4, 5), (6,)]), ((4, 5), [(4,), (5,)]), ((4,), [(4,)]), ((), [])],
)
def test_halves(indices: tuple[int, ...], runs: list[tuple[int, ...]]) -> None:
    part = Part(job(), 1, indices, 3)
    assert halves(part) == [Part(part.job, 1, run, 3) for run in runs]


IN_ORDER = {
    # The first that is left has ended the process; the others are not to blame.
    "the first of several": ([((1, 2, 3), 0)], [((2, 3), 0), ((1,), 1)], []),
    "one alone": ([((1,), 0)], [((1,), 1)], []),
    "one again": ([((1,), 1)], [], [1]),
    "again, with others behind it": ([((1, 2), 1), ((4, 5), 0)], [((2,), 1), ((4, 5), 0)], [1]),
    "of several parts": ([((1,), 0), ((4, 5), 0)], [((4, 5), 0), ((1,), 1)], []),
    "nothing was left": ([], [], []),
}
TOGETHER = {
    # Each may have ended it: they are tried apart, until one alone has twice.
    "one of several": ([((1, 2, 3), 0)], [((1, 2), 1), ((3,), 1)], []),
    "two parts": ([((1,), 0), ((2, 3), 1)], [((1,), 1), ((2,), 2), ((3,), 2)], []),
    "two parts, both again": ([((1,), 3), ((2,), 3)], [((1,), 4), ((2,), 4)], []),
    "one alone": ([((1,), 0)], [((1,), 1)], []),
    "one again": ([((1,), 1)], [], [1]),
}
CASES = [(how, True) for how in IN_ORDER] + [(how, False) for how in TOGETHER]


@pytest.mark.parametrize(("how", "in_order"), CASES)
def test_who_is_to_blame_for_the_end_of_a_process(how: str, in_order: bool) -> None:
    given, again, blamed = (IN_ORDER if in_order else TOGETHER)[how]
    one = job()
    parts = [Open(Part(one, 1, indices, ends)) for indices, ends in given]
    done = Open(Part(one, 0, (0,)))
    done.answer([0])  # what is answered is over
    assert after_end([done, *parts], "SIGKILL", "end", in_order=in_order) == [
        Part(one, 1, indices, ends) for indices, ends in again
    ]
    assert [index for index, value in enumerate(one.values[1]) if value is not None] == blamed
    assert all(one.values[1][index] == one.failure(1, index, "end", "SIGKILL") for index in blamed)
    assert one.values[0] == [None] * 8


def test_a_call_that_took_too_long_is_not_made_again() -> None:
    one = job()
    assert after_end([Open(Part(one, 0, (4, 5)))], "too long", "time", in_order=True) == [Part(one, 0, (5,))]
    assert one.values[0][4] == one.failure(0, 4, "time", "too long")
