"""The life of a model's parameters over two plain vectors: every way from one state to another, and none besides."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from realhf.engine.residency.residency import Boxes, Residency, Where
from realhf.geometry.boxes import Box

SHAPES = {"a": (3, 4), "b": (5,)}


class Parameters:
    """Two parameters, each in a vector of its own with a number of padding behind it, and what was told of them."""

    def __init__(self, value: float, versions: tuple[int, ...] = (0,)):
        self.vectors = [torch.zeros(13), torch.zeros(6)]
        self.state, self.gradient = torch.full((4,), value), torch.zeros(7)
        self.told: list[str] = []
        self.residency = Residency(
            self.vectors,
            self.held,
            versions=versions,
            states=[self.state],
            gradient=self.gradient,
            on_leaving=lambda: self.told.append("leaving"),
            on_written=lambda: self.told.append("written"),
        )
        for _, tensor in self.held():
            tensor.fill_(value)

    def held(self) -> Boxes:
        views = zip(SHAPES.items(), self.vectors, strict=True)
        return [(Box(name, (0,) * len(shape), shape), vector[:-1].view(shape)) for (name, shape), vector in views]

    @property
    def values(self) -> set[float]:
        return {float(x) for _, tensor in self.residency.readable() for x in tensor.flatten()}

    @property
    def bytes(self) -> int:
        return sum(vector.untyped_storage().nbytes() for vector in (*self.vectors, self.state, self.gradient))


WHOLE = Parameters(0).bytes
PARAMETERS = 19 * 4


def free(of: Parameters) -> None:
    of.residency.free()


def lend(of: Parameters) -> None:
    of.residency.lend_to(Parameters(1).residency)


def offload(of: Parameters) -> None:
    of.residency.offload()


@pytest.mark.parametrize(("leave", "where"), [(free, Where.FREED), (lend, Where.LENT), (offload, Where.OFFLOADED)])
def test_what_is_not_here_is_neither_used_nor_taken_elsewhere(
    leave: Callable[[Parameters], None], where: Where
) -> None:
    of = Parameters(1, versions=(0, 1))
    leave(of)
    assert of.residency.where is where
    assert of.told == ["leaving"]
    uses: list[Callable[[], object]] = [
        of.residency.check_here,
        of.residency.held,
        of.residency.free,
        of.residency.fill_versions,
        lambda: of.residency.select_version(1),
        lambda: of.residency.vectors(0),
        lambda: lend(of),
    ]
    for use in uses if where is Where.OFFLOADED else [*uses, of.residency.offload]:
        with pytest.raises(AssertionError, match=where.value.split(";")[0]):
            use()
    assert of.residency.where is where


def test_freed_parameters_get_memory_again() -> None:
    of = Parameters(1)
    of.residency.free()
    assert of.bytes == WHOLE - PARAMETERS
    of.residency.allocate()
    of.residency.allocate()
    assert of.bytes == WHOLE
    assert of.residency.where is Where.HERE


def test_lent_parameters_are_read_in_the_copy_and_come_back_with_zeros_behind_them() -> None:
    of, copy = Parameters(1), Parameters(1)
    of.residency.lend_to(copy.residency)
    assert of.bytes == WHOLE - PARAMETERS
    for vector in copy.vectors:
        vector.fill_(2)
    assert of.values == {2}
    of.residency.load()  # nothing was offloaded
    assert of.residency.where is Where.LENT
    of.residency.take_back_from(copy.residency)
    copy.residency.free()
    assert of.values == {2}
    assert [float(vector[-1]) for vector in of.vectors] == [0, 0]
    of.residency.take_back_from(copy.residency)  # what is here stays


def test_a_copy_without_all_parts_is_lent_nothing() -> None:
    of, copy = Parameters(1), Parameters(1)
    copy.residency._held = lambda: copy.held()[:1]
    of.residency.lend_to(copy.residency)
    assert of.residency.where is Where.HERE
    assert of.told == []


def test_offloaded_parameters_come_back_with_their_versions_and_states_or_alone() -> None:
    of = Parameters(1, versions=(0, 1))
    of.residency.offload()
    of.residency.offload()
    assert of.bytes == 0
    of.residency.load(states=False)
    assert of.bytes == PARAMETERS
    of.residency.select_version(1)
    assert of.values == {0}
    with of.residency.loaded():
        assert of.bytes == WHOLE
    assert of.residency.where is Where.HERE
    of.residency.offload()
    with of.residency.loaded():
        of.residency.select_version(0)
        assert of.values == {1}
        assert of.state.tolist() == [1] * 4
    assert of.bytes == 0


def test_values_are_copied_to_the_host_again_once_they_have_changed() -> None:
    of = Parameters(1)
    changes: list[Callable[[], None]] = [lambda: None, of.residency.trained, of.residency.written]
    seen = []
    for change in changes:
        for vector in of.vectors:
            vector[:-1] = 5
        change()
        of.residency.offload()
        of.residency.load()
        seen.append(of.values)
        for vector in of.vectors:
            vector[:-1] = 7  # behind its back
        of.residency.offload()
        of.residency.load()
        assert of.values == {5}
    assert seen == [{5}] * 3
    assert of.told.count("written") == 1


def test_a_version_begins_where_another_one_ends() -> None:
    of = Parameters(1, versions=(3, 4))
    assert (of.residency.version, of.residency.versions) == (3, [3, 4])
    of.residency.fill_versions()
    of.residency.begin_at_version(5)
    of.held()[0][1].fill_(9)
    assert (of.residency.version, of.residency.versions) == (5, [4, 5])
    assert _values(of.residency.readable(4)) == {1}
    of.residency.select_version(4)
    assert of.told == ["written"]
    of.residency.select_version(4)
    assert of.told == ["written"]
    assert of.values == {1}
    assert _values(of.residency.readable(5)) == {1, 9}
    with pytest.raises(AssertionError, match="version 5 is kept beside 4"):
        of.residency.begin_at_version(5)
    with pytest.raises(LookupError, match=r"version 3 are asked for, and here are those of \[4, 5\]"):
        of.residency.readable(3)


def _values(boxes: list[tuple[Box, Tensor]]) -> set[float]:
    return {float(x) for _, tensor in boxes for x in tensor.flatten()}
