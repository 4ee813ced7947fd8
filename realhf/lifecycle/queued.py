"""A run as a job in a cluster's queue: submitted by itself, after another one, or with others; planned here or there.

A job plans its run (`realhf.cli.in_job`) where this machine cannot know its nodes, or the checkpoints that it starts
from are still to come. Until it has, the run directory holds what was asked for (`realhf.rundir.later`).
"""

import contextlib
import time
from collections.abc import Sequence

from realhf.api.experiment import SETTINGS_ATTRIBUTE
from realhf.base.code_files import python_command
from realhf.base.errors import RunError, UserError
from realhf.base.files import delete, last_lines, writing_a_run
from realhf.data.inputs import keep_inputs
from realhf.launch.launcher import Exit, Launcher, launcher_name
from realhf.launch.process import Job, job_name, job_of, processes_of
from realhf.launch.supervisor import LOG_LINES, POLL_S
from realhf.lifecycle.controller import (
    LAUNCHER_LOCK,
    WHILE_WAITING,
    Controller,
    Listener,
    note_interrupted,
    note_start,
    note_stopped,
    run_directory,
)
from realhf.lifecycle.interruption import Detached, Interruption, Stopped
from realhf.lifecycle.new import check_experiment, new_run
from realhf.lifecycle.request import RunRequest, experiment_of
from realhf.lifecycle.tokenizer import keep_tokenizer
from realhf.planning.clusters import cluster_of, devices_per_node, is_unknown_here
from realhf.rundir.ending import requested_end
from realhf.rundir.later import is_to_be_planned, read_later, start_refusal, write_later
from realhf.rundir.launched import write_launched
from realhf.rundir.paths import RunDirectory
from realhf.rundir.prepare import prepare
from realhf.rundir.run import Run, load_experiment_class, load_run
from realhf.rundir.starts import begin_start, current_start
from realhf.rundir.status import Status, known_status, write_status


class QueuedRun:
    """A run whose directory is made, and whose job is submitted (`submit`), watched to its end (`carry_out`), or taken
    back (`withdraw`). Whoever makes one holds the lock of its directory."""

    def __init__(self, request: RunRequest, directory: RunDirectory, job_id: str = "") -> None:
        self.request, self.directory, self.job_id = request, directory, job_id
        self.launcher: Launcher = request.launcher(request.launcher_options)

    def job(self) -> Job:
        """Raises UserError where the run directory is damaged."""
        if is_to_be_planned(self.directory):
            return later_job(self.request, self.directory)
        return job_of(load_run(self.directory.experiment, self.directory.plan), self.directory, is_remote=True)

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
        if is_to_be_planned(self.directory):
            self._wait_for_plan(listener, leaves=leaves)
        run = load_run(self.directory.experiment, self.directory.plan)
        adopted = self.job_id
        Controller(run, self.request, self.directory, self.launcher, listener, adopted, leaves=leaves).carry_out()

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
                note_interrupted(self.directory, _steps(self.directory))
            else:
                delete(self.directory.path)

    # -- until the job has planned its run

    def _wait_for_plan(self, listener: Listener, *, leaves: bool) -> None:
        """Returns when the run is planned. Raises as `carry_out`; then nothing is left of the job, nor of the directory
        where the input was wrong or somebody has interrupted this, unless it `leaves` the job."""
        self.launcher.adopt(self.job(), self.job_id)
        with Interruption() as interruption:
            try:
                while is_to_be_planned(self.directory):
                    interruption.check()
                    self._check(self.launcher.poll())
                    listener.watched(self.launcher.status())
                    time.sleep(POLL_S)
            except (KeyboardInterrupt, Exception) as error:
                if leaves and isinstance(error, KeyboardInterrupt):
                    self.launcher.leave()
                    raise Detached from None
                with interruption.ignored():
                    self._end_early(error, removes=not leaves and isinstance(error, KeyboardInterrupt | UserError))
                raise

    def _check(self, exits: Sequence[Exit]) -> None:
        """Raises the reason for which the run will not be planned, if there is any."""
        if self.launcher.is_waiting():
            asked = requested_end(self.directory.stop)
            if asked is not None and asked.reason == "asked":
                raise Stopped(WHILE_WAITING)
        if not exits or not is_to_be_planned(self.directory):
            return
        status = known_status(self.directory.status)
        if status is not None and status.state == "stopped":
            raise Stopped(status.message)
        if status is not None and status.state == "failed":
            raise (
                UserError(status.message)
                if status.returncode == 2
                else RunError(status.message, returncode=status.returncode)
            )
        if reason := start_refusal(read_later(self.directory)):
            raise RunError(reason[0], returncode=reason[1])
        notes = "; ".join(dict.fromkeys(end.note for end in exits if end.note)) or f"job {self.job_id} has ended"
        log = self.directory.job_log
        raise RunError(f"{notes}, before its run was planned; log: {log}{last_lines(log, LOG_LINES)}")

    def _end_early(self, error: BaseException, *, removes: bool) -> None:
        self.launcher.stop(grace_s=0)
        if removes:
            with contextlib.suppress(OSError):
                delete(self.directory.path)
        elif isinstance(error, Stopped):
            note_stopped(self.directory, _steps(self.directory))
        elif isinstance(error, RunError | UserError):
            code = error.returncode if isinstance(error, RunError) else 2
            with contextlib.suppress(OSError):
                note_unplanned(self.directory, str(error), code)


def queued_run(
    request: RunRequest, run: Run | None, held: contextlib.ExitStack, after: RunDirectory | None = None
) -> QueuedRun:
    """A run whose directory is made and locked by `held`, and whose job is not submitted. `run` None: its job plans it,
    when the run in the directory `after` has ended well. Raises UserError or RunError; then no directory is left."""
    steps = 0 if run else experiment_of(request.experiment, request.fields).steps
    queued = QueuedRun(request, RunDirectory.create(run_directory(request).path))
    try:
        held.enter_context(queued.directory.lock(LAUNCHER_LOCK))
        if run:
            prepare(run, queued.directory)
            keep_inputs(run, queued.directory)
            keep_tokenizer(run, queued.directory)
            note_start(run, queued.directory, "started")
        else:
            _leave_to_job(queued, steps, str(after.path) if after else "")
        queued.launcher.preview(queued.job())
    except BaseException:
        with contextlib.suppress(OSError):
            delete(queued.directory.path)
        raise
    return queued


@writing_a_run()
def _leave_to_job(queued: QueuedRun, steps: int, after: str) -> None:
    write_later(queued.directory, queued.request.words, after)
    begin_start(queued.directory)
    write_status(queued.directory.status, Status(state="starting", step=0, steps=steps))


def planned_now(request: RunRequest, listener: Listener) -> Run | None:
    """The run, planned; None where its job has to do that, or is asked to. Raises UserError for what is wrong with it,
    as far as that can be known here."""
    if not plans_in_job(request):
        return new_run(request, listener.search)
    check_experiment(experiment_of(request.experiment, request.fields))
    return None


def plans_in_job(request: RunRequest) -> bool:
    return request.launcher_options.plan_in_job or is_unknown_here(request.plan_request().devices)


def later_job(request: RunRequest, directory: RunDirectory) -> Job:
    """The job of a run that it plans itself. Raises UserError where the request does not tell its size."""
    asked, given = request.plan_request().devices, request.plan.given
    per_node = devices_per_node(asked, given.num_devices if given else None)
    if per_node is None:
        raise UserError(
            "the run is planned in its job, and nothing here tells the devices of the job's nodes: give "
            "--gpus-per-node (or, for a run by itself, --hardware to plan it now)"
        )
    threads = 1 if is_unknown_here(asked) else cluster_of(asked, asked.nodes * per_node).hardware.threads
    return Job(
        name=job_name(request.experiment),
        directory=directory,
        processes=processes_of(directory, asked.nodes * per_node, threads, is_remote=True),
        workers_per_node=per_node,
        nodelist=getattr(load_experiment_class(request.experiment), SETTINGS_ATTRIBUTE).nodelist,
        again=python_command("realhf.cli.in_job", str(directory.path)),
        is_made_ready_there=True,
        takes_notice=True,
        start_id=current_start(directory),
    )


def note_unplanned(directory: RunDirectory, message: str, returncode: int) -> None:
    """Leaves the end of a run that was never planned."""
    status = Status(state="failed", step=0, steps=_steps(directory), message=message, returncode=returncode)
    write_status(directory.status, status)


def _steps(directory: RunDirectory) -> int:
    status = known_status(directory.status)
    return status.steps if status else 0
