"""Several versions of a model's parameters, one of which computes: for rollouts by weights of some steps ago."""

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE_ELEMENTS = 2**20


class ParameterVersions:
    """The vector with which a model computes, and others of its arrangement with other versions of the values.

    A version is a number that the owner gives, here how many steps of training the values have seen. Nothing is
    computed with the others before `select` has exchanged values with one of them: what is built on the model's own
    vector, views, modules and graphs, stays as it is.

    Args:
        flat: the model's own vector. It has the first of `numbers`, and its values are still to come.
        numbers: the versions there are.
    """

    def __init__(self, flat: Tensor, numbers: Sequence[int] = (0,)):
        self._flat = flat.detach()
        self._others = [torch.zeros_like(self._flat) for _ in numbers[1:]]
        self._numbers = list(numbers)

    @property
    def current(self) -> int:
        """The version that computes; settable, when its values were written."""
        return self._numbers[0]

    @current.setter
    def current(self, number: int) -> None:
        self._numbers[0] = number

    @property
    def numbers(self) -> list[int]:
        """All versions, the lowest first."""
        return sorted(self._numbers)

    @property
    def others(self) -> list[Tensor]:
        """The vectors beside the model's own."""
        return self._others

    def vector(self, number: int) -> Tensor:
        """Where a version lies. Raises LookupError where it is not kept."""
        if number not in self._numbers:
            raise LookupError(f"the weights of version {number} are asked for, and here are those of {self.numbers}")
        return [self._flat, *self._others][self._numbers.index(number)]

    def select(self, number: int) -> bool:
        """Makes a version the one that computes; returns whether it was another one before.

        Raises:
            LookupError: there is no such version.
        """
        kept = self.vector(number)
        if kept is self._flat:
            return False
        for a, b in zip(self._flat.split(PIECE_ELEMENTS), kept.split(PIECE_ELEMENTS), strict=True):
            before = a.clone()
            a.copy_(b)
            b.copy_(before)
        place = self._numbers.index(number)
        self._numbers[0], self._numbers[place] = number, self._numbers[0]
        return True

    def fill(self) -> None:
        """All versions get the values of the one that computes."""
        for other in self._others:
            other.copy_(self._flat)

    def by_age(self) -> list[Tensor]:
        """The vectors of all versions, the lowest number first."""
        return [self.vector(number) for number in self.numbers]
