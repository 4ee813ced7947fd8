"""A run to its end: started, watched, and started again from its newest good checkpoint when it breaks."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from realhf.api.errors import RunError
from realhf.api.run import Run
from realhf.scheduler.base import Launcher, ProcessSpec
from realhf.scheduler.checkpoints import Choice, newest_good
from realhf.scheduler.events import EventKind, note
from realhf.scheduler.run_directory import RunDirectory
from realhf.scheduler.start import prepare
from realhf.scheduler.supervisor import supervise


def run_to_end(
    run: Run,
    directory: RunDirectory,
    specs: Sequence[ProcessSpec],
    make_launcher: Callable[[], Launcher],
    *,
    max_restarts: int,
    is_remote: bool = False,
    on_poll: Callable[[Launcher], None],
    on_restart: Callable[[str, Run], None],
) -> None:
    """Returns when the run has ended well. The directory has been prepared for its first start.

    What is known of the run is in its directory: between two starts nothing is kept here but their number.

    Args:
        make_launcher: a new launcher for every start.
        is_remote: see `supervise`.
        on_restart: told what went wrong, and the run as it goes on.

    Raises:
        RunError: it broke and all restarts have been made; no process is left. What else is raised (Ctrl-C) ends it.
    """
    for restarts_left in range(max_restarts, -1, -1):
        launcher = make_launcher()
        try:
            supervise(launcher, specs, directory, partial(on_poll, launcher), is_remote=is_remote)
            return
        except RunError as error:
            if not restarts_left:
                raise
            run = restarted(run, directory, str(error))
            on_restart(str(error), run)


def restarted(run: Run, directory: RunDirectory, reason: str) -> Run:
    """The run as it goes on from its newest good checkpoint, or from the beginning, and its directory made ready."""
    note(directory.events, "failed", last_step(directory), reason)
    choice = newest_good(directory.checkpoints)
    step = 0 if choice.state is None else choice.state.step
    run = Run(msgspec.structs.replace(run.spec, resume_step=step), run.experiment, run.plan)
    prepare(run, directory)
    note_start(run, directory, "restarted", choice)
    return run


def note_start(run: Run, directory: RunDirectory, event: EventKind, choice: Choice | None = None) -> None:
    """Notes from where the run starts, and which checkpoints were passed over."""
    step = run.spec.resume_step
    texts = [f"{run.spec.num_workers} workers, " + (f"from checkpoints/step-{step}" if step else "from the beginning")]
    texts += [f"step {bad} is not good: {reason}" for bad, reason in (choice.damaged if choice else {}).items()]
    note(directory.events, event, step, "; ".join(texts))


def last_step(directory: RunDirectory) -> int:
    """The number of steps that the metrics tell of."""
    try:
        lines = directory.metrics.read_bytes().rpartition(b"\n")[0].splitlines()
    except FileNotFoundError:
        return 0
    return int(msgspec.json.decode(lines[-1])["step"]) if lines else 0
