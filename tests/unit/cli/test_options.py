"""Fields of a dataclass as arguments of a command, and back."""

import argparse
import contextlib
import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Literal

import pytest

import realhf
from realhf.base.errors import UserError
from realhf.base.options import Options, flags, option, options_in
from realhf.cli.options import add_options, options_of


@dataclass(frozen=True, kw_only=True)
class Asked(Options):
    count: int = option(3, "how many", bounds=(1, 5), unit="times")
    limit_s: float | None = option(None, "how long")
    kind: Literal["plain", "fancy"] = option("plain", "which", flag="--of-kind")
    loud: bool = option(False, "say more")
    quiet: bool | None = option(None, "say less")
    files: tuple[Path, ...] = option((), "a file; may be repeated", flag="--file")
    keys: tuple[str, ...] | None = option(None, "several")
    inner: int = 7


def parsed(*words: str) -> Asked:
    command = argparse.ArgumentParser(exit_on_error=False)
    add_options(command, Asked)
    return options_of(Asked, command.parse_args(words))


def test_without_words_all_have_their_defaults() -> None:
    assert parsed() == Asked()


def test_words_of_every_type() -> None:
    words = "--count 5 --limit-s 1.5 --of-kind fancy --loud --quiet --file a --file b --keys x y"
    assert parsed(*words.split()) == Asked(
        count=5, limit_s=1.5, kind="fancy", loud=True, quiet=True, files=(Path("a"), Path("b")), keys=("x", "y")
    )


@pytest.mark.parametrize("words", [("--of-kind", "odd"), ("--count", "many")])
def test_a_wrong_word_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(argparse.ArgumentError):
        parsed(*words)


def test_a_number_out_of_its_range_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="--count 6 is not from 1 to 5 times; give a number in that range"):
        parsed("--count", "6")


def test_flags_say_which_take_a_value() -> None:
    assert flags(Asked) == {
        "--count": True, "--limit-s": True, "--of-kind": True, "--loud": False, "--quiet": False, "--file": True,
        "--keys": True,
    }  # fmt: skip


def option_classes() -> Iterator[type]:
    """Every dataclass of the package that has options."""
    seen = set()
    for module in pkgutil.walk_packages(realhf.__path__, "realhf."):
        if module.name.endswith(("__main__", "._aligned")):
            continue
        with contextlib.suppress(ImportError):  # of packages that are for GPUs
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, type) and is_dataclass(value) and value not in seen and options_in(value):
                    seen.add(value)
                    yield value


def test_defaults_are_what_the_help_says() -> None:
    """A switch is off until it is given."""
    said = 0
    for of in option_classes():
        defaults = {one.name: one.default for one in fields(of)}
        for name, one in options_in(of).items():
            default, words = defaults[name], re.search(r"\(default:? ([\w.+-]+)\)", one.help)
            assert default is not True, f"{of.__name__}.{name}"
            if words and default not in (None, MISSING):
                said += 1
                number = isinstance(default, int | float)
                assert (float(words[1]) if number else words[1]) == default, f"{of.__name__}.{name}: {one.help}"
    assert said > 10
