"""The fields of an experiment as the options that set them on a command line."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import tyro

from realhf.api.experiment import OptimizerConfig
from realhf.api.script.experiment import ScriptExperiment
from realhf.base.errors import UserError
from realhf.base.options import EVALUATION, TRAINING, Common, Option, OptionField, declarations

Names = tuple[str, ...]
# A word that may be the name of a field, neither quoted nor part of a path or an option, and whether a value follows:
# `=value`, or the number that a range excludes. Options that are on or off take no "=True".
_FIELD = re.compile(
    r"(?<![\w./'\"`-])(?P<name>[a-z]\w*)(?![\w/'\"`-]|\.\w)"
    r"(?P<value>=True\b|(?==[^=])|(?= (?:-?[\d.]+(?:e[-+]?\d+)?|nan|-?inf) is not ))?"
)
# The fields of scripts that one without training has no use for.
_OF_TRAINING = ("steps", "mini_batches", "eval_data", "eval_every_steps", "eval_batch_size", "eval_temperature")


def flags_of(cls: type[Any]) -> Mapping[str, list[str]]:
    """By the name of a field, without those that it lies in, the options that set fields of this name."""
    found: dict[str, list[str]] = {}
    for one in experiment_fields(cls):
        plain = one.flag.replace("[no-]", "")
        found.setdefault(plain.rpartition(".")[2].removeprefix("--").replace("-", "_"), []).append(plain)
    return found


@contextmanager
def named_as_typed(cls: type[Any], words: Sequence[str] = ()) -> Iterator[None]:
    """Has a UserError call the fields of the experiment as `as_typed` does."""
    try:
        yield
    except UserError as error:
        error.args = (as_typed(str(error), cls, words),)
        raise


def as_typed(text: str, cls: type[Any], words: Sequence[str] = ()) -> str:
    """The text with the options that set an experiment's fields in place of their names. A name that several fields
    have, or that checkpoints have too, stands for those that the `words` of a command line give; else it stays."""
    given = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    options = {}
    for name, flags in flags_of(cls).items():
        is_one = len(flags) == 1 and not flags[0].startswith("--architecture.")
        options[name] = flags[0] if is_one else " or ".join(flag for flag in flags if flag in given)
    return _FIELD.sub(partial(_option, options), text)


def _option(options: Mapping[str, str], found: re.Match[str]) -> str:
    """What stands in place of a word. A word without "_", such as "beta", is a name only where a message begins with it
    and a value, or `where: ` stands before it and the number that a range excludes."""
    before, behind = found.string[: found.start()], found.string[found.end() :]
    begins = not before or (before.endswith(": ") and behind.startswith(" "))
    is_name = "_" in found["name"] or (begins and found["value"] is not None)
    return (is_name and options.get(found["name"])) or found[0]


def experiment_fields(cls: type[Any]) -> Iterator[OptionField]:
    """The fields of an experiment's dataclass that a command line can set, by the names that tyro gives them. Those of
    optimizers are left out for models that the script only reads, and those of training where it only evaluates; what
    is left stands there under the heading of evaluation."""
    is_script = issubclass(cls, ScriptExperiment)
    untrained = cls.untrained() if is_script else frozenset[str]()
    evaluates_only = is_script and cls.evaluates_only()
    unused = _OF_TRAINING if evaluates_only else ()
    of_optimizer = {one.name for one in fields(OptimizerConfig)} | {"with_optimizer"}
    for path, one in _within(cls):
        if path[0] not in unused and not (path[0] in untrained and path[-1] in of_optimizer):
            if evaluates_only and one.option.group == TRAINING:
                one = replace(one, option=replace(one.option, group=EVALUATION))
            yield one


def _within(
    of: type[Any], values: Any = None, path: Names = (), names: Names = ()
) -> Iterator[tuple[Names, OptionField]]:
    """The fields of a dataclass and of those in it, each with its path. `values`: has their defaults, where it is not
    None. `names`: the parts of an option's name that come before theirs."""
    known = declarations(of)
    for one in fields(of):
        declared, about = known[one.name]
        if tyro.conf.Suppress in about:
            continue
        default = _default(one) if values is None else getattr(values, one.name)
        is_named = not any(getattr(argument, "name", None) == "" for argument in about)
        inner, outer = (*path, one.name), (*names, one.name.replace("_", "-")) if is_named else names
        if isinstance(declared, type) and is_dataclass(declared):
            yield from _within(declared, None if default is inspect.Parameter.empty else default, inner, outer)
            continue
        option = next((argument for argument in about if isinstance(argument, Option)), Common(""))
        heading = option.group or (path[0] if path else "fields")
        last = f"[no-]{outer[-1]}" if default is True else outer[-1]
        flag = f"--{'.'.join((*outer[:-1], last))}"
        yield inner, OptionField(flag=flag, type=declared, default=default, option=replace(option, group=heading))


def _default(one: Field[Any]) -> Any:
    factory: Any = one.default_factory
    if factory is not MISSING:
        needed = is_dataclass(factory) and any(each.default is each.default_factory for each in fields(factory))
        return inspect.Parameter.empty if needed else factory()
    return inspect.Parameter.empty if one.default is MISSING else one.default
