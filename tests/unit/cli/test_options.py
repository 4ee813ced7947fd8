"""Fields of a dataclass as arguments of a command, and back."""

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from realhf.base.errors import UserError
from realhf.base.options import Option, Options, check_options, flags, options_in
from realhf.cli.command import Command
from realhf.cli.options import add_options, given_in, options_of
from realhf.launch.slurm.script import SlurmOptions
from realhf.lifecycle.request import RecoveryRequest, ReplanRequest
from realhf.planning.model.osdp.request import OsdpRequest
from realhf.planning.request import PlanRequest
from realhf.planning.what_if import WhatIf
from realhf.profiling.measure import ProfileRequest
from realhf.rundir.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class Asked(Options):
    count: Annotated[int, Option("how many", range=(1, 5), unit="times")] = 3
    limit_s: Annotated[float | None, Option("how long")] = None
    kind: Annotated[Literal["plain", "fancy"], Option("which", flag="--of-kind")] = "plain"
    loud: Annotated[bool, Option("say more")] = False
    quiet: Annotated[bool | None, Option("say less")] = None
    files: Annotated[tuple[Path, ...], Option("a file; may be repeated", flag="--file")] = ()
    keys: Annotated[tuple[str, ...] | None, Option("several", is_list=True)] = None
    inner: int = 7


@dataclass(frozen=True, kw_only=True)
class More(Asked):
    count: int = 4
    least: Annotated[float, Option("how much (0: none)", range=(0, None))] = 0.5


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """As `experiment.json` has options."""

    name: str
    many: Annotated[int, Option("how many; default of the cluster", range=(None, 9))] = 3
    files: Annotated[tuple[str, ...], Option("several")] = ()


def command_of(of: type) -> Command:
    command = Command("made", takes_fields=True)
    add_options(command, of)
    return command


def parsed(*words: str) -> Asked:
    command = command_of(Asked)
    command.exit_on_error = False
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


def test_a_field_with_another_default_is_the_same_option() -> None:
    assert options_in(More)["count"].option == options_in(Asked)["count"].option
    assert (More().count, options_in(More)["count"].default) == (4, 4)
    with pytest.raises(UserError, match="--count 6 is not from 1 to 5 times"):
        More(count=6)


@pytest.mark.parametrize(("value", "rule"), [(-1.0, "at least 0"), (math.nan, "at least 0"), (math.inf, "at least 0")])
def test_a_range_may_have_one_bound(value: float, rule: str) -> None:
    with pytest.raises(UserError, match=f"--least {value} is not {rule}; give a number in that range"):
        More(least=value)
    assert More(least=10.0**300)


def test_the_fields_of_a_file_are_options_too() -> None:
    command = command_of(Kept)
    assert given_in(Kept, command.parse_args([])) == {}, "nothing takes the place of what the file has"
    assert given_in(Kept, command.parse_args(["--many", "4", "--files", "a"])) == {"many": 4, "files": ("a",)}
    with pytest.raises(UserError, match="--many 10 is not at most 9"):
        check_options(Kept, {"many": 10})
    check_options(Kept, {"many": None})


def test_the_help_has_the_defaults() -> None:
    text = " ".join(command_of(More).help_text(shows_all=True).split())
    assert "--count N how many (default 4) " in text
    assert "--least X how much (0: none; default 0.5)" in text
    assert "--of-kind {plain,fancy} which (default plain) " in text
    assert "--limit-s X how long --of-kind" in text
    assert "--loud say more --quiet say less --file FILE a file; may be repeated --keys" in text
    assert "how many; default of the cluster --files" in " ".join(command_of(Kept).help_text(shows_all=True).split())


def test_flags_say_which_take_a_value() -> None:
    assert flags(Asked) == {
        "--count": True, "--limit-s": True, "--of-kind": True, "--loud": False, "--quiet": False, "--file": True,
        "--keys": True,
    }  # fmt: skip


def test_a_default_in_words_is_the_default() -> None:
    """Where the help of an option names its default itself."""
    for of in (RunSpec, RecoveryRequest, ReplanRequest, PlanRequest, WhatIf, OsdpRequest, ProfileRequest, SlurmOptions):
        for name, one in options_in(of).items():
            words = re.search(r"\(default:? ([\w.+-]+)\)", one.option.documentation)
            assert not words or one.default is None or words[1] == str(one.default), f"{of.__name__}.{name}"
