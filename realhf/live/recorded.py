"""The rounds that an earlier start of a program has made: a program that is run again is answered from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from realhf.api.script.lines import script_error
from realhf.base.errors import UserError
from realhf.base.files import decode_json
from realhf.rundir.calls_file import RoundLine, round_line
from realhf.rundir.checkpoints import check, saved_steps, step_folder
from realhf.rundir.lines import read_lines
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import RunSpec, read_spec


@dataclass(frozen=True)
class Recorded:
    """The first `step` rounds of a program, by their numbers; after them there is a checkpoint."""

    step: int = 0
    rounds: Mapping[int, RoundLine] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: RunDirectory, spec: RunSpec) -> "Recorded":
        """The rounds up to the newest good checkpoint.

        Raises UserError where the program declares something else than it did.
        """
        _check_declared(read_spec(directory.experiment, RunSpec), spec, directory)
        lines = {line.round: line for line in read_lines(directory.rounds, round_line).values}
        good = (step for step in reversed(saved_steps(directory.checkpoints)) if _is_good(directory, step, lines))
        step = next(good, 0)
        return cls(step, {number: line for number, line in lines.items() if number < step})

    def answer(
        self, round_: int, begun: int, new: Mapping[str, str], ends: bool
    ) -> Callable[[], dict[str, dict[str, float]]]:
        """What the calls `new` of a round gave, with their digests, behind `begun` others.

        Raises UserError where the program calls something else than it did.
        """
        line = self.rounds.get(round_)
        made = line.calls if line else ()
        for place, (name, digest) in enumerate(new.items(), begun):
            before = made[place] if place < len(made) else ("nothing more", "")
            if before != (name, digest):
                what = f"another {name}" if before[0] == name else before[0]
                raise script_error(
                    f"round {round_ + 1}: the program calls {name}, and called {what} before it was started again; let "
                    "it decide as it did (its own random numbers, files, times), or give it another run_dir"
                )
        if ends and line and begun + len(new) < len(made):
            raise script_error(
                f"round {round_ + 1}: the program ends it without {made[begun + len(new)][0]}, which it called before "
                "it was started again; let it decide as it did, or give it another run_dir"
            )
        return lambda: line.statistics if line else {}


def _is_good(directory: RunDirectory, step: int, lines: Mapping[int, RoundLine]) -> bool:
    """Whether a checkpoint is whole, and was written when the round before it had ended."""
    if step - 1 not in lines:
        return False
    try:
        state = check(step_folder(directory.checkpoints, step))
    except UserError:
        return False
    return lines[step - 1].versions == {model: state.weights[model].version for model in lines[step - 1].versions}


def _check_declared(saved: RunSpec, spec: RunSpec, directory: RunDirectory) -> None:
    if not saved.declared:
        raise UserError(f"the run in {directory.path} is of a declared experiment; give the program another run_dir")
    content = (msgspec.json.encode(one.values | one.declared) for one in (saved, spec))
    before, now = (decode_json(each, dict[str, Any]) for each in content)
    if differing := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        raise UserError(
            f"{directory.path}: the program declares {', '.join(differing)} otherwise than before it was started again "
            f"({before.get(differing[0])!r}, now {now.get(differing[0])!r}); declare the same, or give another run_dir"
        )
