"""Times of calls that finished runs measured: kept beside the profiles that predicted them, for the next plan."""

import math
import statistics
from collections import defaultdict
from pathlib import Path

from realhf.lifecycle.replan import planned_task
from realhf.master.drift import WARM_UP
from realhf.planning.model.experience import RunTimes, SeenCall, digest_of, save_run_times
from realhf.planning.model.profile import profile_path
from realhf.planning.model.timings import ProfiledTimings
from realhf.report.run_data import lines_under
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run

FEWEST_STEPS = 3  # beside those that warm up


def keep_times(run: Run, directory: RunDirectory) -> list[Path]:
    """Writes, for each profile that predicted calls of the run's last plan, what these calls took; returns the paths.
    Nothing after too few steps. Raises UserError where the metrics or a profile cannot be read."""
    lines = lines_under(run.plan, read_lines(directory.metrics, step_line).values)[WARM_UP:]
    if len(lines) < FEWEST_STEPS:
        return []
    task = planned_task(run, {}, ignores_runs=True)
    seen: dict[Path, list[SeenCall]] = defaultdict(list)
    for name, call in run.plan.calls.items():
        model = task.call_models[name].under(call.compute)
        seconds = [line["calls"][name]["seconds"] for line in lines if name in line["calls"]]
        if not seconds or min(seconds) <= 0 or not isinstance(model.timings, ProfiledTimings):
            continue
        shape = call.layout.strategy, call.micro_batches
        logarithms = [math.log(value) for value in seconds]
        spread = statistics.stdev(logarithms) if len(logarithms) > 1 else 0.0
        path = profile_path(model.timings.model, model.timings.dtype, task.cluster.hardware.name)
        seen[path].append(
            SeenCall(
                interface=model.call.interface_type.value,
                option=model.option_text(*shape),
                log_ratio=statistics.median(logarithms) - math.log(model.seconds(*shape)),
                noise=spread * math.sqrt(math.pi / 2 / len(logarithms)),  # the standard error of a median
            )
        )
    name = str(directory.path.resolve())
    return [
        save_run_times(RunTimes(run=name, profile=digest_of(path), calls=tuple(calls)), path)
        for path, calls in seen.items()
    ]
