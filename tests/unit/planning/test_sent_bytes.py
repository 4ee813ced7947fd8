"""What a plan of modes says that a device sends in a step, against numbers worked out by hand."""

import pytest

from realhf.planning.model.osdp.problem import Links, Mode, Operator, OsdpPlan, OsdpProblem

# In the order of their use; the values of an embedding are gathered for its forward pass alone.
SIZES = {"embedding": 100, "first": 40, "second": 60}


def plan(counts: dict[str, dict[Mode, int]], *, prefetch: bool = False) -> OsdpPlan:
    operators = tuple(
        Operator(
            name=name,
            kind=name,
            parameter_bytes=size,
            gradient_bytes=size,
            optimizer_bytes=2 * size,
            slices=sum(counts[name].values()),
            gathers=1 if name == "embedding" else 2,
        )
        for name, size in SIZES.items()
    )
    links = Links(num_devices=4, latency_s=0.0, seconds_per_byte=0.0)
    problem = OsdpProblem(operators=operators, links=links, memory_bytes=10**6, prefetch=prefetch)
    rows = tuple(tuple(counts[name].get(mode, 0) for mode in problem.modes) for name in SIZES)
    return OsdpPlan(problem=problem, batch=1, slices=rows)


@pytest.mark.parametrize(
    ("mode", "prefetch", "passes"),
    [
        ("replicated", False, 2 * 200),
        ("zero1", True, 2 * 200),
        # Twice 100 of the embedding, and three times the others, but that "second", and with prefetch "first" too, is
        # still there after the forward pass.
        ("sharded", False, 2 * 100 + 3 * 40 + 2 * 60),
        ("sharded", True, 2 * 100 + 2 * 40 + 2 * 60),
    ],
)
def test_one_mode_for_all(mode: Mode, prefetch: bool, passes: int) -> None:
    assert plan({name: {mode: 1} for name in SIZES}, prefetch=prefetch).sent_bytes == passes * 3 / 4


def test_slices_in_several_modes() -> None:
    mixed: dict[str, dict[Mode, int]] = {
        "embedding": {"replicated": 1},
        "first": {"sharded": 1, "zero1": 3},  # slices of 10
        "second": {"zero1": 1},
    }
    # The one sharded slice is still there after the forward pass.
    assert plan(mixed).sent_bytes == (2 * 100 + 2 * 10 + 2 * 30 + 2 * 60) * 3 / 4
    sliced = plan({**mixed, "second": {"sharded": 4}})  # of 15 each, the last one still there
    assert sliced.sent_bytes == (2 * 100 + 3 * 10 + 2 * 30 + 3 * 60 - 15) * 3 / 4
