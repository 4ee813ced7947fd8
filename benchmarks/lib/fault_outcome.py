"""What became of the runs of a fault campaign: a record a run, the table of all, and how many are as they should be."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from lib.common import case
from lib.fault_injection import Fault

# The longest that anything here waits: the supervisor for a sign of life of the master, then for others' last words.
NOTICED_WITHIN_S = 100.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run: the fault, what it met, and what became of the run. Steps count from 1; None: there was no restart.

    `evidence` is what was seen of the strike, "" if nothing was. `effect` is "failed", "came back" (a connection that
    was cut, without harm) or "" (nothing came of it). `refusal` is what `--resume` said where it refused to go on.
    `is_plain`: no traceback was shown. `noticed_after_s` is from the strike until the failure was noted, with its
    cause; `mode` is "auto" (--recover auto) or "by hand" (no recovery, then --resume); `interval` the steps between
    checkpoints; `commit` that of the code which ran.
    """

    number: int
    commit: str
    mode: str
    interval: int
    fault: Fault
    activity: str
    evidence: str
    effect: str
    refusal: str
    is_plain: bool
    steps_at_failure: int | None
    checkpoints_before: list[int]
    noticed_after_s: float | None
    restored: int | None
    is_newest_good: bool
    redone: int | None
    is_equal: bool
    message: str
    names_victim: bool
    left_behind: list[str]
    seconds: float

    @property
    def is_restored(self) -> bool:
        """From the newest good checkpoint, never from the beginning."""
        return self.restored is None or (self.restored > 0 and self.is_newest_good)

    @property
    def intervals_redone(self) -> int:
        """Checkpoint intervals begun after the restored step and lost, beside one that was corrupted on purpose.

        Two: the checkpoint between them was being written, which goes on beside training; no third one begins
        before it is complete.
        """
        corrupted = self.fault.kind == "corrupted checkpoint"
        return max(0, math.ceil((self.redone or 0) / self.interval) - corrupted)

    @property
    def is_struck(self) -> bool:
        """The strike was seen, and so was what came of it. Only a connection can come back as if nothing had been."""
        return bool(self.evidence) and (
            self.effect == "failed" or (self.effect == "came back" and self.fault.kind == "connection cut")
        )

    @property
    def is_refused_rightly(self) -> bool:
        """What a run is made of is not there any more, and whoever resumes it is told which file that is."""
        return self.fault.file in ("plan.json", "experiment.json") and self.fault.file in self.refusal

    @property
    def ends_well(self) -> bool:
        """As if nothing had happened, or in a sentence where that cannot be."""
        return self.is_refused_rightly if self.refusal else self.is_equal

    @property
    def holds(self) -> bool:
        """Whether the run was struck, and ended as it should."""
        return (
            self.is_struck
            and self.ends_well
            and self.is_plain
            and self.is_restored
            and self.intervals_redone <= 2
            and self.names_victim
            and (self.noticed_after_s or 0.0) <= NOTICED_WITHIN_S
            and not self.left_behind
        )


def row(outcome: Outcome) -> dict[str, Any]:
    """As a JSON object."""
    return asdict(outcome) | {"holds": outcome.holds}


def write_tables(outcomes: Sequence[Outcome], path: Path) -> None:
    """A row a run, as a Markdown table at `path` and as JSON lines beside it."""
    columns = (
        "run", "commit", "mode", "fault", "victim", "phase", "it was in", "seen of the strike", "effect",
        "steps made", "checkpoints before", "noticed after, s", "restored", "newest good", "steps redone", "equal",
        "names victim", "nothing left", "no traceback", "whole run, s",
    )  # fmt: skip
    holding = sum(outcome.holds for outcome in outcomes)
    lines = ["# Outcomes of the fault campaign", ""]
    written = f"Written by `python {' '.join(sys.argv)}`; steps count from 1."
    lines += [f"{written} {holding} of {len(outcomes)} runs hold.", ""]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for o in sorted(outcomes, key=lambda outcome: outcome.number):
        effect = f"refused: {o.refusal}" if o.refusal else o.effect or "NONE"
        cells = (
            o.number, o.commit, o.mode, o.fault.kind, o.fault.victim, o.fault.phase, o.activity,
            o.evidence or "NOTHING", effect, _text(o.steps_at_failure), ", ".join(map(str, o.checkpoints_before)),
            _text(o.noticed_after_s), _text(o.restored), _yes(o.is_newest_good), _text(o.redone), _yes(o.is_equal),
            _yes(o.names_victim), _yes(not o.left_behind), _yes(o.is_plain), f"{o.seconds:.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row(o)) + "\n" for o in outcomes))


def read_rows(table: Path, commit: str) -> list[Outcome]:
    """What an earlier invocation at this commit has found: a campaign that was stopped goes on."""
    path = table.with_suffix(".jsonl")
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]  # those of other commits may have other fields
    return [msgspec.convert(found, Outcome) for found in rows if found["commit"] == commit]


def _text(number: float | None) -> str:
    return "-" if number is None else str(number)


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def cases(outcomes: Sequence[Outcome]) -> list[dict]:
    """How many runs are as they should be, of how many; a target is to be reached in every run."""
    total = len(outcomes)
    counts = {
        "runs that hold: struck, and then all that is below": sum(o.holds for o in outcomes),
        "runs that end with the same metrics and parameters, or say which file they cannot go on without": sum(
            o.ends_well for o in outcomes
        ),
        "runs that were struck: the strike was seen, and what came of it": sum(o.is_struck for o in outcomes),
        "runs that show no traceback": sum(o.is_plain for o in outcomes),
        "runs that go on from the newest good checkpoint, never from step 0": sum(o.is_restored for o in outcomes),
        "runs that redo one checkpoint interval, or two where the one between them was being written": sum(
            o.intervals_redone <= 2 for o in outcomes
        ),
        "runs whose message names the victim": sum(o.names_victim for o in outcomes),
        f"runs whose failure is noticed within {NOTICED_WITHIN_S:g} s": sum(
            (o.noticed_after_s or 0.0) <= NOTICED_WITHIN_S for o in outcomes
        ),
        "runs that leave nothing behind": sum(not o.left_behind for o in outcomes),
    }
    found = [
        case(name, count, "runs", baseline=total, ratio=count / total, target=total, holds=count == total)
        for name, count in counts.items()
    ]
    informative = {
        "of these, runs that redo at most one interval": sum(o.intervals_redone <= 1 for o in outcomes),
        "of these, runs that went on from a checkpoint": sum(o.restored is not None for o in outcomes),
        "of these, runs whose connection came back before anything failed": sum(
            o.effect == "came back" for o in outcomes
        ),
        "of these, runs that were refused when they were resumed": sum(bool(o.refusal) for o in outcomes),
        "of these, runs without --recover, which ended and were resumed": sum(o.mode == "by hand" for o in outcomes),
    }
    return found + [
        case(name, count, "runs", baseline=total, ratio=count / total, target=0, holds=True)
        for name, count in informative.items()
    ]
