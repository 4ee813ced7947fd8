"""Where a job plans its run: `python -m realhf.cli.in_job RUN_DIR` does on its first node what `realhf run` would have
done on the login node. Where SLURM starts the job once more after that, it makes the run ready to go on.

It takes the words of the command line from the run directory (`realhf.rundir.starts`), and executes nothing else.
"""

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

from realhf.base.errors import RunError, UserError
from realhf.cli.request import request_of_words
from realhf.launch.process import AGAIN_ENDED
from realhf.lifecycle import again
from realhf.lifecycle.controller import note_end, note_start
from realhf.lifecycle.new import fill, new_run
from realhf.lifecycle.unplanned import note_unplanned
from realhf.rundir.logs import start_logging
from realhf.rundir.paths import MASTER, RunDirectory
from realhf.rundir.starts import is_to_be_planned, read_later, start_refusal
from realhf.rundir.status import requested_end

logger = logging.getLogger("realhf.in_job")


def plan_here(directory: RunDirectory) -> bool:
    """Plans the run and makes its directory ready; returns whether there is anything left to do. Raises UserError or
    RunError if it cannot."""
    later = read_later(directory)
    with directory.lock(MASTER, wait_s=again.LOCK_WAIT_S):
        if reason := start_refusal(later):
            raise reason
        try:
            os.chdir(later.working_directory)
        except (OSError, ValueError) as error:
            raise UserError(
                f"the working directory {later.working_directory} of the command cannot be entered here: {error}; "
                "start the run from a file system that all nodes share"
            ) from None
        request = replace(request_of_words(later.words), run_dir=directory.path, detached=False)
        run = new_run(request)
        asked = requested_end(directory.stop)
        if asked is not None and asked.reason == "asked":
            note_end(directory, run.experiment.steps)
            return False
        if asked is not None:
            raise RunError("the job was about to end before its run had begun; give a longer --time-limit")
        fill(run, directory)
    note_start(run, directory, "started")
    return True


def main() -> int:
    """The exit code: 0, AGAIN_ENDED, or another one where the run cannot be planned, which its directory tells too."""
    directory = RunDirectory.open(Path(sys.argv[1]))
    if not is_to_be_planned(directory):
        return again.main()
    start_logging("in_job")
    try:
        return 0 if plan_here(directory) else AGAIN_ENDED
    except (RunError, UserError) as error:
        message, code = str(error), error.returncode if isinstance(error, RunError) else 2
    except SystemExit as error:  # a parser has said why
        message, code = f"the command line is wrong on this node; log: {directory.job_log}", int(error.code or 2)
    except Exception as error:
        logger.exception("the run cannot be planned")
        message, code = f"{type(error).__name__}: {error}", 1
    logger.error("%s", message)
    note_unplanned(directory, message, code)
    return code if code != AGAIN_ENDED else 1


if __name__ == "__main__":
    sys.exit(main())
