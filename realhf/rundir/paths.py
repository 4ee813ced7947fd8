"""The directory of one run: which file lies where."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from realhf.base.errors import UserError
from realhf.base.files import delete, open_regular, writing_a_run

MASTER = "master"
_FOLDERS = ("logs", "checkpoints", "keys", "rendezvous", "activity", "launcher")


def worker_name(index: int) -> str:
    return f"worker-{index}"


def worker_of(name: str) -> int | None:
    """The index of the worker with this name, None for the master."""
    prefix, _, index = name.partition("-")
    return int(index) if prefix == "worker" and index.isdecimal() else None


def workers_in_words(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


@dataclass(frozen=True)
class _Below:
    """A path below the run directory."""

    name: str

    def __get__(self, directory: "RunDirectory", _owner: type) -> Path:
        return directory.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """Paths below `path`, which is made absolute."""

    path: Path

    plan = _Below("plan.json")
    experiment = _Below("experiment.json")  # with every default resolved
    inputs = _Below("inputs.json")  # the digests of the files that the run reads (`realhf.data.inputs`)
    metrics = _Below("metrics.jsonl")  # one JSON object a step
    evaluations = _Below("evaluations.jsonl")  # one JSON object an evaluation
    samples = _Below("samples.jsonl")  # completions as texts, with `--samples`, one JSON object a sample
    outputs = _Below("outputs.jsonl")  # digests of all that calls made (`realhf verify`), one JSON object a step
    events = _Below("events.jsonl")  # events of the run as a whole, one JSON object an event
    trace = _Below("trace.json")  # Chrome trace events, one row a worker
    status = _Below("status.json")
    report = _Below("report.html")
    tokenizer = _Below("tokenizer")  # the files of the experiment's tokenizer
    calls = _Below("program/calls.jsonl")  # the calls of a live program (`realhf.rundir.calls_file`)
    rounds = _Below("program/rounds.jsonl")  # a line for each round of a live program (`realhf.rundir.calls_file`)
    saved = _Below("program/saved.jsonl")  # a line for each model that a live program has saved
    values = _Below("program/values")  # a live program's fetched and given values, a folder a round
    rollouts = _Below("rollouts")  # the data of `--record`, a folder a step
    logs = _Below("logs")
    checkpoints = _Below("checkpoints")
    keys = _Below("keys")  # the run's CURVE keys (0700)
    rendezvous = _Below("rendezvous")  # the master's address; of a profile, torch's file store (0700)
    launcher = _Below("launcher")  # the launcher's own files, such as a batch script
    script = _Below("launcher/job.sbatch")  # the batch script of a SLURM job
    start = _Below("launcher/start")  # the id of the newest start (`realhf.rundir.starts`)
    exits = _Below("launcher/exits")  # by start: where each task of a SLURM job leaves its exit code, in a file
    job_log = _Below("launcher/slurm.log")  # the output of the batch script and of srun
    launched = _Below("launcher/job.json")  # the last start (`realhf.rundir.starts`)
    request = _Below("launcher/request.json")  # the request of a run that its job plans (`realhf.rundir.starts`)
    stop = _Below("launcher/stop")  # asks the master to end with a checkpoint (`realhf.rundir.status`)
    switch = _Below("launcher/switch")  # asks the master to end after the next checkpoint, for another plan

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path.absolute())  # processes may run in other working directories

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """Makes the directory and its folders. Raises UserError if something is there already."""
        directory = cls(path)
        path = directory.path
        directory.check_new()
        try:
            path.mkdir(parents=True, exist_ok=True)
            first, *others = (path / name for name in _FOLDERS)
            try:
                first.mkdir()
            except FileExistsError:  # by a command that was started at the same time, as the tasks of an array are
                raise UserError(f"another run has just begun in {path}; give each a --run-dir of its own") from None
            for folder in others:
                folder.mkdir()
            for folder in (directory.keys, directory.rendezvous):  # processes that can write here can join the run
                folder.chmod(0o700)
        except OSError as error:
            with contextlib.suppress(OSError):
                delete(path)
            raise UserError(f"cannot make the run directory {path}: {error}; give another with --run-dir") from error
        return directory

    def check_new(self) -> None:
        """Raises UserError if something is there already."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(f"the run directory {self.path} exists and is not empty; give a new one with --run-dir")

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """An existing run directory. Raises UserError if it is none."""
        directory = cls(path)
        if missing := [name for name in _FOLDERS if not (path / name).is_dir()]:
            raise UserError(f"{path} is no run directory: it has no {', '.join(missing)}; give the --run-dir of a run")
        return directory

    @contextlib.contextmanager
    def lock(self, holder: str, wait_s: float = 0.0) -> Iterator[None]:
        """For a process that must be alone: the run's supervisor ("launcher"), its master. Ends with the process.

        Raises:
            UserError: another process has it, after `wait_s` still; or the file system has no locks.
            RunError: its file cannot be written.
        """
        deadline = time.monotonic() + wait_s
        with writing_a_run():
            file = open_regular(self.launcher / f"{holder}.lock", "a+", errors="replace")
        with file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        file.seek(0)
                        raise UserError(
                            f"the run in {self.path} still goes on: its {holder} is {file.read() or 'a process'}; "
                            "wait for its end or stop it"
                        ) from None
                    time.sleep(0.2)
                except OSError as error:  # as of Lustre that is mounted without them
                    raise UserError(
                        f"the file system of {self.path} has no locks (flock: {error.strerror}); give --run-dir on one "
                        "that has, such as NFS 4, or Lustre mounted with -o flock"
                    ) from None
            with contextlib.suppress(OSError):  # on a full disk: the lock holds whatever the file says
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
            yield

    def is_locked(self, holder: str) -> bool:
        """Whether a process has the lock of `holder`."""
        try:
            with open_regular(self.launcher / f"{holder}.lock", "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def log(self, process: str) -> Path:
        """The output of a process: "master" or "worker-3"."""
        return self.logs / f"{process}.log"

    def stacks(self, process: str) -> Path:
        """The Python stacks of the process when the run was found stuck."""
        return self.logs / f"stacks-{process}.txt"

    def activity(self, process: str) -> Path:
        """The activity of a process (`realhf.rundir.flight_recorder`)."""
        return self.path / "activity" / process
