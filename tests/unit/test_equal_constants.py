"""Constants that two places have are equal: Python and C++, or engine and planner; one does not read the other."""

import re
from pathlib import Path
from typing import get_args

import pytest

import realhf
from realhf.architecture.decoding import PAGE_TOKENS
from realhf.cpu.native import kernels
from realhf.planning.model.communicators import MOVES
from realhf.planning.problem import tables

PROBLEM = Path(realhf.__file__).parents[1] / "csrc/search/problem.h"


def constant(name: str) -> float:
    """The value of a `constexpr` of the problem's header: a number, or 1 shifted left."""
    found = re.search(rf"^constexpr [\w:]+ {name} = (?:1 << (\d+)|([\d.e]+));", PROBLEM.read_text(), re.MULTILINE)
    assert found is not None, name
    shift, number = found.groups()
    return float(1 << int(shift)) if shift else float(number)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("kMaxCalls", tables.MAX_CALLS),
        ("kMaxDevices", tables.MAX_DEVICES),
        ("kMaxInstances", tables.MAX_INSTANCES),
        ("kMaxParents", get_args(tables.Parents)[1].max_length),
        ("kMaxLabel", get_args(tables.Label)[1].le),
        ("kMaxNumber", tables.MOST),
        ("kMovesCommunicator", MOVES),
    ],
)
def test_limits_of_a_planning_problem(name: str, ours: int) -> None:
    assert constant(name) == ours


@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
def test_pages_of_the_kv_cache() -> None:
    assert kernels.PAGE == PAGE_TOKENS


@pytest.mark.parametrize(
    "name",
    [
        "PREFILL_TOKENS",
        "SHORTEST_SHARED",
        "OPTIMIZER_ELEMENTS",
        "LOGITS_BYTES",
        "GPU_LOGITS_BYTES",
        "logits_tile",
        "RING_BYTES",
    ],
)
def test_engine_and_planner_read_one_definition_of_what_both_follow(name: str) -> None:
    package = Path(realhf.__file__).parent
    taken = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if re.search(rf"^from realhf\.architecture\.chunks import .*\b{name}\b", path.read_text(), re.MULTILINE)
    }
    assert taken > {"planning"}, "the planner, and who computes"
