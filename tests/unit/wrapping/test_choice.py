"""The plan of a wrapped module: rules, and what is whole although its problem was cut."""

from dataclasses import replace

import pytest

from realhf.base.errors import UserError
from realhf.wrapping.choice import OsdpOptions, choose
from tests.unit.planning.test_operator_rows import operator, problem

OTHERS = operator("others", kind="others", modes=("replicated", "zero1"), most_slices=1)
FOUR = problem(operator("layers.0.up"), operator("layers.1.up"), operator("head"), OTHERS)


def chosen(*rules: tuple[str, str], memory_bytes: int = 2**30) -> dict[str, str]:
    plan = choose([replace(FOUR, memory_bytes=memory_bytes)], OsdpOptions(modes=rules), 2, GROUP)
    return dict(plan.modes)


class Group:
    """Of two ranks; rules are the same on both, so nothing is sent."""

    def size(self) -> int:
        return 2


GROUP = Group()


def test_the_last_rule_holds() -> None:
    assert chosen(("*", "2 sharded"), ("layers.1.up", "replicated + 2 zero1"), ("head", "replicated")) == {
        "layers.0.up": "2 sharded",
        "layers.1.up": "1 replicated + 2 zero1",
        "head": "replicated",
        "others": "zero1",
    }
    assert chosen(("layers.0-1.*", "sharded"))["layers.1.up"] == "sharded"
    assert chosen(("*", "2 replicated"))["others"] == "replicated"


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ((("layers.2.up", "sharded"),), "'layers.2.up' names no operator of the model; they are layers.0.up"),
        ((("others", "2 zero1"),), "'others' can be replicated, zero1 in at most 1 slices, not '2 zero1'"),
        ((("head", "65 zero1"),), "at most 64 slices"),
        ((("*", "shared"),), "'shared' is no mode of an operator"),
    ],
)
def test_rules_that_cannot_be(rules: tuple[tuple[str, str], ...], text: str) -> None:
    with pytest.raises(UserError, match=text):
        chosen(*rules)


def test_rules_that_do_not_fit() -> None:
    # Four operators with 800 + 800 + 1600 bytes.
    with pytest.raises(UserError, match="the smallest memory that does is 12800 bytes"):
        chosen(("*", "replicated"), memory_bytes=12799)
    assert chosen(("*", "replicated"), memory_bytes=12800)["head"] == "replicated"


def test_one_rank_shares_with_nobody() -> None:
    plan = choose([FOUR], OsdpOptions(slices=4), None, None)
    assert {text for _, text in plan.modes} == {"replicated"}
    assert plan.batch_size == 512
    with pytest.raises(UserError, match="slices 65 is not from 1 to 64"):
        OsdpOptions(slices=65)


def test_given_modes_take_the_fastest_recomputation_that_fits() -> None:
    """Four operators with 3,200 bytes, and 100 or 10 a sample."""
    plain = replace(FOUR, extra_bytes_per_sample=100, extra_seconds_per_sample=1.0)
    again = replace(plain, extra_bytes_per_sample=10, extra_seconds_per_sample=1.5, recomputed=("layers.0",))

    def recomputed(memory_bytes: int) -> tuple[str, ...]:
        problems = [replace(each, memory_bytes=memory_bytes) for each in (plain, again)]
        return choose(problems, OsdpOptions(modes="replicated"), 2, GROUP).recomputed

    assert recomputed(12800 + 200) == ()
    assert recomputed(12800 + 199) == ("layers.0",)
    with pytest.raises(UserError, match="the smallest memory that does is 12820 bytes"):
        recomputed(12800 + 19)
