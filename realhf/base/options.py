"""Options: fields that a user sets by name. Help, range and place in the help stand with the field:

steps: Annotated[int, Option("steps of training", range=(1, None))] = 100
"""

import inspect
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from typing_extensions import Doc

from realhf.base.errors import UserError
from realhf.base.numbers import check_range

# Headings of an experiment's fields in the help, in its order.
HEADINGS = (
    NEEDED := "model, data and reward",
    TRAINING := "training",
    GENERATION := "generation",
    ALGORITHM := "algorithm",
    EVALUATION := "evaluation",
    DATA := "the data",
    REWARD := "the reward",
    COMPUTATION := "computation",
    RANDOM_WEIGHTS := "random weights (without --model)",
)


@dataclass(frozen=True)
class Option(Doc):
    """What is declared of an option; tyro shows it in its own help too.

    documentation: what it does. The help of a command adds the default, unless the text names one.
    range: the least and the largest number; None: no bound on that side.
    unit: of the number, for errors.
    metavar: stands for the value in the help.
    flag: the name on the command line of a request's option, by default `--field-name`.
    group: the heading of its place in the help, by default the `HEADING` of the class that declares it.
    is_list: one option takes several values; other tuples are options that may be repeated.
    """

    documentation: str
    _: KW_ONLY
    range: tuple[float | None, float | None] = (None, None)
    unit: str = ""
    metavar: str | None = None
    flag: str = ""
    group: str = ""
    is_list: bool = False


class Common(Option):
    """An option that `--help` shows; `--help-all` shows every option."""


@dataclass(frozen=True, kw_only=True)
class OptionField:
    """A field that is an option. `type` is that of its values, and `default` is `inspect.Parameter.empty` where it has
    to be given."""

    flag: str
    type: Any
    default: Any
    option: Option

    @property
    def attribute(self) -> str:
        """The name of its value among the parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")


@cache
def options_in(of: type) -> Mapping[str, OptionField]:
    """The options of a dataclass or of a msgspec Struct, by field.

    The type of an option is bool, int, float, str, Path, a literal of strings, one of these or None, or a tuple of
    strings or paths.
    """
    parameters, found = inspect.signature(of).parameters, {}
    for name, (hint, about) in declarations(of).items():
        option = next((one for one in about if isinstance(one, Option)), None)
        if option is not None:
            flag = option.flag or f"--{name.replace('_', '-')}"
            found[name] = OptionField(flag=flag, type=hint, default=parameters[name].default, option=option)
    return found


def declarations(of: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """By field the type of its values, None left out, and what is annotated beside it. A field that is repeated for
    another default keeps its option, and an option has the heading of the class that declares it."""
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for cls in reversed(of.__mro__):
        hints = get_type_hints(cls, include_extras=True)
        for name in vars(cls).get("__annotations__", {}):
            hint, *about = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
            parts = [one for one in get_args(hint) if one is not NoneType]
            declared = parts[0] if NoneType in get_args(hint) and len(parts) == 1 else hint
            heading = getattr(cls, "HEADING", "")
            own = [replace(one, group=one.group or heading) if isinstance(one, Option) else one for one in about]
            found[name] = declared, tuple(own) or found.get(name, (None, ()))[1]
    return found


def flags(of: type) -> dict[str, bool]:
    """Whether the option takes a value, by the name that it has on the command line."""
    return {one.flag: one.type is not bool for one in options_in(of).values()}


def check_options(of: type, values: Mapping[str, Any], where: str | None = None) -> None:
    """Raises UserError if one of the `values` is out of the range of the option in `of`, or neither one of its choices
    nor its default; None is in every range. Errors call it by its name on the command line, or by `where` and the name
    of its field."""
    for name, one in options_in(of).items():
        value, shown = values.get(name, one.default), one.flag if where is None else f"{where}{name}"
        low, high = one.option.range
        if (low, high) != (None, None) and values.get(name) is not None:
            check_range(shown, value, low, high, one.option.unit)
        if get_origin(one.type) is Literal and value not in (*get_args(one.type), one.default):
            raise UserError(f"{shown}={value!r} is not known; choose one of {', '.join(get_args(one.type))}")


class Options:
    """A dataclass of options, whose ranges and choices are checked at construction. Raises UserError. `WHERE`: see
    `check_options`; `HEADING`: of its options in the help."""

    WHERE: ClassVar[str | None] = None
    HEADING: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_options(type(self), vars(self), self.WHERE)


class Settings(Options):
    """Options of an experiment. Errors call them by the names of their fields."""

    WHERE = ""
