"""A run to its end: started, watched, and started again from its newest good checkpoint when it breaks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from realhf.base.errors import RunError, UserError
from realhf.base.files import writing_a_run
from realhf.dataflow.plan import DIGEST_LENGTH, ExecutionPlan, plan_digest
from realhf.launch.launcher import Launcher
from realhf.launch.site import Site
from realhf.launch.start import prepare
from realhf.launch.supervisor import supervise
from realhf.lifecycle.shrink_rules import Suspects
from realhf.planning.model.hardware import Hardware
from realhf.rundir.checkpoints import Choice, newest_good
from realhf.rundir.events import EventKind, note
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run
from realhf.rundir.status import read_status


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What is done about failures: nothing by default.

    `min_workers` is the least number of workers that a run goes on with when there is no place for more, None: that
    of before. `plan_for_fewer` gives the plan of such a run for a number of workers and the hardware that it is for,
    and raises UserError if there is none. `next_run` gives the run under another plan, after it was asked to end for
    that (`RunDirectory.switch`).
    """

    max_restarts: int = 0
    min_workers: int | None = None
    plan_for_fewer: Callable[[Run, int], tuple[ExecutionPlan, Hardware | None]]
    next_run: Callable[[], Run]


@writing_a_run()
def run_to_end(
    run: Run,
    directory: RunDirectory,
    site: Site,
    recovery: Recovery,
    *,
    on_poll: Callable[[Launcher], None],
    on_restart: Callable[[str, Run], None],
) -> None:
    """Returns when the run has ended well, maybe under another plan. Its directory has been prepared.

    What is known of the run is in its directory: between two starts nothing is kept here but their number, and who
    was to blame.

    Args:
        on_restart: told what went wrong, "" where only the plan changes, and the run as it goes on.

    Raises:
        RunError: it broke and all restarts have been made, or too few workers are left; no process is left. What else
            is raised (Ctrl-C) ends it.
    """
    suspects, restarts_left = Suspects(), recovery.max_restarts
    while True:
        launcher, before, reason = site.launcher(run), run, ""
        try:
            supervise(launcher, site.processes(run), directory, partial(on_poll, launcher), is_remote=site.is_remote)
            if not _is_between_plans(directory):
                return
            run = _under_next_plan(recovery.next_run(), directory, before=run)
        except RunError as error:
            if not restarts_left:
                raise
            reason, restarts_left = str(error), restarts_left - 1
            blamed = suspects.failed(last_step(directory), error.workers, run.spec.num_workers)
            if recovery.min_workers is not None and (elsewhere := _elsewhere(run, site, recovery, blamed, error)):
                run, suspects = elsewhere, Suspects()
            try:
                run = restarted(run, directory, reason, before)
            except RunError as cannot:
                raise RunError(f"{reason}\nthe run cannot be restarted: {cannot}") from error
        on_restart(reason, run)


def _is_between_plans(directory: RunDirectory) -> bool:
    """Raises RunError where nobody can tell any more."""
    try:
        status = read_status(directory.status)
    except UserError as error:
        raise RunError(f"the processes have ended, but {error}") from None
    return status is not None and status.state == "replan"


def _under_next_plan(run: Run, directory: RunDirectory, before: Run) -> Run:
    """The run as it goes on from the checkpoint at which the master ended for it, and its directory made ready."""
    run = _from_checkpoint(run, newest_good(directory.checkpoints))
    prepare(run, directory)
    note_change(before, run, directory)
    return run


def _from_checkpoint(run: Run, choice: Choice) -> Run:
    step = 0 if choice.state is None else choice.state.step
    return Run(msgspec.structs.replace(run.spec, resume_step=step), run.experiment, run.plan)


def _elsewhere(run: Run, site: Site, recovery: Recovery, blamed: frozenset[int], error: RunError) -> Run | None:
    """The run on other places than those that are lost and those of the workers `blamed`, fewer ones if there is no
    room for all; None where it can stay."""
    places = (site.place(run, worker) for worker in sorted(blamed))
    gone = {place for place in places if place is not None} | site.lost(run)
    avoided = frozenset(run.spec.avoided) | gone
    room = site.room(run, avoided)
    spec = msgspec.structs.replace(run.spec, avoided=tuple(sorted(avoided)))
    if room >= run.spec.num_workers:  # a cluster has other nodes
        return Run(spec, run.experiment, run.plan) if gone else None
    assert recovery.min_workers is not None
    if room < recovery.min_workers:
        raise RunError(
            f"{error}\nthere is room for {room} workers, fewer than --min-workers {recovery.min_workers}: without "
            f"{', '.join(sorted(avoided)) or 'the nodes that are down'}; repair these, and go on with --resume "
            f"--num-workers {run.spec.num_workers}"
        ) from error
    try:
        plan, hardware = recovery.plan_for_fewer(run, room)
    except UserError as no_plan:
        raise RunError(f"{error}\nno plan for the {room} workers that there is room for: {no_plan}") from error
    per_node = min(run.spec.devices_per_node, plan.num_devices) if site.is_remote else plan.num_devices
    spec = msgspec.structs.replace(spec, num_workers=plan.num_devices, devices_per_node=per_node, hardware=hardware)
    return Run(spec, run.experiment, plan)


def restarted(run: Run, directory: RunDirectory, reason: str, before: Run | None = None) -> Run:
    """The run as it goes on from its newest good checkpoint, or from the beginning, and its directory made ready.

    `before`: the run that broke, where it may go on otherwise.
    """
    note(directory.events, "failed", last_step(directory), reason)
    choice = newest_good(directory.checkpoints)
    run = _from_checkpoint(run, choice)
    prepare(run, directory)
    if before is not None:
        note_change(before, run, directory)
    note_start(run, directory, "restarted", choice)
    return run


def note_change(before: Run, run: Run, directory: RunDirectory) -> None:
    """Notes another number of workers, other places or another plan; nothing if there is none."""
    old, new = (plan_digest(one.plan)[:DIGEST_LENGTH] for one in (before, run))
    texts = []
    if run.spec.num_workers != before.spec.num_workers:
        texts.append(f"{_workers(run)} instead of {before.spec.num_workers}")
    if gone := set(run.spec.avoided) - set(before.spec.avoided):
        texts.append(f"without {', '.join(sorted(gone))}")
    if new != old:
        predicted_s = run.plan.predicted_step_s
        prediction = f", {predicted_s:.3g} s a step predicted" if predicted_s else ""
        texts.append(f"plan {new} instead of {old}{prediction}")
    if texts:
        note(directory.events, "replanned", run.spec.resume_step, "; ".join(texts))


def note_start(run: Run, directory: RunDirectory, event: EventKind, choice: Choice | None = None) -> None:
    """Notes from where the run starts, and which checkpoints were passed over."""
    step = run.spec.resume_step
    texts = [f"{_workers(run)}, " + (f"from checkpoints/step-{step}" if step else "from the beginning")]
    texts += [f"step {bad} is not good: {reason}" for bad, reason in (choice.damaged if choice else {}).items()]
    note(directory.events, event, step, "; ".join(texts))


def _workers(run: Run) -> str:
    return "1 worker" if run.spec.num_workers == 1 else f"{run.spec.num_workers} workers"


def last_step(directory: RunDirectory) -> int:
    """The number of steps that the metrics tell of."""
    steps = read_lines(directory.metrics, step_line).values
    return int(steps[-1]["step"]) if steps else 0
