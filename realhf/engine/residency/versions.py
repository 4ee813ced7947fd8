"""Several versions of a model's parameters, for rollouts with the weights of some steps ago. One version computes."""

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE_ELEMENTS = 2**20


class ParameterVersions:
    """The vectors with which a model computes, and others of the same sizes with other versions of the values.

    A version is a number. Its owner chooses it; here it says how many training steps the values have seen. Only the
    model's own vectors compute: `select` exchanges their values with those of another version, so the views, modules
    and graphs that are built on them stay as they are.
    """

    def __init__(self, own: Sequence[Tensor], numbers: Sequence[int] = (0,)):
        """`own`: the model's own vectors. They get the first of `numbers`; the values are still to come."""
        own = [vector.detach() for vector in own]
        others = [[torch.zeros_like(vector) for vector in own] for _ in numbers[1:]]
        self._kept = dict(zip(numbers, [own, *others], strict=True))
        self._current = numbers[0]

    @property
    def current(self) -> int:
        """The version that computes."""
        return self._current

    @property
    def numbers(self) -> list[int]:
        """All versions, the oldest first."""
        return sorted(self._kept)

    def all_vectors(self) -> list[Tensor]:
        """The model's own vectors and those beside them."""
        return [vector for vectors in self._kept.values() for vector in vectors]

    def vectors(self, number: int) -> list[Tensor]:
        """The vectors of a version. Raises LookupError where it is not kept."""
        if number not in self._kept:
            raise LookupError(f"the weights of version {number} are asked for, and here are those of {self.numbers}")
        return self._kept[number]

    def begin_at(self, number: int) -> None:
        """The version that computes is `number` from now on: its values were replaced."""
        assert number == self._current or number not in self._kept, f"version {number} is kept beside {self._current}"
        self._kept[number] = self._kept.pop(self._current)
        self._current = number

    def select(self, number: int) -> bool:
        """Makes a version the one that computes; returns whether another one did before.

        Raises:
            LookupError: there is no such version.
        """
        kept, own = self.vectors(number), self._kept[self._current]
        if kept is own:
            return False
        for vector, other in zip(own, kept, strict=True):
            for a, b in zip(vector.split(PIECE_ELEMENTS), other.split(PIECE_ELEMENTS), strict=True):
                before = a.clone()
                a.copy_(b)
                b.copy_(before)
        self._kept[number], self._kept[self._current] = own, kept
        self._current = number
        return True

    def fill(self) -> None:
        """Copies the values of the version that computes to all others."""
        own = self._kept[self._current]
        for vectors in self._kept.values():
            if vectors is not own:
                for vector, value in zip(vectors, own, strict=True):
                    vector.copy_(value)
