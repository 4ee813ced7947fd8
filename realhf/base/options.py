"""Options: fields of a request that the command line has too. Name, default, help and range stand with the field."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from realhf.base.numbers import check_range

_METADATA = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """`flag`: its name on the command line. `bounds`: the least and the largest value, if it is a number with any."""

    flag: str
    help: str
    metavar: str | None = None
    bounds: tuple[float, float] | None = None
    unit: str = ""

    @property
    def attribute(self) -> str:
        """The name of its value among the parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")


def option(default: Any, help: str, **about: Any) -> Any:
    """A field of a frozen dataclass that is an option; `about`: see `Option`, the flag is by default `--field-name`.
    One whose default is `dataclasses.MISSING` has to be given.

    Its type is bool, int, float, str, Path, a literal of strings, one of these or None, or a tuple of strings or paths,
    which is given as an option that may be repeated, or, where its default is None, by one with several values.
    """
    return field(default=default, metadata={_METADATA: {"help": help, **about}})


def options_in(of: type) -> Mapping[str, Option]:
    """The options of a dataclass, by field."""
    found = {}
    for one in fields(of):
        if about := one.metadata.get(_METADATA):
            found[one.name] = Option(**{"flag": f"--{one.name.replace('_', '-')}", **about})
    return found


def flags(of: type) -> dict[str, bool]:
    """Whether the option takes a value, by the name that it has on the command line."""
    types = get_type_hints(of)
    return {option.flag: types[name] not in (bool, bool | None) for name, option in options_in(of).items()}


class Options:
    """A dataclass of options. Raises UserError at construction if one is out of its range; None is in every range."""

    def __post_init__(self) -> None:
        for name, one in options_in(type(self)).items():
            value = getattr(self, name)
            if one.bounds is not None and value is not None:
                check_range(one.flag, value, *one.bounds, one.unit)
