"""The fields of a `config.json`, each checked when it is read."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from realhf.architecture.model import Activation
from realhf.base.errors import UserError
from realhf.base.numbers import check_range

T = TypeVar("T")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_MAX_REAL = 10**12  # above every range that is checked where a field is used


class Fields:
    """The fields of a config.json, each checked when it is read; a null counts as missing."""

    def __init__(self, content: Mapping[str, Any], path: Path | str):
        self.content, self.path = content, path

    def number(self, name: str, default: int | None = None) -> int:
        value = self.content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            what = "is missing" if name not in self.content else f"is {shown(value)}"
            raise UserError(f"{self.path}: {name} {what}; it must be a whole number of at least 1")
        return value

    def real(self, name: str, default: float) -> float:
        value = self.content.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{self.path}: {name} is {shown(value)}; it must be a number")
        return float(check_range(f"{self.path}: {name}", value, -_MAX_REAL, _MAX_REAL))

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"{self.path}: {name} is {shown(value)}; it must be true or false")
        return value

    def choice(self, name: str, default: str, known: Mapping[str, T]) -> T:
        value = self.content.get(name) or default
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{self.path}: {name}={shown(value)} is not supported, only {', '.join(known)}")
        return known[value]

    def activation(self, name: str, default: str) -> Activation:
        return self.choice(name, default, _ACTIVATIONS)

    def section(self, name: str) -> "Fields | None":
        value = self.content.get(name)
        return Fields(value, f"{self.path}: {name}") if isinstance(value, Mapping) else None

    def refuse(self, name: str, *allowed: object) -> None:
        """Raises UserError where a field is given and is none of the `allowed` values: it would change the model."""
        value = self.content.get(name)
        if value is not None and value not in allowed:
            raise UserError(
                f"{self.path}: {name}={shown(value)} is not supported; choose a checkpoint with {name}="
                + " or ".join(map(repr, allowed))
            )


def shown(value: object) -> str:
    """A value from outside, for a message: cut where it is long or nested deeply."""
    return reprlib.repr(value)
