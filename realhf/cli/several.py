"""Several runs of one command, and runs that their jobs plan: a chain one after the other, a sweep side by side.

Under SLURM all of them are submitted at once: a chain as jobs that wait for each other, a sweep as an array. Other
launchers start one run after the other.
"""

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

from realhf.base.errors import RunError, UserError
from realhf.base.files import delete
from realhf.cli import THEN, print_error, returncode_of
from realhf.cli.compare import compare
from realhf.cli.detach import detached, how_to_watch
from realhf.cli.options import options_of
from realhf.cli.progress import Progress, print_summary
from realhf.cli.run import request_of_words
from realhf.cli.stages import SweepOptions, chain, members
from realhf.launch.slurm.launcher import SlurmLauncher
from realhf.lifecycle.advice import split_words
from realhf.lifecycle.controller import default_run_directory, preview, start
from realhf.lifecycle.interruption import Detached, Interruption, Stopped
from realhf.lifecycle.new import check_values, new_run
from realhf.lifecycle.queued import QueuedRun, later_job, planned_now, plans_in_job, queued_run
from realhf.lifecycle.request import RunRequest, experiment_of
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run

PAGE = "compare.html"


def is_queued(request: RunRequest) -> bool:
    """Whether its launcher submits a job that outlives the command."""
    return issubclass(request.launcher, SlurmLauncher)


def run_chain(arguments: argparse.Namespace, request: RunRequest) -> int:
    """Carries out the chain of a command line, whose first stage is `request`."""
    lines = chain(arguments.all_words, request.launcher.options_type)
    requests = _with_directories([request_of_words(line) for line in lines])
    _check(arguments, requests)
    if len({one.launcher for one in requests}) > 1:
        raise UserError("the stages of a chain have one launcher; give --launcher before the first --then")
    check_all(requests, waits=True)
    if arguments.dry_run:
        show(requests, waits=True)
    elif is_queued(requests[0]):
        return run_queued(requests, leaves=arguments.detach)
    elif arguments.detach:
        words = [word for one in requests for word in (THEN, *one.words[1:])]
        first = requests[0].run_dir
        assert first is not None
        return detached(["run", *words[1:]], first)
    else:
        for stage, one in enumerate(requests):
            with _naming_later([later.run_dir for later in requests[stage + 1 :]], one.run_dir):
                carry_out(one, _stage(stage, requests))
    return 0


def run_in_job(request: RunRequest, *, leaves: bool, is_shown: bool) -> int:
    """Carries out one run that its job plans. `is_shown`: only shows its script."""
    requests = _with_directories([request])
    if is_shown:
        show(requests)
        return 0
    return run_queued(requests, leaves=leaves)


def run_sweep(arguments: argparse.Namespace, request: RunRequest) -> int:
    """Carries out the sweep of a command line, whose options are those of `request`. The exit code is that of the first
    run that has failed."""
    sweep = options_of(SweepOptions, arguments)
    folder = (request.run_dir or default_run_directory(request.experiment)).absolute()
    RunDirectory(folder).check_new()
    requests = [
        _named(request_of_words(line), _short(folder) / name) for name, line in members(arguments.words, sweep).items()
    ]
    _check(arguments, requests)
    check_all(requests, waits=False)
    if arguments.dry_run:
        show(requests)
        return 0
    if is_queued(request):
        return _run_array(requests, folder, sweep.at_most, leaves=arguments.detach)
    if arguments.detach:
        first = requests[0].run_dir
        assert first is not None
        _, words = split_words(arguments.words, {"--run-dir": True})
        return detached([*words, "--run-dir", str(folder)], first)
    codes = [_code(lambda one=one: carry_out(one, _member(one))) for one in requests]  # type: ignore[misc]
    return _compared(requests, folder, codes)


# -- one after the other


def carry_out(request: RunRequest, title: str) -> None:
    """Carries out a new run to its end. Raises as `realhf.lifecycle.controller.start`."""
    with Progress(has_bar=not request.launcher.uses_terminal) as progress:
        progress.say(title)
        run = new_run(request, progress.search)
        began = time.monotonic()
        directory = start(run, request, progress)
    print_summary(directory, time.monotonic() - began)


# -- as jobs


def run_queued(requests: Sequence[RunRequest], *, leaves: bool) -> int:
    """Submits jobs that wait for each other, and watches one after the other, unless it `leaves` them."""
    with contextlib.ExitStack() as held:
        planned, made = _planned(requests[:1]), list[QueuedRun]()
        with Interruption() as interruption:
            try:
                for request, run in zip_longest(requests, planned):
                    made.append(queued_run(request, run, held, made[-1].directory if made else None))
                for stage, one in enumerate(made):
                    one.submit(replace(one.job(), after=made[stage - 1].job_id if stage else ""))
                interruption.check()
            except BaseException:
                _withdraw(made, removes=True)
                raise
        if leaves:
            _say_how(made)
            return 0
        for stage, one in enumerate(made):
            later = made[stage + 1 :]
            try:
                with _naming_later([other.directory.path for other in later], one.directory.path):
                    _watch(one, _stage(stage, requests))
            except BaseException:
                _withdraw(later)
                raise
    return 0


def _run_array(requests: Sequence[RunRequest], folder: Path, at_most: int | None, *, leaves: bool) -> int:
    with contextlib.ExitStack() as held:
        planned, made = _planned(requests), list[QueuedRun]()
        with Interruption() as interruption:
            try:
                for request, run in zip(requests, planned, strict=True):
                    made.append(queued_run(request, run, held))
                launcher = made[0].launcher
                assert isinstance(launcher, SlurmLauncher)
                ids = launcher.start_array([one.job() for one in made], folder, at_most)
                for one, job_id in zip(made, ids, strict=True):
                    one.submitted(job_id)
                interruption.check()
            except BaseException:
                _withdraw(made, removes=True)
                with contextlib.suppress(OSError):
                    delete(folder)
                raise
        if leaves:
            _say_how(made)
            return 0
        codes = []
        for number, one in enumerate(made):
            try:
                codes.append(_code(lambda one=one: _watch(one, _member(one.request))))  # type: ignore[misc]
            except BaseException:
                _withdraw(made[number + 1 :])
                raise
    return _compared(requests, folder, codes)


def _planned(requests: Sequence[RunRequest]) -> list[Run | None]:
    with Progress() as progress:
        return [planned_now(request, progress) for request in requests]


def _watch(queued: QueuedRun, title: str) -> None:
    began = time.monotonic()
    with Progress() as progress:
        progress.say(title)
        queued.carry_out(progress)
    print_summary(queued.directory, time.monotonic() - began)


def _withdraw(runs: Sequence[QueuedRun], *, removes: bool = False) -> None:
    """Takes back what has not ended; who has interrupted this command cannot do it once more."""
    with Interruption().ignored():
        for one in reversed(runs):
            with contextlib.suppress(RunError, UserError):
                one.withdraw(removes=removes)


def _say_how(runs: Sequence[QueuedRun]) -> None:
    for one in runs:
        print(f"job {one.job_id}: {how_to_watch(one.request.run_dir)}", file=sys.stderr)


# -- what they have in common


def check_all(requests: Sequence[RunRequest], *, waits: bool) -> None:
    """Raises UserError for what can be known to be wrong with any of the runs before the first one is started. `waits`:
    each run waits for the one before."""
    seen: set[Path] = set()
    for request in requests:
        assert request.run_dir is not None
        directory = RunDirectory(request.run_dir)
        if directory.path in seen:
            raise UserError(f"two runs have --run-dir {request.run_dir}; give each its own")
        seen.add(directory.path)
        directory.check_new()
        check_values(experiment_of(request.experiment, request.fields))
        if is_queued(request) and (plans_in_job(request) or (waits and request is not requests[0])):
            later_job(request, directory)
    options: list[Any] = []
    for request in requests:
        if request.launcher_options not in options:
            options.append(request.launcher_options)
            request.launcher(request.launcher_options).check()


def show(requests: Sequence[RunRequest], *, waits: bool = False) -> None:
    """Prints what would be started. A run that `waits` for the one before is planned later: only its job is known."""
    for number, request in enumerate(requests):
        assert request.run_dir is not None
        is_later = waits and number > 0
        if is_queued(request) and (is_later or plans_in_job(request)):
            job = later_job(request, RunDirectory(request.run_dir))
            print(request.launcher(request.launcher_options).preview(job))
        elif is_later:
            print(f"{_stage(number, requests)}: planned when the stage before has ended well")
        else:
            with Progress() as progress:
                run = new_run(request, progress.search)
            print(preview(run, request))


def _check(arguments: argparse.Namespace, requests: Sequence[RunRequest]) -> None:
    if arguments.resume:
        raise UserError("--resume goes on with one run; resume each by itself, without --then, --seeds and --sweep")
    for request in requests:
        if not is_queued(request):
            continue
        if request.recovery.recover == "auto":
            raise UserError(
                "--recover auto starts a new job after a failure, for which no other job of a chain or a sweep waits; "
                "give --until-done, whose job keeps its number, or leave it out"
            )
        if request.replan.mode == "switch":
            raise UserError("--replan switch starts a new job, which a chain or a sweep cannot have; give suggest")


def _with_directories(requests: Sequence[RunRequest]) -> list[RunRequest]:
    """Each with a directory, which its command line names too."""
    found: list[RunRequest] = []
    for request in requests:
        path = request.run_dir or _free(default_run_directory(request.experiment), found)
        found.append(_named(request, path) if request.run_dir is None else request)
    return found


def _free(path: Path, taken: Sequence[RunRequest]) -> Path:
    names = {one.run_dir for one in taken}
    numbered: Iterator[Path] = (path.with_name(f"{path.name}-{n}") for n in count(2))
    return next(one for one in (path, *[next(numbered) for _ in taken]) if one not in names)


def _named(request: RunRequest, path: Path) -> RunRequest:
    return replace(request, run_dir=path, words=(*request.words, "--run-dir", str(path)))


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _stage(stage: int, requests: Sequence[RunRequest]) -> str:
    words = shlex.join(["realhf", *requests[stage].words])
    return words if len(requests) == 1 else f"stage {stage + 1} of {len(requests)}: {words}"


def _member(request: RunRequest) -> str:
    assert request.run_dir is not None
    return f"run {request.run_dir.name}: {shlex.join(['realhf', *request.words])}"


@contextlib.contextmanager
def _naming_later(later: Sequence[Path | None], stage: Path | None) -> Iterator[None]:
    """An error inside says which stages were not started for it."""
    try:
        yield
    except (UserError, RunError, Stopped, KeyboardInterrupt) as error:
        if later and not isinstance(error, Detached):
            names = ", ".join(str(path) for path in later)
            error.add_note(f"not started, since the stage before, {stage}, has not ended well: {names}")
        raise


def _code(run: Callable[[], None]) -> int:
    """The exit code of a run, whose error is told here."""
    try:
        run()
    except (UserError, RunError, Stopped) as error:
        print_error(error)
        return returncode_of(error)
    return 0


def _compared(requests: Sequence[RunRequest], folder: Path, codes: Sequence[int]) -> int:
    """Compares the runs that there are; the exit code of all."""
    directories = [one.run_dir for one in requests if one.run_dir is not None and one.run_dir.exists()]
    if len(directories) > 1:
        compare(directories, folder / PAGE)
    for request, code in zip(requests, codes, strict=True):
        if code:
            print(f"{request.run_dir} has ended with exit code {code}", file=sys.stderr)
    return next((code for code in codes if code), 0)
