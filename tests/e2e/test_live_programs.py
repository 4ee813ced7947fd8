"""`experiments/live_programs.py`: what each program calls depends on what it found."""

import importlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.data import sort_task
from tests.e2e.runs import FinishedRun
from tests.e2e.test_live import forked  # noqa: F401 - a fixture for all tests

pytestmark = pytest.mark.distributed

STEPS = 5
Calls = list[list[str]]  # of each round
module: Any = importlib.import_module("experiments.live_programs")


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.?\d*", line)]


def trainings(of_round: list[str]) -> list[str]:
    return [name for name in of_round if "train_step" in name or name.endswith("_update")]


def updates(calls: Calls) -> list[int]:
    return [len(trainings(of_round)) for of_round in calls]


def draws(calls: Calls) -> list[int]:
    return [sum("generate" in name for name in of_round) for of_round in calls]


def rises(lines: list[str], calls: Calls) -> bool:
    tokens, scores = zip(*map(numbers, lines), strict=True)
    return all(
        later == min(9, now + 2 * (score > 0.405)) or 0.395 <= score <= 0.405
        for now, later, score in zip(tokens, tokens[1:], scores, strict=False)
    )


def leaves(lines: list[str], calls: Calls) -> bool:
    left = [len(line.split(",")) for line in lines]
    return left == [3, 2, 1, 1, 1] and updates(calls) == [0, 0, 1, 1, 1]


def stops_when_far(lines: list[str], calls: Calls) -> bool:
    far = [numbers(line)[0] > 0.05 for line in lines]
    return updates(calls) == [int(not each) for each in far] and far == [False] * (len(lines) - 1) + [True]


def trains_the_loser(lines: list[str], calls: Calls) -> bool:
    won = [numbers(line) for line in lines]
    rounds = zip([[0.0, 0.0], *won], won, calls, strict=False)
    losers = ["second" if now[0] > before[0] else "first" for before, now, _ in rounds]
    trained = [[name.split("_")[0] for name in trainings(of_round)] for of_round in calls]
    return trained == [[loser] for loser in losers] and max(won[-1]) > STEPS / 2


def has_a_judge(lines: list[str], calls: Calls) -> bool:
    is_judged = all(any(name.startswith("judge_") for name in of_round) for of_round in calls)
    return is_judged and updates(calls) == [1] * STEPS and all(numbers(line)[0] > numbers(line)[1] for line in lines)


def learns_from_others(lines: list[str], calls: Calls) -> bool:
    """Either kind of rows has a call of its own."""
    pairs = {(line.split(", ")[1], *trainings(of_round)) for line, of_round in zip(lines, calls, strict=True)}
    kinds, names = zip(*pairs, strict=True)
    return {*kinds} == {"examples", "own answers"} and len(pairs) == len({*names}) == 2


def follows_the_divergence(lines: list[str], calls: Calls) -> bool:
    found = [numbers(line) for line in lines]
    factors = [later[0] / now[0] for now, later in itertools.pairwise(found)]
    expected = [2 if divergence > 0.01 else 0.5 for _, divergence in found[:-1]]
    return factors == pytest.approx(expected, rel=0.02) and {*expected} == {2, 0.5}


def goes_on_until_it_moved(lines: list[str], calls: Calls) -> bool:
    counts = [int(numbers(line)[0]) for line in lines]
    return updates(calls) == counts and len({*counts}) > 1


def keeps(lines: list[str], calls: Calls) -> bool:
    found = [numbers(line) for line in lines]
    best = [max(now for now, _ in found[: i + 1]) for i in range(len(found))]
    is_worse = [now < most for (now, _), most in zip(found, best, strict=True)]
    return (
        best == [most for _, most in found]
        and updates(calls) == [i % 2 for i in range(len(calls))]
        and (len(calls) == STEPS or is_worse[-2:] == [True, True])
    )


HOLDS: dict[str, Callable[[list[str], Calls], bool]] = {
    "curriculum": rises,
    "best_of_n": lambda lines, calls: (
        draws(calls) == [int(numbers(line)[0]) for line in lines] and len({*draws(calls)}) > 1
    ),
    "rejection_sampling": lambda lines, calls: (
        draws(calls) == [int(numbers(line)[0]) for line in lines]
        and updates(calls) == [int(numbers(line)[1] >= 25) for line in lines]
        and len({*draws(calls)}) > 1
    ),
    "stop_on_divergence": stops_when_far,
    "self_play": trains_the_loser,
    "tournament": has_a_judge,
    "prompt_search": leaves,
    "adaptive_kl": follows_the_divergence,
    "as_far_as_allowed": goes_on_until_it_moved,
    "examples_when_stuck": learns_from_others,
    "keep_the_best": keeps,
    "race": lambda lines, calls: updates(calls) == [3, 3, 2, 2, 1],
}
DEFAULT = ("rejection_sampling", "prompt_search")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DEFAULT else pytest.mark.slow) for n in HOLDS])
def test_what_a_program_calls_depends_on_what_it_found(name: str, tmp_path: Path) -> None:
    data = sort_task.ensure(tmp_path / "data")
    words = ["--data", data, "--steps", STEPS, "--num-workers", 1, "--run-dir", tmp_path / "run"]
    lines = module.main([name, *map(str, words)])
    calls = [[*line["calls"]] for line in FinishedRun(tmp_path / "run").metrics]
    assert len(calls) == len(lines) + sum(updates(calls)) * (name == "keep_the_best")
    assert HOLDS[name](lines, calls), (lines, calls)


def test_all_are_tried() -> None:
    assert len(HOLDS) == 12
    assert module.PROGRAMS.keys() == HOLDS.keys()
