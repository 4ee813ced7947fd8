"""Several runs of one command: a chain, whose runs begin one after the other, or a sweep of runs beside each other.

A launcher that queues gets all of them at once: a chain as jobs that wait for each other, a sweep as an array. Other
launchers start one run when the one before has ended.
"""

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from itertools import count, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from realhf.base.errors import RunError, UserError
from realhf.base.files import delete
from realhf.lifecycle.controller import Listener, preview, start
from realhf.lifecycle.interruption import Detached, Interruption, Stopped
from realhf.lifecycle.new import check_values, new_run
from realhf.lifecycle.queued import QueuedRun, planned_now, queued_run
from realhf.lifecycle.request import RunRequest, default_run_directory, experiment_of
from realhf.lifecycle.unplanned import job_to_watch, plans_in_job

T = TypeVar("T")

# Shows a run under a title ("": none) while it goes on, and how it has ended.
Shown = Callable[[RunRequest, str], AbstractContextManager[Listener]]


def carry_out(request: RunRequest, listener: Listener) -> None:
    """Carries out a new run to its end. Raises as `realhf.lifecycle.controller.start`."""
    start(new_run(request, listener.search), request, listener)


def carry_out_chain(requests: Sequence[RunRequest], shown: Shown, *, leaves: bool = False) -> list[QueuedRun]:
    """Carries out runs, or a single run. Each begins after the one before has ended well. Returns those that it
    `leaves` in a cluster's queue. Raises as `start`; an error names the runs that were not started for it."""

    def watched(stage: int, run: Callable[[Listener], None]) -> None:
        with _naming_later(requests, stage), shown(requests[stage], title_of_stage(requests, stage)) as listener:
            run(listener)

    if not requests[0].launcher.queues:
        for stage, request in enumerate(requests):
            watched(stage, partial(carry_out, request))
        return []

    def submit(made: Sequence[QueuedRun]) -> None:
        for stage, one in enumerate(made):
            one.submit(replace(one.job(), after=made[stage - 1].job_id if stage else ""))

    with ExitStack() as held:
        made = _submitted(requests, submit, shown, held, waits=True)
        if leaves:
            return made
        _each(made, watched)
    return []


def carry_out_sweep(
    requests: Sequence[RunRequest],
    folder: Path,
    at_most: int | None,
    shown: Shown,
    ended: Callable[[Callable[[], None]], int],
    *,
    leaves: bool = False,
) -> tuple[list[QueuedRun], list[int]]:
    """Carries out runs of one size whose directories lie in `folder`, `at_most` at a time in a cluster's queue. Returns
    those that it `leaves` there, and the exit codes of the others, which `ended` makes of running one."""

    def watched(number: int, run: Callable[[Listener], None]) -> int:
        def watch() -> None:
            with shown(requests[number], title_of_member(requests[number])) as listener:
                run(listener)

        return ended(watch)

    if not requests[0].launcher.queues:
        return [], [watched(number, partial(carry_out, request)) for number, request in enumerate(requests)]

    def submit(made: Sequence[QueuedRun]) -> None:
        ids = made[0].launcher.start_array([one.job() for one in made], folder, at_most)
        for one, job_id in zip(made, ids, strict=True):
            one.submitted(job_id)

    with ExitStack() as held:
        try:
            made = _submitted(requests, submit, shown, held, waits=False)
        except BaseException:
            with contextlib.suppress(OSError):
                delete(folder)
            raise
        if leaves:
            return made, []
        return [], _each(made, watched)


def _submitted(
    requests: Sequence[RunRequest],
    submit: Callable[[Sequence[QueuedRun]], None],
    shown: Shown,
    held: ExitStack,
    *,
    waits: bool,
) -> list[QueuedRun]:
    """The runs in a cluster's queue, all or none; `held` locks their directories. A run that `waits` for the one before
    is planned by its job."""
    with shown(requests[0], "") as listener:
        planned = [planned_now(one, listener) for one in (requests[:1] if waits else requests)]
    made: list[QueuedRun] = []
    with Interruption() as interruption:
        try:
            for request, run in zip_longest(requests, planned):
                made.append(queued_run(request, run, held, made[-1].directory if waits and made else None))
            submit(made)
            interruption.check()
        except BaseException:
            _withdraw(made, removes=True)
            raise
    return made


def _each(made: Sequence[QueuedRun], watched: Callable[[int, Callable[[Listener], None]], T]) -> list[T]:
    """Watches each run to its end; returns the results of `watched`. An error takes back the runs after it."""
    found = []
    for number, one in enumerate(made):
        try:
            found.append(watched(number, one.carry_out))
        except BaseException:
            _withdraw(made[number + 1 :])
            raise
    return found


def _withdraw(runs: Sequence[QueuedRun], *, removes: bool = False) -> None:
    """Takes back what has not ended. A second interruption does not reach it."""
    with Interruption().ignored():
        for one in reversed(runs):
            with contextlib.suppress(RunError, UserError):
                one.withdraw(removes=removes)


@contextlib.contextmanager
def _naming_later(requests: Sequence[RunRequest], stage: int) -> Iterator[None]:
    """An error inside says which stages were not started for it."""
    try:
        yield
    except (UserError, RunError, Stopped, KeyboardInterrupt) as error:
        later = ", ".join(str(one.run_dir) for one in requests[stage + 1 :])
        if later and not isinstance(error, Detached):
            before = requests[stage].run_dir
            error.add_note(f"not started, since the stage before, {before}, has not ended well: {later}")
        raise


# -- before anything is started


def with_directories(requests: Sequence[RunRequest]) -> list[RunRequest]:
    """Each request with a directory, which its command line names too."""
    found: list[RunRequest] = []
    for request in requests:
        new = None if request.run_dir else _free(default_run_directory(request.experiment), found)
        found.append(in_directory(request, new) if new else request)
    return found


def in_directory(request: RunRequest, path: Path) -> RunRequest:
    """The request for a run in a directory that its command line has not named."""
    return replace(request, run_dir=path, words=(*request.words, "--run-dir", str(path)))


def _free(path: Path, taken: Sequence[RunRequest]) -> Path:
    names = {one.run_dir for one in taken}
    numbered = (path.with_name(f"{path.name}-{n}") for n in count(2))
    return path if path not in names else next(one for one in numbered if one not in names)


def check_all(requests: Sequence[RunRequest], *, waits: bool) -> None:
    """Raises UserError for what can be known to be wrong with any of the runs before the first one is started. `waits`:
    each run waits for the one before."""
    if len({one.launcher for one in requests}) > 1:
        raise UserError("the stages of a chain have one launcher; give --launcher before the first --then")
    seen: set[Path] = set()
    for request in requests:
        _check_queued(request)
        if request.directory.path in seen:
            raise UserError(f"two runs have --run-dir {request.run_dir}; give each its own")
        seen.add(request.directory.path)
        request.directory.check_new()
        check_values(experiment_of(request.experiment, request.fields))
        if _is_planned_later(requests, request, waits=waits):
            job_to_watch(None, request, request.directory)
    options: list[Any] = []
    for request in requests:
        if request.launcher_options not in options:
            options.append(request.launcher_options)
            request.launcher(request.launcher_options).check()


def _check_queued(request: RunRequest) -> None:
    """Raises UserError for what a job that others wait for, or that is one of an array, cannot do."""
    if not request.launcher.queues:
        return
    if request.recovery.recover == "auto":
        raise UserError(
            "--recover auto starts a new job after a failure, for which no other job of a chain or a sweep waits; "
            "give --until-done, whose job keeps its number, or leave it out"
        )
    if request.replan.mode == "switch":
        raise UserError("--replan switch starts a new job, which a chain or a sweep cannot have; give suggest")


def previews(requests: Sequence[RunRequest], shown: Shown, *, waits: bool) -> Iterator[str]:
    """A dry run's text for each run. Only the job of a run that `waits` for the one before is known: it is planned
    later."""
    for number, request in enumerate(requests):
        if _is_planned_later(requests, request, waits=waits):
            job = job_to_watch(None, request, request.directory)
            yield request.launcher(request.launcher_options).preview(job)
        elif waits and number:
            yield f"{title_of_stage(requests, number)}: planned when the stage before has ended well"
        else:
            with shown(request, "") as listener:
                run = new_run(request, listener.search)
            yield preview(run, request)


def _is_planned_later(requests: Sequence[RunRequest], request: RunRequest, *, waits: bool) -> bool:
    """Whether a job plans the run."""
    return request.launcher.queues and ((waits and request is not requests[0]) or plans_in_job(request))


def title_of_stage(requests: Sequence[RunRequest], stage: int) -> str:
    words = shlex.join(["realhf", *requests[stage].words])
    return words if len(requests) == 1 else f"stage {stage + 1} of {len(requests)}: {words}"


def title_of_member(request: RunRequest) -> str:
    return f"run {request.directory.path.name}: {shlex.join(['realhf', *request.words])}"
