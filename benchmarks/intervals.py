"""Whether the planner's 90 % intervals hold: of the measured calls of runs, how many lie in their interval.

Settings and random plans are those of `estimator.py`; each run is of two workers on this machine. A call counts with
the median of its steps, by the clock: what the machine does beside is part of what an interval has to cover. The
spread of measured / predicted is given too, as `profiled_error` of a description has it: of all, and its parts by run
(the machine), by call of a setting, and the rest (`--seed` draws other plans, so that an error is not judged on the
calls that it was estimated from).
"""

import math
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from estimator import EXPERIMENT, NUM_WORKERS, SETTINGS, STEPS, Setting, random_plan
from lib.common import argument_parser, case, finish, realhf

from realhf.dataflow.plan import load_plan, save_plan
from realhf.rundir.lines import read_lines, step_line

PLANS_A_SETTING = 3
COVERAGE = (0.80, 0.98)  # of intervals of 90 %
LEVEL = 0.90


@dataclass(frozen=True)
class MeasuredCall:
    """A call of a run: its prediction, interval and measured median, in seconds."""

    setting: str
    run: int
    call: str
    predicted_s: float
    interval_s: tuple[float, float]
    measured_s: float

    @property
    def lies_inside(self) -> bool:
        return self.interval_s[0] <= self.measured_s <= self.interval_s[1]

    @property
    def log_error(self) -> float:
        return math.log(self.measured_s / self.predicted_s)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the plans")
    arguments = parser.parse_args()
    settings = SETTINGS[4:5] if arguments.quick else SETTINGS
    plans_a_setting = 1 if arguments.quick else PLANS_A_SETTING
    calls: list[MeasuredCall] = []
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            realhf("profile", EXPERIMENT, "--force", "--num-workers", str(NUM_WORKERS), *setting.words())
            for i in range(plans_a_setting):
                seed = arguments.seed * plans_a_setting + i
                calls += measured(setting, seed, Path(folder) / f"{len(calls)}", run=len(calls))
    finish("intervals", rows(calls), arguments.json)


def measured(setting: Setting, seed: int, run_dir: Path, run: int) -> list[MeasuredCall]:
    """The calls of a run of a random plan; its first step warms up and does not count."""
    save_plan(random_plan(setting, seed), run_dir.with_suffix(".json"))
    words = ["--plan", str(run_dir.with_suffix(".json")), "--steps", str(1 + STEPS), "--no-evaluate", *setting.words()]
    realhf("run", EXPERIMENT, "--num-workers", str(NUM_WORKERS), "--run-dir", str(run_dir), *words)
    steps = read_lines(run_dir / "metrics.jsonl", step_line).values[1:]
    plan = load_plan(run_dir / "plan.json")
    assert plan.intervals
    return [
        MeasuredCall(
            setting=str(setting),
            run=run,
            call=name,
            predicted_s=call.predicted_s or 0.0,
            interval_s=plan.intervals.call_s[name],
            measured_s=statistics.median(step["calls"][name]["seconds"] for step in steps),
        )
        for name, call in plan.calls.items()
    ]


def rows(calls: Sequence[MeasuredCall]) -> list[dict]:
    """Coverage and widths of all calls, and of each kind."""
    results = [coverage(f"all {len(calls)} calls", calls)]
    for name in dict.fromkeys(call.call for call in calls):
        results.append(coverage(name, [call for call in calls if call.call == name]))
    width = statistics.median(call.interval_s[1] / call.interval_s[0] for call in calls)
    results.append(
        case("upper over lower end (median)", width, "x", baseline=1.0, ratio=width, target=2.5, holds=width <= 2.5)
    )
    for name, value in spreads(calls).items():
        results.append(
            case(f"spread of measured / predicted, {name}", value, "of a logarithm", baseline=0.0, ratio=0.0,
                 target=0.0, holds=True)
        )  # fmt: skip
    return results


def coverage(name: str, calls: Sequence[MeasuredCall]) -> dict:
    """How many of the calls lie in their interval. A kind alone, of few calls, may be all inside."""
    share = sum(call.lies_inside for call in calls) / len(calls)
    return case(
        f"in their interval: {name}",
        share,
        "of the calls",
        baseline=LEVEL,
        ratio=share / LEVEL,
        target=COVERAGE[0],
        holds=COVERAGE[0] <= share <= (COVERAGE[1] if len(calls) >= 60 else 1.0),
    )


def spreads(calls: Sequence[MeasuredCall]) -> dict[str, float]:
    """Root mean squares of log errors: of all, of the means by run, of the means by setting and call of what that
    leaves, and of the rest."""
    errors = [call.log_error for call in calls]
    by_run = means((call.run for call in calls), errors)
    left = [error - by_run[call.run] for call, error in zip(calls, errors, strict=True)]
    by_call = means(((call.setting, call.call) for call in calls), left)
    rest = [error - by_call[call.setting, call.call] for call, error in zip(calls, left, strict=True)]
    groups = {"in all": errors, "by run": by_run.values(), "by call": by_call.values(), "the rest": rest}
    return {name: math.sqrt(statistics.fmean(value**2 for value in values)) for name, values in groups.items()}


def means(keys: Iterable[object], values: Sequence[float]) -> dict:
    """By key the mean of its values."""
    groups: dict[object, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        groups.setdefault(key, []).append(value)
    return {key: statistics.fmean(group) for key, group in groups.items()}


if __name__ == "__main__":
    main()
