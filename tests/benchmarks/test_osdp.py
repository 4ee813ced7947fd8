"""What `benchmarks/osdp.py` makes of its measurements, by hand; its quick form."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
cases = importlib.import_module("lib.osdp_cases")
ranks = importlib.import_module("lib.osdp_ranks")
paired = importlib.import_module("lib.paired")
shapes = importlib.import_module("lib.osdp_shapes")
ROUNDS = 20


def test_a_ratio_is_that_of_each_round() -> None:
    """A machine that is slower in some rounds strikes both ways; the median leaves out what struck one."""
    second = [1.0 + round_ % 5 for round_ in range(ROUNDS)]
    first = [1.5 * seconds for seconds in second]
    first[3] *= 10
    ratio = paired.paired_ratio(first, second)
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(1.5),) * 3


def test_the_interval_is_that_of_the_median() -> None:
    """Of 100 rounds with ratios 1 to 100 the median's interval is about 50 +- 1.96 x 1.25 x 29 / 10."""
    ratio = paired.paired_ratio([float(n) for n in range(1, 101)], [1.0] * 100)
    assert ratio.value == 50.5
    assert ratio.low == pytest.approx(40, abs=3)
    assert ratio.high == pytest.approx(61, abs=3)


def task(limits: tuple[float, ...] = (0.5,)) -> Any:
    return ranks.Task(shape=shapes.QUICK_SHAPES[0], ranks=2, limits=limits, timing_s=1.0)


def way(seconds: float, planned_bytes: int, **fields: Any) -> Any:
    return ranks.Measured(seconds=[seconds] * ROUNDS, planned_s=seconds, planned_bytes=planned_bytes, **fields)


def outcome(chosen: Any, *, fsdp2: float = 3.0) -> Any:
    """Under a limit of 250 bytes all replicated does not fit."""
    ways = {
        "all replicated": way(1.0, 400, sent_bytes=40),
        "all zero1": way(1.0, 300, sent_bytes=40),
        "all sharded": way(2.0, 200, sent_bytes=58),
        "chosen at 0.5": chosen,
        ranks.FSDP2: ranks.Measured(seconds=[fsdp2] * ROUNDS),
    }
    return ranks.Outcome(ways=ways, limits=[250], chosen=["chosen at 0.5"], splits=[])


@pytest.mark.parametrize(
    ("seconds", "fsdp2", "wrong"),
    [
        (1.5, 3.0, []),
        (2.04, 3.0, []),
        (2.1, 3.0, ["the best that fits, all sharded"]),
        (1.5, 1.4, ["the best that fits, FSDP2", "chosen beside FSDP2"]),
    ],
)
def test_when_a_choice_holds(seconds: float, fsdp2: float, wrong: list[str]) -> None:
    rows = list(cases.time_cases(task(), outcome(way(seconds * 1.0, 240), fsdp2=fsdp2)))
    failed = [row["case"] for row in rows if not row["holds"]]
    assert len(failed) == len(wrong)
    assert all(words in name for words, name in zip(wrong, failed, strict=True))
    # Two ranks with four samples each.
    assert rows[0]["value"] == pytest.approx(seconds / 8)


def test_a_wide_interval_does_not_hold() -> None:
    noisy = way(0.0, 240)
    noisy.seconds = [1.0 + 2.0 * (number % 2) for number in range(ROUNDS)]
    row = next(iter(cases.time_cases(task(), outcome(noisy))))
    assert row["interval"][1] - row["interval"][0] > cases.WIDEST
    assert not row["holds"]


def test_predictions_memory_and_bytes_hold_within_their_parts() -> None:
    def says(**fields: Any) -> list[bool]:
        found = outcome(way(1.5, 240, **fields))
        found.ways["chosen at 0.5"].seconds = [1.5 * 1.19] * ROUNDS
        rows = [
            *(row for row in cases.time_cases(task(), found) if "chosen at 0.5" in row["case"]),
            *cases.memory_cases(task(), found),
            *cases.bytes_cases(task(), found),
        ]
        return [row["holds"] for row in rows]

    near = {"planned_state_bytes": 100, "planned_sent_bytes": 100.0}
    assert says(state_bytes=104, sent_bytes=96, **near) == [True] * 4
    assert says(state_bytes=106, sent_bytes=94, **near) == [True, False, False, True]


@pytest.mark.slow
def test_the_quick_form() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/osdp.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])["results"]
    exact = [row for row in rows if "bytes sent" in row["case"] or "peak of states" in row["case"]]
    assert len(exact) == 2 * 2 * 6 + 2
    assert all(row["holds"] for row in exact)
    together = [row for row in rows if "on a slow link" in row["case"]]
    assert [word in row["case"] for word, row in zip(("overlap", "recomputation"), together, strict=True)] == [True] * 2
