"""Which communicators a call needs, and by what two layouts share one: by hand."""

from dataclasses import replace

import pytest

from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, ModelInterfaceType
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.model.communicators import Axis, CommunicatorLabels, Key, axes_used, group_key, of_all_devices
from tests.unit.planning.graphs import TINY, call

TIED = replace(TINY, tied_embeddings=True)
WHOLE = ParallelStrategy(2, 2, 2)


@pytest.mark.parametrize(
    ("kind", "strategy", "gathers", "axes"),
    [
        (TRAIN_STEP, ParallelStrategy(), False, set()),
        (TRAIN_STEP, ParallelStrategy(dp=2), False, {"data", "model"}),
        (TRAIN_STEP, ParallelStrategy(tp=2), True, {"tensor", "model"}),
        (TRAIN_STEP, ParallelStrategy(pp=2), False, {"next", "model", "tied"}),
        (TRAIN_STEP, WHOLE, False, {"tensor", "next", "data", "model", "tied"}),
        (INFERENCE, WHOLE, False, {"tensor", "next"}),
        (GENERATE, WHOLE, False, {"tensor", "next"}),
        (INFERENCE, WHOLE, True, {"tensor", "next", "data"}),
        (INFERENCE, ParallelStrategy(pp=3), False, {"next", "previous"}),
        (TRAIN_STEP, ParallelStrategy(pp=4), False, {"next", "previous", "model", "tied"}),
        (INFERENCE, ParallelStrategy(dp=2), False, set()),
        (GENERATE, ParallelStrategy(dp=2), True, {"data"}),
    ],
)
def test_axes_along_which_a_call_communicates(
    kind: ModelInterfaceType, strategy: ParallelStrategy, gathers: bool, axes: set[Axis]
) -> None:
    """Only an embedding that both ends of a pipeline have is exchanged between them."""
    for model, own in ((TIED, axes), (TINY, axes - {"tied"})):
        found = axes_used(call("m", model, kind, "x"), strategy, gathers_parameters=gathers)
        assert len(found) == len(own)
        assert set(found) == own


@pytest.mark.parametrize(
    ("strategy", "axis", "digits", "first"),
    [
        # Ranks of a tensor-parallel group are neighbours, then come data-parallel ranks, then stages.
        (ParallelStrategy(4, 2, 3), "tensor", ((1, 2),), 1),
        (ParallelStrategy(4, 2, 3), "data", ((2, 4),), 5),
        (ParallelStrategy(4, 2, 3), "next", ((8, 3),), 13),
        (ParallelStrategy(4, 2, 3), "previous", ((8, 3),), 13),
        (ParallelStrategy(4, 2, 3), "tied", ((16, 2),), 5),
        (ParallelStrategy(4, 2, 3), "model", ((1, 24),), 13),
        (ParallelStrategy(4, 1, 3), "data", ((1, 4),), 1),
        # With micro data-parallel groups tensor-parallel peers are as far apart as their first number says.
        (ParallelStrategy(4, 2, 1, micro_dp=(2, 1)), "tensor", ((2, 2),), 1),
        (ParallelStrategy(4, 2, 1, micro_dp=(2, 1)), "data", ((1, 2), (4, 2)), 5),
        (ParallelStrategy(4, 2, 1, micro_dp=(4, 1)), "tensor", ((4, 2),), 5),
        (ParallelStrategy(4, 2, 1, micro_dp=(4, 1)), "data", ((1, 4),), 1),
        (ParallelStrategy(4, 2, 1, micro_dp=(1, 2)), "data", ((2, 4),), 5),
        (ParallelStrategy(4, 2, 1, micro_dp=(2, 2)), "data", ((1, 2), (4, 2)), 5),
        (ParallelStrategy(8, 2, 1, micro_dp=(2, 2)), "data", ((1, 2), (4, 4)), 5),
        (ParallelStrategy(12, 2, 1, micro_dp=(2, 2)), "data", ((1, 2), (4, 6)), 13),
    ],
)
def test_keys_are_the_digits_of_a_rank_that_differ(
    strategy: ParallelStrategy, axis: Axis, digits: tuple[tuple[int, int], ...], first: int
) -> None:
    """On a mesh that begins at device 37; what counts of that is what is left beside whole periods of the largest."""
    key = group_key(Layout(DeviceMesh(37, strategy.size), strategy), axis)
    assert key == (axis if axis in ("next", "previous") else "", digits, first)


def key(number: int) -> Key:
    return "", ((1, 2),), number


def test_equal_keys_have_equal_labels() -> None:
    """Ascending, behind the three of all devices, as they are first seen."""
    labels = CommunicatorLabels([2, 0])
    assert labels.of([key(5)]) == (0, 2, 3)
    assert labels.of([key(1), key(5)]) == (0, 2, 3, 4)
    assert labels.of([key(7), key(1)]) == (0, 2, 4, 5)
    assert labels.of([key(1), key(1)]) == (0, 2, 4)
    assert labels.of([]) == (0, 2)
    assert labels.of([key(number) for number in (20, 21, 22, 5)]) == (0, 2, 3, 6, 7, 8)
    assert labels.of([key(22), key(5)]) == (0, 2, 3, 8)
    assert CommunicatorLabels([]).of([key(1)]) == (3,)


def test_all_devices_have_the_world_and_data_between_calls() -> None:
    """And moves of parameters, where there are any; one device has none."""
    assert of_all_devices(2, moves=True) == (0, 1, 2)
    assert of_all_devices(2, moves=False) == (0, 2)
    assert of_all_devices(1, moves=True) == of_all_devices(1, moves=False) == ()
