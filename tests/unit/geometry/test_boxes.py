"""Parts of boxes, by hand."""

import pytest

from realhf.geometry.boxes import Box

# Rows 2 to 4 and columns 10 to 13.
BOX = Box("a", (2, 10), (3, 4))


def test_the_size_of_a_box() -> None:
    assert BOX.size == 12
    assert Box("a", (), ()).size == 1
    assert Box("a", (3,), (5,)).size == 5


@pytest.mark.parametrize(
    ("other", "common"),
    [
        (Box("a", (2, 10), (3, 4)), Box("a", (2, 10), (3, 4))),
        (Box("a", (0, 0), (99, 99)), Box("a", (2, 10), (3, 4))),
        (Box("a", (3, 11), (1, 2)), Box("a", (3, 11), (1, 2))),
        (Box("a", (4, 13), (9, 9)), Box("a", (4, 13), (1, 1))),
        (Box("a", (0, 0), (3, 11)), Box("a", (2, 10), (1, 1))),
        (Box("a", (3, 0), (9, 12)), Box("a", (3, 10), (2, 2))),
        (Box("a", (5, 10), (1, 1)), None),
        (Box("a", (0, 10), (2, 1)), None),
        (Box("a", (2, 14), (1, 1)), None),
        (Box("a", (2, 0), (1, 10)), None),
        (Box("b", (2, 10), (3, 4)), None),
    ],
)
def test_the_common_part_of_two_boxes(other: Box, common: Box | None) -> None:
    """Boxes that touch have none, nor have boxes of two parameters."""
    assert BOX.intersect(other) == other.intersect(BOX) == common


@pytest.mark.parametrize(
    ("other", "lies_inside"),
    [
        (BOX, True),
        (Box("a", (3, 11), (1, 2)), True),
        (Box("a", (4, 13), (1, 1)), True),
        (Box("a", (1, 10), (2, 2)), False),
        (Box("a", (2, 9), (2, 2)), False),
        (Box("a", (4, 10), (2, 2)), False),
        (Box("a", (2, 12), (2, 3)), False),
        (Box("b", (3, 11), (1, 2)), False),
    ],
)
def test_whether_a_box_contains_another(other: Box, lies_inside: bool) -> None:
    assert BOX.contains(other) is lies_inside


def test_a_part_along_a_dimension_and_its_place_in_a_holder() -> None:
    assert BOX.between(3, 5, 0) == Box("a", (3, 10), (2, 4))
    part = BOX.between(11, 14, 1)
    assert part == Box("a", (2, 11), (3, 3))
    assert Box("a", (1, 2, 3), (4, 5, 6)).between(3, 4, 1) == Box("a", (1, 3, 3), (4, 1, 6))
    assert part.slices_in(BOX) == (slice(0, 3), slice(1, 4))
    assert part.slices_in(Box("a", (0, 11), (9, 9))) == (slice(2, 5), slice(0, 3))
