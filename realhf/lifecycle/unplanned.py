"""A run whose job has yet to plan it: whether that is so, the job, and why it was not planned."""

from realhf.api.experiment import SETTINGS_ATTRIBUTE
from realhf.base.code_files import python_command
from realhf.base.errors import RunError, UserError
from realhf.base.files import last_lines
from realhf.launch.process import Job, job_name, job_of, processes_of
from realhf.launch.supervisor import LOG_LINES
from realhf.lifecycle.interruption import Stopped
from realhf.lifecycle.request import RunRequest
from realhf.planning.clusters import cluster_of, devices_per_node, is_unknown_here
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run, load_experiment_class
from realhf.rundir.starts import current_start, read_later, start_refusal
from realhf.rundir.status import Status, known_status, write_status


def plans_in_job(request: RunRequest) -> bool:
    """Whether the job of a request plans its run: that is asked for, or nothing here tells the nodes' hardware."""
    is_asked_to = getattr(request.launcher_options, "plan_in_job", False)
    return is_asked_to or is_unknown_here(request.plan_request().devices)


def job_to_watch(run: Run | None, request: RunRequest, directory: RunDirectory) -> Job:
    """The job of a run, or (None) of one that it has yet to plan: raises UserError where the request does not tell its
    size."""
    if run:
        return job_of(run, directory, is_remote=request.launcher.is_remote)
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


def why_unplanned(directory: RunDirectory, end: str) -> Exception:
    """Why a job has ended before its run was planned: the reason that the job noted, else `end`."""
    status = known_status(directory.status)
    if status is not None and status.state == "stopped":
        return Stopped(status.message)
    if status is not None and status.state == "failed":
        is_wrong = status.returncode == 2
        return UserError(status.message) if is_wrong else RunError(status.message, returncode=status.returncode)
    if reason := start_refusal(read_later(directory)):
        return reason
    log = directory.job_log
    return RunError(f"{end}, before its run was planned; log: {log}{last_lines(log, LOG_LINES)}")


def note_unplanned(directory: RunDirectory, message: str, returncode: int) -> None:
    """Leaves the end of a run that was never planned."""
    status = Status(state="failed", step=0, steps=planned_steps(directory), message=message, returncode=returncode)
    write_status(directory.status, status)


def planned_steps(directory: RunDirectory) -> int:
    """The steps of a run by its status, which a run that is not planned has too."""
    status = known_status(directory.status)
    return status.steps if status else 0
