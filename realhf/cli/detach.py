"""`realhf run --detach` of a local run: the same command once more, in the background and without a terminal."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from realhf.base.code_files import python_command
from realhf.base.errors import RunError
from realhf.base.files import read_text
from realhf.base.shown import visible
from realhf.rundir.paths import RunDirectory

POLL_S = 0.1
# From the command to its started processes, the search of a plan included.
START_S = 3600.0


def how_to_watch(run_dir: Path | None) -> str:
    return f"the run goes on by itself: realhf status | attach | stop {run_dir}"


def detached(given: Sequence[str], run_dir: Path | None) -> int:
    """Starts a run of the command line `given` in the background, and returns when the processes of the run in
    `run_dir` have started, with 0; if it ends before that, with its exit code. Its output is logs/launcher.log in
    that directory."""
    assert run_dir is not None, "a run that is left alone has a directory of its own"
    directory = RunDirectory(run_dir)
    words = [word for word in given if word != "--detach"]
    if "--run-dir" not in " ".join(words):
        words += ["--run-dir", str(run_dir)]
    before = _started_s(directory)
    with tempfile.NamedTemporaryFile(prefix="realhf-", suffix=".log", dir=_existing(directory.path)) as printed:
        child = subprocess.Popen(
            python_command("realhf.cli", *words),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_S
        while child.poll() is None and _started_s(directory) == before:
            if time.monotonic() > deadline:
                child.terminate()
                raise RunError(f"the run has not started within {START_S:g} s, and was ended")
            time.sleep(POLL_S)
        sys.stderr.write(visible(read_text(printed.name, errors="replace")))
        if (code := child.poll()) is not None:
            return code
        log = directory.log("launcher")
        log.unlink(missing_ok=True)
        os.link(printed.name, log)
    print(how_to_watch(run_dir), file=sys.stderr)
    return 0


def _started_s(directory: RunDirectory) -> float:
    """When the run's processes were started last; 0.0: never."""
    try:
        return directory.launched.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _existing(path: Path) -> Path:
    """The nearest folder above that is there: on the same file system, so that the file can stay."""
    return next(parent for parent in path.parents if parent.is_dir())
