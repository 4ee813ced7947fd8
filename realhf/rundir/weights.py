"""The values of a model's parameters as a checkpoint notes them: a sum for each parameter."""

from collections.abc import Mapping

import msgspec

from realhf.geometry.boxes import Box


class SavedWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of a model's parameters. `sums` has by parameter the bit sum of all its elements, modulo 2^64, in
    hexadecimal digits (`realhf.realloc.execute.checksum.ParameterSums`). Sums of other dtypes cannot be compared."""

    version: int
    dtype: str
    sums: dict[str, str]

    @classmethod
    def of(cls, version: int, dtype: str, sums: Mapping[str, int]) -> "SavedWeights":
        return cls(version=version, dtype=dtype, sums={name: f"{total:016x}" for name, total in sums.items()})

    def numbers(self) -> dict[str, int]:
        """The sums by parameter. Raises ValueError if one is no such number."""
        return {name: int(total, 16) for name, total in self.sums.items()}


def is_optimizer_state(box: Box) -> bool:
    """Whether a box of a trained model, which has one version of its parameters, is no parameter."""
    return "@" in box.name
