"""Sequences that take turns in a KV cache: by hand, and large generations in small."""

from dataclasses import replace

import pytest

from realhf.planning.model import turns as turns_module
from realhf.planning.model.lengths import DecodePhase, LengthDistribution
from realhf.planning.model.turns import Waiting, spread, take_turns


def waiting(room: int, responses: LengthDistribution, sequences: int = 2, **changes: int) -> Waiting:
    words = {"running": sequences, "sharing": 1, "prompt_tokens": 15, "longest": responses.longest} | changes
    return Waiting(room=room, sequences=sequences, responses=responses, **words)


FOUR, MANY = LengthDistribution.of([4]), LengthDistribution.of([1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233])


def test_two_sequences_by_hand() -> None:
    """Each of 15 + 4 tokens needs a second page for its third token. With three pages the first gets it, and the second
    gives its own back, to be computed again with its 17 tokens, which give it its third token."""
    found = take_turns(waiting(48, FOUR))
    # Steps: one of both; two of the first; one of the second.
    assert found.phases == (DecodePhase(1.0, 1.0, 1.0), DecodePhase(3.0, 0.5, (2 + 3 + 3) / 3))
    assert (found.preemptions, found.again_tokens) == (1.0, 17)
    assert found.again_length == pytest.approx((2 * 15**2 + 17**2) / (2 * 15 + 17))


def test_those_that_fit_one_by_one_follow_one_another() -> None:
    found = take_turns(waiting(32, FOUR, running=1))
    assert found.phases == (DecodePhase(6.0, 1.0, 2.0),)
    assert (found.preemptions, found.again_tokens) == (0.0, 0)


def test_samples_of_one_prompt_compute_it_once_where_they_begin_together() -> None:
    found = take_turns(waiting(64, FOUR, sharing=2))
    assert found.phases == (DecodePhase(3.0, 1.0, 2.0),)
    assert (found.preemptions, found.again_tokens) == (0.0, 0)


@pytest.mark.parametrize("part", [0.5, 0.25, 0.1])
@pytest.mark.parametrize("responses", [MANY, LengthDistribution.of([200])])
def test_a_large_generation_is_simulated_in_small(
    part: float, responses: LengthDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the sequences, several tokens at a time, against each sequence and token."""
    large = waiting(int(part * 256 * 320), responses, 256, prompt_tokens=60)
    small = take_turns(large)
    for limit in ("MOST_SEQUENCES", "MOST_STEPS"):
        monkeypatch.setattr(turns_module, limit, 10**9)
    exact = take_turns.__wrapped__(large)

    def steps(found: turns_module.Turns) -> float:
        return sum(phase.steps for phase in found.phases)

    def tokens(found: turns_module.Turns) -> float:
        return sum(phase.steps * phase.share for phase in found.phases)

    assert steps(small) == pytest.approx(steps(exact), rel=0.1)
    assert tokens(small) == pytest.approx(tokens(exact), rel=0.1)
    assert exact.preemptions / 1.5 - 3 <= small.preemptions <= 1.5 * exact.preemptions + 3
    assert small.again_tokens == pytest.approx(exact.again_tokens, rel=0.5)


def test_the_less_room_the_more_steps() -> None:
    found = [take_turns(waiting(room, MANY, 32)) for room in (8192, 2048, 1024, 512, 256)]
    steps = [sum(phase.steps for phase in each.phases) for each in found]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1] / 2
    assert found[0].preemptions == 0


def test_the_longest_response_is_that_of_all_ranks() -> None:
    found = take_turns(waiting(8192, replace(FOUR), longest=7))
    assert sum(phase.steps for phase in found.phases) == 6


@pytest.mark.parametrize(
    ("mean", "limit", "least", "most"),
    [(10, 10, 10, 10), (4, 10, 1, 7), (8, 10, 6, 10), (1, 10, 1, 1), (7.5, 10, 5, 10)],
)
def test_responses_around_a_mean(mean: float, limit: int, least: int, most: int) -> None:
    found = spread(mean, limit)
    assert (found.lengths[0], found.lengths[-1]) == (least, most)
    assert abs(found.mean - mean) <= 0.5
