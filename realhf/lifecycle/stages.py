"""The command lines of several runs from one: those of a chain (`--then`), and of a sweep (`--seeds`, `--sweep`)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated

from realhf.base.errors import UserError
from realhf.base.options import Common, Option, Options, flags
from realhf.lifecycle.advice import split_words
from realhf.lifecycle.request import RecoveryRequest

MOST_MEMBERS = 1000  # the longest array of most clusters (MaxArraySize)
LONGEST_NAME = 200
# Options of the command as a whole, not of one run.
_OF_COMMAND = {"--detach": False, "--dry-run": False}
# Options that all stages of a chain share, besides those of the launcher and of recovery.
_WHERE = (
    *("--launcher", "--nodes", "--gpus-per-node", "--num-workers", "--hardware", "--memory-gb"),
    *("--network-interface", "--master-address", "--evaluations", "--seconds"),
)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Options):
    """Runs that differ in their seeds, or in the values of fields. Raises UserError where they are no values."""

    HEADING = "several runs"

    seeds: Annotated[
        str | None, Common("a run for each of N seeds, from 0, or for each of a list: 4, or 1,5,7", metavar="SEEDS")
    ] = None
    sweep: Annotated[
        tuple[str, ...],
        Common("a run for each of these values of a field; repeat it for all combinations", metavar="FIELD=VALUE,..."),
    ] = ()
    at_most: Annotated[int | None, Option("most runs of a sweep at a time, under SLURM", range=(1, MOST_MEMBERS))] = (
        None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        number = 1
        for values in self.fields.values():
            number *= len(values)
        if number > MOST_MEMBERS:
            raise UserError(f"--sweep and --seeds ask for {number} runs, more than {MOST_MEMBERS}; give fewer values")
        if self.at_most and not self.fields:
            raise UserError(f"--at-most {self.at_most} is for a sweep; give --seeds or --sweep too")

    @property
    def fields(self) -> dict[str, tuple[str, ...]]:
        """The values of each field that differs, in the order of the runs' names."""
        found: dict[str, tuple[str, ...]] = {}
        for text in self.sweep:
            name, equals, values = text.lstrip("-").partition("=")
            if not equals or not name or not all(values.split(",")):
                raise UserError(f"--sweep {text}: give a field and its values: --sweep ppo.kl-coef=0.01,0.1")
            if name in found:
                raise UserError(f"--sweep names {name} twice; give all of its values at once")
            found[name] = _unlike("--sweep", text, values.split(","))
        if self.seeds is not None:
            if "seed" in found:
                raise UserError("--sweep seed=... and --seeds are the same; give one of them")
            found["seed"] = self._seeds
        return found

    @property
    def _seeds(self) -> tuple[str, ...]:
        assert self.seeds is not None
        words = [word for word in self.seeds.split(",") if word]
        if not words or not all(re.fullmatch(r"\d{1,18}", word) for word in words):
            raise UserError(f"--seeds {self.seeds}: give how many (4), or which: 1,5,7")
        if "," in self.seeds:
            return _unlike("--seeds", self.seeds, words)
        number = int(self.seeds)
        if not 1 <= number <= MOST_MEMBERS:
            raise UserError(f"--seeds {number} is not from 1 to {MOST_MEMBERS}; for one seed give --seed {number}")
        return tuple(map(str, range(number)))


def _unlike(option: str, text: str, values: Sequence[str]) -> tuple[str, ...]:
    if len({*values}) < len(values):
        raise UserError(f"{option} {text} has a value twice; give each once")
    return tuple(values)


def members(words: Sequence[str], sweep: SweepOptions) -> dict[str, tuple[str, ...]]:
    """The command line of each run of a sweep but for its directory, by the name of that. `words`: the command's."""
    options = flags(SweepOptions) | _OF_COMMAND | {"--run-dir": True}
    _, common = split_words(words, options)
    found: dict[str, tuple[str, ...]] = {}
    for values in product(*sweep.fields.values()):
        chosen = dict(zip(sweep.fields, values, strict=True))
        name = re.sub(r"[^\w.+-]+", "-", "_".join(f"{field}-{value}" for field, value in chosen.items()))
        if name in found or len(name) > LONGEST_NAME:
            raise UserError(f"the runs of the sweep have no names of their own: {name}; give values that differ in it")
        found[name] = (*common, *(word for field, value in chosen.items() for word in (f"--{field}", value)))
    return found


def chain(parts: Sequence[Sequence[str]], launcher_options: type) -> list[tuple[str, ...]]:
    """The command line of each run of a chain, from the words between its `--then`. Those behind the first have its
    options of where and how to launch, unless they give them. `launcher_options`: the launcher's type of options."""
    _, first = split_words(parts[0], _OF_COMMAND)
    inherited, _ = split_words(first, _inherited(launcher_options))
    found = [tuple(first)]
    for part in parts[1:]:
        given = {word.partition("=")[0] for word in part}
        if not part:
            raise UserError("--then names no experiment; give the words of a run: --then ppo.py --steps 10")
        if wrong := sorted(given & {*_OF_COMMAND, *flags(SweepOptions), "--resume"}):
            is_of_command = wrong[0] in _OF_COMMAND
            remedy = "give it before the first --then" if is_of_command else "leave it out, or --then"
            raise UserError(f"{wrong[0]} behind --then: a stage of a chain is one new run; {remedy}")
        kept = {name: takes for name, takes in _inherited(launcher_options).items() if name not in given}
        found.append(("run", *part, *split_words(inherited, kept)[0]))
    return found


def _inherited(launcher_options: type) -> Mapping[str, bool]:
    """The options of where and how to launch; with each, whether it takes a value."""
    own = dict.fromkeys(_WHERE, True)
    return own | flags(RecoveryRequest) | flags(launcher_options)
