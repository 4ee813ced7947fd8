"""A run as a job in a cluster's queue: submitted by itself, after another one, or with others; planned here or there.

A job plans its run (`realhf.cli.in_job`) where this machine cannot know its nodes, or the checkpoints that it starts
from are still to come. Until it has, the run directory holds what was asked for (`realhf.rundir.starts`).
"""

import contextlib

from realhf.base.files import delete, writing_a_run
from realhf.launch.launcher import Launcher, launcher_name
from realhf.launch.process import Job
from realhf.lifecycle.controller import LAUNCHER_LOCK, Controller, Listener, note_end, note_start
from realhf.lifecycle.new import check_experiment, fill, new_run
from realhf.lifecycle.request import RunRequest, experiment_of
from realhf.lifecycle.unplanned import job_to_watch, planned_steps, plans_in_job
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run, load_run
from realhf.rundir.starts import begin_start, is_to_be_planned, write_later, write_launched
from realhf.rundir.status import Status, known_status, write_status

CANCELLED = "its job was cancelled with those that were started with it"


class QueuedRun:
    """A run whose directory is made, and whose job is submitted (`submit`), watched to its end (`carry_out`), or taken
    back (`withdraw`). Its maker holds the lock of the directory."""

    def __init__(self, request: RunRequest, directory: RunDirectory, job_id: str = "") -> None:
        self.request, self.directory, self.job_id = request, directory, job_id
        self.launcher: Launcher = request.launcher(request.launcher_options)

    def job(self) -> Job:
        """Raises UserError where the run directory is damaged."""
        return job_to_watch(self._planned(), self.request, self.directory)

    def _planned(self) -> Run | None:
        """The run; None while its job has yet to plan it."""
        return None if is_to_be_planned(self.directory) else load_run(self.directory)

    def submit(self, job: Job) -> None:
        """Raises UserError where the cluster refuses the job."""
        self.launcher.start(job)
        self.submitted(self.launcher.job_id())

    @writing_a_run()
    def submitted(self, job_id: str) -> None:
        """Notes the job, for this process and for others."""
        self.job_id = job_id
        write_launched(self.directory.launched, launcher_name(self.request.launcher), job_id, self.request.words)

    def carry_out(self, listener: Listener, *, leaves: bool = False) -> None:
        """Watches the job to its end, as `realhf.lifecycle.controller.start`. `leaves`: Ctrl-C leaves the job alone."""
        Controller(
            self._planned(), self.request, self.directory, self.launcher, listener, self.job_id, leaves=leaves
        ).carry_out()

    def withdraw(self, *, removes: bool = False) -> None:
        """Cancels the job, if there is one, and removes the directory of a run that has not begun, or of any."""
        status = known_status(self.directory.status)
        if not removes and status is not None and status.state in ("done", "failed", "stopped"):
            return
        if self.job_id:
            self.launcher.adopt(self.job(), self.job_id)
            self.launcher.stop(grace_s=0)
        with contextlib.suppress(OSError):
            if not removes and any(log.stat().st_size for log in self.directory.logs.glob("*")):
                note_end(self.directory, planned_steps(self.directory), "interrupted", CANCELLED)
            else:
                delete(self.directory.path)


def queued_run(
    request: RunRequest, run: Run | None, held: contextlib.ExitStack, after: RunDirectory | None = None
) -> QueuedRun:
    """A run whose directory is made and locked by `held`, and whose job is not submitted. `run` None: its job plans it,
    when the run in the directory `after` has ended well. Raises UserError or RunError; then no directory is left."""
    steps = 0 if run else experiment_of(request.experiment, request.fields).steps
    queued = QueuedRun(request, RunDirectory.create(request.directory.path))
    try:
        held.enter_context(queued.directory.lock(LAUNCHER_LOCK))
        if run:
            fill(run, queued.directory)
            note_start(run, queued.directory, "started")
        else:
            with writing_a_run():
                write_later(queued.directory, request.words, str(after.path) if after else "")
                begin_start(queued.directory)
                write_status(queued.directory.status, Status(state="starting", step=0, steps=steps))
        queued.launcher.preview(queued.job())
    except BaseException:
        with contextlib.suppress(OSError):
            delete(queued.directory.path)
        raise
    return queued


def planned_now(request: RunRequest, listener: Listener) -> Run | None:
    """The run, planned; None where its job has to do that, or is asked to. Raises UserError for any mistake in it that
    can be found here."""
    if not plans_in_job(request):
        return new_run(request, listener.search)
    check_experiment(experiment_of(request.experiment, request.fields))
    return None
