"""Where SLURM starts a job once more: `python -m realhf.lifecycle.again RUN_DIR` makes the run ready to go on.

The batch script runs it before master and workers. It needs no launching process, and no other nodes than the job has.
"""

import logging
import sys
from pathlib import Path

from realhf.base.errors import RunError, UserError
from realhf.launch.process import AGAIN_ENDED
from realhf.lifecycle.controller import continued, note_end, note_start
from realhf.rundir.logs import start_logging
from realhf.rundir.paths import MASTER, RunDirectory
from realhf.rundir.run import load_run
from realhf.rundir.status import known_status, requested_end

logger = logging.getLogger("realhf.again")
# A shared file system may take a while to notice that the node of the earlier master is gone.
LOCK_WAIT_S = 120.0


def start_again(directory: RunDirectory) -> bool:
    """Makes the directory ready to go on from the newest good checkpoint, or the beginning; returns whether there is
    anything left to do. Raises UserError or RunError if it cannot."""
    with directory.lock(MASTER, wait_s=LOCK_WAIT_S):
        run, status = load_run(directory), known_status(directory.status)
        if status is not None and status.state == "done":
            return False
        request = requested_end(directory.stop)
        if request is not None and request.reason == "asked":
            note_end(directory, run.experiment.steps)
            return False
        run = continued(run, run, directory)
        note_start(run, directory, "requeued")
    return True


def main() -> int:
    """The exit code: 0, AGAIN_ENDED, or 1 where the run cannot go on."""
    start_logging("again")
    try:
        return 0 if start_again(RunDirectory.open(Path(sys.argv[1]))) else AGAIN_ENDED
    except (RunError, UserError) as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
