"""Owns a run from its first start to its end: started, watched, started again where it breaks or its plan changes."""

import contextlib
from collections.abc import Callable
from typing import Literal

from realhf.base.errors import RunError, UserError
from realhf.base.files import delete, writing_a_run
from realhf.data.inputs import check_inputs
from realhf.dataflow.plan import DIGEST_LENGTH, plan_digest
from realhf.launch.launcher import Launcher, launcher_name
from realhf.launch.process import Job, job_of
from realhf.launch.supervisor import supervise
from realhf.lifecycle.advice import going_on
from realhf.lifecycle.interruption import Detached, Interruption, Stopped
from realhf.lifecycle.new import checkpoint_lines, data_lines, fill, hardware_lines, schedule_lines
from realhf.lifecycle.replan import keep_times
from realhf.lifecycle.replanner import Replanner
from realhf.lifecycle.request import RunRequest
from realhf.lifecycle.resume import resumed_run, schedule_note
from realhf.lifecycle.shrink import Suspects, elsewhere
from realhf.lifecycle.unplanned import job_to_watch, planned_steps, why_unplanned
from realhf.rundir.checkpoints import Choice, newest_good, remove_unfinished, saved_steps
from realhf.rundir.events import EventKind, event_line, note
from realhf.rundir.lines import Tail, read_lines, step_line
from realhf.rundir.paths import MASTER, RunDirectory, workers_in_words
from realhf.rundir.prepare import prepare
from realhf.rundir.run import Run, load_run
from realhf.rundir.starts import is_to_be_planned, write_launched
from realhf.rundir.status import Status, read_status, requested_end, write_status

LAUNCHER_LOCK = "launcher"
WHILE_WAITING = "ended while its job waited in the queue, as was asked"


class Listener:
    """Hears of a run, and does nothing with it: a listener overrides what it wants to hear."""

    def say(self, text: str) -> None:
        """A sentence for people."""

    def search(self, phase: str, detail: str) -> None:
        """A search for a plan goes on (`realhf.planning.request.Watch`)."""

    def starting(self, run: Run, directory: RunDirectory, reason: str | None) -> None:
        """The processes of the run are about to be started; its directory is ready.

        `reason`: why once more: the run broke, or "" for a change of plan. None: the first start of this command.
        """

    def watched(self, job: str) -> None:
        """Another look was taken: the run directory may have news. `job`: the state of a cluster's job, "" for none."""


def start(run: Run, request: RunRequest, listener: Listener) -> None:
    """Carries out a new run; returns when it has ended well. It takes the signals of the main thread.

    Raises UserError or RunError if it could not be started or broke, KeyboardInterrupt after Ctrl-C or SIGTERM; notes
    say what was saved and which command goes on with a run that had begun. No process is left.
    """
    directory = request.directory
    launcher, _ = launcher_of(run, request, directory)
    RunDirectory.create(directory.path)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(directory.lock(LAUNCHER_LOCK))
            fill(run, directory)
        except (RunError, UserError):  # there is nothing that --resume could go on with
            with contextlib.suppress(OSError):
                delete(directory.path)
            raise
        note_start(run, directory, "started")
        Controller(run, request, directory, launcher, listener).carry_out()


def resume(request: RunRequest, listener: Listener) -> None:
    """As `start`, for the run in the request's directory, which goes on from its newest good checkpoint."""
    if request.run_dir is None:
        raise UserError("--resume goes on with a run that was begun: give its directory with --run-dir")
    directory = RunDirectory.open(request.run_dir)
    with directory.lock(LAUNCHER_LOCK):
        with directory.lock(MASTER):  # a job may outlive its launcher
            run, choice = resumed_run(request, directory, listener.search)
            launcher, _ = launcher_of(run, request, directory)
            warning = schedule_note(run, directory)
            fill(run, directory, accepts_inputs=request.recovery.accept_changed_inputs)
        note_start(run, directory, "resumed", choice)
        for step, reason in choice.damaged.items():
            listener.say(f"the checkpoint after step {step} is passed over: {reason}")
        listener.say(f"the run goes on after step {run.spec.resume_step}")
        if warning:
            listener.say(warning)
        Controller(run, request, directory, launcher, listener).carry_out()


def preview(run: Run, request: RunRequest) -> str:
    """The text of a dry run: a batch script, commands. Raises UserError where it cannot start them."""
    return launcher_of(run, request, request.directory)[1]


def launcher_of(run: Run, request: RunRequest, directory: RunDirectory) -> tuple[Launcher, str]:
    """The launcher of a run, and what it would start. Raises UserError where it cannot start it."""
    launcher = request.launcher(request.launcher_options)
    return launcher, launcher.preview(job_of(run, directory, is_remote=launcher.is_remote))


class Controller:
    """Carries out a run whose directory has been made. The directory holds the state of the run, except for the
    number of restarts and the workers to blame. `run`: None while its job has yet to plan it. `adopted`: a job of the
    launcher that was started already. `leaves`: Ctrl-C leaves the job alone."""

    def __init__(
        self,
        run: Run | None,
        request: RunRequest,
        directory: RunDirectory,
        launcher: Launcher,
        listener: Listener,
        adopted: str = "",
        *,
        leaves: bool = False,
    ):
        self._adopted, self._leaves = adopted, leaves or request.detached
        self._run, self._request, self._directory, self._launcher = run, request, directory, launcher
        self._listener = listener
        self._interruption = Interruption()

    def carry_out(self) -> None:
        """Returns when the run has ended well. However it ends, its directory tells how and has a report; there is none
        of a run that was never planned. Raises as `start`."""
        with self._interruption:
            try:
                if self._run:
                    self._describe(self._run)
                self.run_to_end()
                note(self._directory.events, "ended", self._steps())
            except Detached:
                raise
            except (KeyboardInterrupt, Exception) as error:
                with self._interruption.ignored():
                    if self._leaves_nothing(error):
                        self._listener.watched("")
                        with contextlib.suppress(OSError):  # the corrected command may name the same directory
                            delete(self._directory.path)
                    else:
                        self._end_badly(error)
                raise
            self._write_report()

    @writing_a_run()
    def run_to_end(self) -> None:
        """Starts the processes, watches them, and starts them again as the request says. Raises RunError if the run
        broke and no restart or too few workers are left. No process outlives an error."""
        suspects, restarts_left = Suspects(), self._request.recovery.restarts
        reason: str | None = None
        while True:
            try:
                before, other = self._started(reason)
                if other is None:
                    # The run is good whether or not the next one can learn from it.
                    with contextlib.suppress(UserError, OSError):
                        keep_times(before, self._directory)
                    return
                reason = ""
                self._run = continued(before, other, self._directory)
            except RunError as error:
                if self._run is None or not restarts_left:
                    raise
                before, reason, restarts_left = self._run, str(error), restarts_left - 1
                blamed = suspects.failed(last_step(self._directory), error.workers, before.spec.num_workers)
                moved = elsewhere(before, self._request, self._launcher, blamed, error, self._listener.search)
                if moved:
                    suspects = Suspects()
                try:
                    self._run = continued(before, moved or before, self._directory, reason)
                except (RunError, UserError) as cannot:
                    text = f"{reason}\nthe run cannot be restarted: {cannot}"
                    raise RunError(text, returncode=error.returncode) from error

    def _started(self, reason: str | None) -> tuple[Run, Run | None]:
        """Watches the processes from start to end. Returns the run, and under which plan it goes on if they ended for
        one."""
        with contextlib.ExitStack() as held:
            replanner = self._begin(self._run, held, reason) if self._run else None
            events = Tail(self._directory.events, event_line, lambda _: None)

            def look() -> None:
                nonlocal replanner
                self._interruption.check()
                if self._run is None and not is_to_be_planned(self._directory):
                    self._run = load_run(self._directory)
                    self._describe(self._run)
                    replanner = self._begin(self._run, held, None)
                for event in events.read():
                    if self._run and event.event == "requeued":
                        again = "SLURM has started the job once more"
                        self._listener.starting(load_run(self._directory), self._directory, again)
                if self._launcher.is_waiting():
                    request = requested_end(self._directory.stop)
                    if request is not None and request.reason == "asked":
                        raise Stopped(WHILE_WAITING)
                self._listener.watched(self._launcher.status())
                if replanner:
                    replanner.poll()

            self._watch(look)
            if self._run is None or replanner is None:
                raise why_unplanned(self._directory, "the job has ended")
            try:
                status = read_status(self._directory.status)
            except UserError as error:
                raise RunError(f"the processes have ended, but {error}") from None
            if status is not None and status.state in ("stopped", "requeued"):
                raise Stopped(status.message)
            return self._run, replanner.next_run() if status is not None and status.state == "replan" else None

    def _watch(self, look: Callable[[], None]) -> None:
        """Returns when the processes have ended well. Raises as `supervise`; says why a run was not planned."""
        job = job_to_watch(self._run, self._request, self._directory)
        try:
            supervise(
                self._launcher,
                job,
                look,
                lambda: self._start(job),
                is_ahead=lambda: self._run is None,
                leaves=self._leaves,
            )
        except KeyboardInterrupt:
            if self._leaves:
                raise Detached from None
            raise
        except RunError as error:
            if self._run is None and is_to_be_planned(self._directory):
                raise why_unplanned(self._directory, str(error)) from None
            raise

    def _begin(self, run: Run, held: contextlib.ExitStack, reason: str | None) -> Replanner:
        """Tells that the processes of a run are about to start. Returns the search for a new plan; `held` ends it."""
        replanner = Replanner(run, self._directory, self._request.replan, self._listener.say)
        held.callback(replanner.close)
        self._listener.starting(run, self._directory, reason)
        return replanner

    def _describe(self, run: Run) -> None:
        checkpoints = checkpoint_lines(run, self._directory.path)
        lines = (*hardware_lines(run, self._request.plan.plan), *checkpoints, *data_lines(run), *schedule_lines(run))
        for line in lines:
            self._listener.say(line)

    def _start(self, job: Job) -> None:
        """Starts the processes, or adopts those that run, and leaves in the directory what they are."""
        if self._adopted:
            self._launcher.adopt(job, self._adopted)
            self._adopted = ""
        else:
            self._launcher.start(job)
        name, job_id = launcher_name(self._request.launcher), self._launcher.job_id()
        write_launched(self._directory.launched, name, job_id, self._request.words)
        if self._request.detached:
            raise Detached

    def _steps(self) -> int:
        return self._run.experiment.steps if self._run else planned_steps(self._directory)

    def _leaves_nothing(self, error: BaseException) -> bool:
        """Whether there is nothing of the run to keep: no process has said a word, and no checkpoint is there."""
        if self._run is None:
            return isinstance(error, KeyboardInterrupt | UserError) and not self._leaves
        said = any(log.stat().st_size for log in self._directory.logs.glob("*"))
        return isinstance(error, UserError) and not said and not saved_steps(self._directory.checkpoints)

    def _end_badly(self, error: BaseException) -> None:
        """Leaves the last word in the directory, since the master may have been killed, or ended for another's end."""
        self._listener.watched("")
        directory, step = self._directory, last_step(self._directory)
        state: Literal["failed", "interrupted", "stopped"] = "failed"
        if isinstance(error, KeyboardInterrupt | Stopped):
            state = "stopped" if isinstance(error, Stopped) else "interrupted"
        is_told = isinstance(error, KeyboardInterrupt | Stopped | RunError | UserError)
        text = str(error) if is_told else f"{type(error).__name__}: {error}"
        note(directory.events, state, step, text)
        if self._run:
            error.add_note(going_on(self._run, directory, self._request, step))
        message = "\n".join(filter(None, [text, *getattr(error, "__notes__", ())]))
        code = error.returncode if isinstance(error, RunError) else 2 if isinstance(error, UserError) else 1
        status = Status(state=state, step=step, steps=self._steps(), message=message, returncode=code)
        with contextlib.suppress(OSError):  # on a full disk: what went wrong is said by the error
            remove_unfinished(directory.checkpoints)
            write_status(directory.status, status)
        if self._run:
            self._write_report()

    def _write_report(self) -> None:
        """Writes a report of the run so far. An error in it must not hide how the run ended."""
        from realhf.report.page import write_report  # plotly takes a while to import

        try:
            write_report(self._directory)
        except (UserError, OSError) as error:
            self._listener.say(f"no report: {error}")


def continued(before: Run, run: Run, directory: RunDirectory, failure: str | None = None) -> Run:
    """`run` as it goes on from its newest good checkpoint or the beginning, its directory made ready. Notes what
    differs from `before`: the number of workers, places, the plan. After a failure, notes it and the restart too.
    Raises RunError if a file cannot be written, UserError if what the run reads has changed."""
    if failure is not None:
        note(directory.events, "failed", last_step(directory), failure)
    choice = newest_good(directory.checkpoints)
    step = choice.state.step if choice.state else 0
    run = run.changed(resume_step=step)
    check_inputs(run, directory)
    prepare(run, directory)
    old, new = (plan_digest(one.plan)[:DIGEST_LENGTH] for one in (before, run))
    texts = []
    if run.spec.num_workers != before.spec.num_workers:
        texts.append(f"{workers_in_words(run.spec.num_workers)} instead of {before.spec.num_workers}")
    if gone := set(run.spec.avoided) - set(before.spec.avoided):
        texts.append(f"without {', '.join(sorted(gone))}")
    if new != old:
        prediction = f", {run.plan.predicted_step_s:.3g} s a step predicted" if run.plan.predicted_step_s else ""
        texts.append(f"plan {new} instead of {old}{prediction}")
    if texts:
        note(directory.events, "replanned", step, "; ".join(texts))
    if failure is not None:
        note_start(run, directory, "restarted", choice)
    return run


def note_start(run: Run, directory: RunDirectory, event: EventKind, choice: Choice | None = None) -> None:
    """Notes from where the run starts, and which checkpoints were passed over."""
    step = run.spec.resume_step
    begin = f"checkpoints/step-{step}" if step else "the beginning"
    texts = [f"{workers_in_words(run.spec.num_workers)}, from {begin}"]
    texts += [f"step {bad} is not good: {reason}" for bad, reason in (choice.damaged if choice else {}).items()]
    note(directory.events, event, step, "; ".join(texts))


def note_end(
    directory: RunDirectory,
    steps: int,
    state: Literal["stopped", "interrupted"] = "stopped",
    message: str = WHILE_WAITING,
) -> None:
    """Notes the end of a run whose job has no process: it waits, or was cancelled while no process watched it."""
    step = last_step(directory)
    note(directory.events, state, step, message)
    write_status(directory.status, Status(state=state, step=step, steps=steps, message=message))


def last_step(directory: RunDirectory) -> int:
    """The number of steps that the metrics tell of."""
    steps = read_lines(directory.metrics, step_line).values
    return int(steps[-1]["step"]) if steps else 0
