"""Messages call an option as it is typed: every number with a range, and fields of an experiment in other messages."""

import re
from collections.abc import Iterable

import pytest

from realhf import cli
from realhf.algorithms.grpo.config import GRPO
from realhf.api.fields import as_typed, experiment_fields
from realhf.base.errors import UserError
from realhf.cli.evaluate import EXPERIMENT
from realhf.cli.help import help_of
from realhf.experiments import ready_file
from realhf.rundir.run import load_experiment_class

ALGORITHMS = ("grpo", "ppo", "distill")
GIVEN = {
    **{name: ["run", name, "--data", "x.jsonl", "--model", "x"] for name in ALGORITHMS},
    "evaluate": ["evaluate", "--data", "x.jsonl", "--model", "x"],
    "plan": ["plan", "grpo", "--data", "x.jsonl"],
    "profile": ["profile", "grpo", "--data", "x.jsonl"],
}
FILES = {name: str(ready_file(name)) for name in ALGORITHMS} | {"evaluate": str(EXPERIMENT)}
Ranges = dict[str, tuple[float | None, float | None]]


def fields_of(name: str) -> Ranges:
    """The ranges of an experiment's fields."""
    found = experiment_fields(load_experiment_class(FILES[name]))
    return {one.flag: one.option.range for one in found if one.option.range != (None, None)}


def own_of(command: str) -> Ranges:
    """The ranges of the options that a command has beside an experiment's fields."""
    declared = cli.parser(command).declared.items()
    return {action.option_strings[0]: one.range for action, one in declared if one.range != (None, None)}


FIELDS = {name: fields_of(name) for name in FILES}
OF_GRPO = FIELDS["grpo"].keys()


def unnamed(words: Iterable[str], ranges: Ranges, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """By option the message for a number outside its range that does not name option, number and range."""
    wrong = {}
    for flag, (low, high) in ranges.items():
        number = f"{high + 1:.0f}" if low is None else f"{low - 1:.0f}"
        assert cli.main([*words, flag, number]) == 2
        printed = capsys.readouterr()
        ends = "at least" if high is None else "at most" if low is None else r"from \S+ to"
        said = re.fullmatch(rf"error: (?:[\w ]+: )?{flag} (\S+) is not {ends} .*in that range\n", printed.err)
        if not said or float(said[1]) != float(number) or printed.out:
            wrong[flag] = printed.err
    return wrong


@pytest.mark.parametrize("name", FILES)
def test_numbers_of_an_experiment(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields that GRPO has too are tried there."""
    ranges = {flag: of for flag, of in FIELDS[name].items() if name == "grpo" or flag not in OF_GRPO}
    assert len(ranges) > (50 if name == "grpo" else 5)
    assert unnamed(GIVEN[name], ranges, capsys) == {}


@pytest.mark.parametrize("name", ["grpo", "evaluate", "plan", "profile"])
def test_numbers_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ranges = own_of(GIVEN[name][0])
    assert len(ranges) > 5
    assert unnamed(GIVEN[name], ranges, capsys) == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--grpo.samples-per-prompt", "1"], "--grpo.samples-per-prompt=1: GRPO judges the responses to a prompt"),
        (["--grpo.min-new-tokens=300"], "--grpo.min-new-tokens=300 must be from 0 to --grpo.max-new-tokens=256"),
        (["--grpo.delta", "1.1"], "--grpo.delta=1.1 must be above 1.2 (1 + --grpo.clip-high), which clips the ratio"),
        (["--grpo.groups-per-step", "2"], "--grpo.groups-per-step=2 takes the first groups that are not uniform; set "
         "--grpo.drop-uniform-groups too"),
    ],
)  # fmt: skip
def test_fields_in_other_messages(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*GIVEN["grpo"], *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")


def test_a_name_of_several_fields_is_the_one_that_is_typed() -> None:
    grpo, ppo = (load_experiment_class(FILES[name]) for name in ("grpo", "ppo"))
    text = "lr -1.0 is not from 0 to 1; give a number in that range"
    assert as_typed(text, grpo) == f"--actor.{text}"
    assert as_typed(text, ppo) == text
    assert as_typed(text, ppo, ["--critic.lr=-1"]) == f"--critic.{text}"
    assert as_typed(text, ppo, ["--critic.lr", "-1", "--actor.lr", "1"]) == f"--actor.lr or --critic.{text}"
    assert as_typed("with_optimizer=True takes", grpo, ["--actor.with_optimizer"]) == "--actor.with-optimizer takes"
    assert as_typed("model 'm' has vocab_size=8", grpo) == "model 'm' has vocab_size=8", "a checkpoint's may be meant"
    assert as_typed("vocab_size=8", grpo, ["--architecture.vocab-size", "8"]) == "--architecture.vocab-size=8"
    others = "the model beta is not there: 'top_k', top_k.py, top_k/x, \"beta=1\" and a seed=1: seed=2"
    assert as_typed(others, grpo) == others


def test_the_help_names_options() -> None:
    text = help_of("run", [FILES["grpo"], "--help-all"])
    assert "forbadtokens,above1+--grpo.clip-high(" in "".join(text.split()), "lines end at hyphens too"


def test_in_python_a_field_has_its_name() -> None:
    with pytest.raises(UserError, match=r"^max_new_tokens 0 is not from 1 to "):
        GRPO(max_new_tokens=0)
