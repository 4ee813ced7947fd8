"""`realhf run` with `--then`, `--seeds` or `--sweep`, and runs that their jobs plan: the command's part of them."""

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from realhf.base.errors import RunError, UserError
from realhf.cli import THEN, print_error, returncode_of
from realhf.cli.compare import compare
from realhf.cli.detach import detached, how_to_watch
from realhf.cli.progress import shown
from realhf.cli.request import request_of_words
from realhf.lifecycle.advice import short, split_words
from realhf.lifecycle.interruption import Stopped
from realhf.lifecycle.queued import QueuedRun
from realhf.lifecycle.request import RunRequest
from realhf.lifecycle.several import (
    carry_out_chain,
    carry_out_sweep,
    check_all,
    in_directory,
    previews,
    with_directories,
)
from realhf.lifecycle.stages import SweepOptions, chain, members

PAGE = "compare.html"


def run_chain(arguments: argparse.Namespace, request: RunRequest) -> int:
    """Carries out the chain of a command line, whose first stage is `request`."""
    ends = [-1, *(place for place, word in enumerate(arguments.all_words) if word == THEN), len(arguments.all_words)]
    parts = [arguments.all_words[before + 1 : end] for before, end in pairwise(ends)]
    requests = with_directories([request_of_words(line) for line in chain(parts, request.launcher.options_type)])
    check_all(requests, waits=True)
    if arguments.detach and not (arguments.dry_run or request.launcher.queues):
        words = [word for one in requests for word in (THEN, *one.words[1:])]
        return detached(["run", *words[1:]], requests[0].run_dir)
    return _carried_out(arguments, requests)


def run_in_job(arguments: argparse.Namespace, request: RunRequest) -> int:
    """Carries out one run that its job plans."""
    return _carried_out(arguments, with_directories([request]))


def run_sweep(arguments: argparse.Namespace, request: RunRequest, sweep: SweepOptions) -> int:
    """Carries out the sweep of a command line, whose options are those of `request`. The exit code is that of the first
    run that has failed."""
    folder = request.directory.path
    request.directory.check_new()
    requests = [
        in_directory(request_of_words(line), Path(short(folder), name))
        for name, line in members(arguments.words, sweep).items()
    ]
    check_all(requests, waits=False)
    if arguments.dry_run:
        return _show(requests, waits=False)
    if arguments.detach and not request.launcher.queues:
        _, words = split_words(arguments.words, {"--run-dir": True})
        return detached([*words, "--run-dir", str(folder)], requests[0].run_dir)
    left, codes = carry_out_sweep(requests, folder, sweep.at_most, shown, _code, leaves=arguments.detach)
    return _say_how(left) if left else _compared(requests, folder, codes)


def _carried_out(arguments: argparse.Namespace, requests: Sequence[RunRequest]) -> int:
    if arguments.dry_run:
        return _show(requests, waits=True)
    return _say_how(carry_out_chain(requests, shown, leaves=arguments.detach))


def _show(requests: Sequence[RunRequest], *, waits: bool) -> int:
    for text in previews(requests, shown, waits=waits):
        print(text)
    return 0


def _say_how(left: Sequence[QueuedRun]) -> int:
    for one in left:
        print(f"job {one.job_id}: {how_to_watch(one.request.run_dir)}", file=sys.stderr)
    return 0


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
