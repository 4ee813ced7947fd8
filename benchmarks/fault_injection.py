"""Faults that strike a run from outside: which, on whom, in which phase; and how each is done."""

import contextlib
import ctypes
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from realhf.scheduler.activity import read_activity
from realhf.scheduler.base import MASTER, worker_name
from realhf.scheduler.checkpoints import saved_steps

Kind = Literal["kill", "hang", "exception", "full disk", "connection cut", "corrupted checkpoint"]
Phase = Literal["generation", "reallocation", "transfer", "optimizer", "renaming of a checkpoint", "any"]
NUM_WORKERS = 2
DISK_BYTES = 32 * 2**20
_PIDFD_GETFD = 438  # the system call's number on all of Linux's architectures
POLL_S = 0.002
# How the flight recorder of a worker names what it is in, while it is in it.
ACTIVITIES: dict[Phase, Callable[[str], bool]] = {
    "generation": lambda text: text.startswith("actor_generate") and text.endswith("compute"),
    "reallocation": lambda text: text.startswith("actor") and text.endswith("reallocation"),
    "transfer": lambda text: not text.startswith("waiting") and text.endswith("transfer"),
    "optimizer": lambda text: "_train_step of" in text and text.endswith("compute") and not text.startswith("waiting"),
}


def is_in(phase: Phase, activity: str) -> bool:
    """Whether a worker is in a phase, in its calls or in what it does beside them."""
    return any(ACTIVITIES[phase](text) for text in activity.split("; and "))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`kind` strikes `victim` in `phase`, when `after_checkpoints` checkpoints are complete.

    In `phase` is the victim, or where that is the master, the worker `watched`.
    """

    kind: Kind
    victim: str
    phase: Phase
    watched: str
    after_checkpoints: int


def make_schedule(runs: int, seed: int) -> list[Fault]:
    """The faults of a campaign: all kinds in turn, each over all phases and processes in turn, in a random order."""
    workers = [worker_name(i) for i in range(NUM_WORKERS)]
    phases: list[Phase] = [*ACTIVITIES, "renaming of a checkpoint"]
    kills = [("kill", victim, phase) for phase in ACTIVITIES for victim in (MASTER, *workers)]
    kills += [("kill", victim, phases[-1]) for victim in (MASTER, MASTER, MASTER, *workers)]
    hangs = [("hang", workers[i % 2], phase) for i, phase in enumerate(phases)] + [("hang", MASTER, "any")]
    exceptions = [("exception", worker, phase) for worker in workers for phase in ("generation", "optimizer")]
    cuts = [("connection cut", workers[i % 2], phase) for i, phase in enumerate(phases)]
    disks = [("full disk", "a disk", "any")] * 4
    corruptions = [("corrupted checkpoint", victim, "any") for victim in (MASTER, *workers)]
    groups = [kills, hangs, exceptions, cuts, disks, corruptions]
    generator = random.Random(seed)
    for group in groups:
        generator.shuffle(group)
    weights = [18, 8, 9, 9, 8, 8]  # of sixty; hangs take long
    chosen: list[tuple[str, str, str]] = []
    for group, weight in zip(groups, weights, strict=True):
        count = max(1, round(runs * weight / sum(weights)))
        chosen += [group[i % len(group)] for i in range(count)]
    generator.shuffle(chosen)
    return [
        Fault(
            kind=kind,  # type: ignore[arg-type]
            victim=victim,
            phase=phase,  # type: ignore[arg-type]
            watched=victim if victim in workers else generator.choice(workers),
            after_checkpoints=generator.choice((2, 3)),
        )
        for kind, victim, phase in chosen[:runs]
    ]


def one_of_each(schedule: Sequence[tuple[Fault, bool]]) -> list[tuple[Fault, bool]]:
    """The first fault of every kind with recovery, and the first kill without."""
    first: dict[tuple[Kind, bool], Fault] = {}
    for fault, recovers in schedule:
        if recovers or fault.kind == "kill":
            first.setdefault((fault.kind, recovers), fault)
    return [(fault, recovers) for (_, recovers), fault in first.items()]


@dataclass
class Strike:
    """What was hit, and what it was doing: `activity` as the flight recorder has it afterwards."""

    time_s: float
    activity: str
    checkpoints_before: list[int]
    corrupted: int | None = None


class Injector:
    """Strikes one run.

    Args:
        is_over: whether the run has ended, so that there is nothing left to strike.
        steps_left: how many steps are still to be made; where they become few it strikes in whatever phase.
    """

    def __init__(
        self, fault: Fault, run_dir: Path, fault_file: Path, is_over: Callable[[], bool], steps_left: Callable[[], int]
    ):
        self.fault, self._run_dir, self._fault_file = fault, run_dir, fault_file
        self._is_over, self._steps_left = is_over, steps_left
        self._checkpoints = run_dir / "checkpoints"
        self._ballast = self._checkpoints / "ballast"

    def strike(self) -> Strike | None:
        """Waits for the place and strikes; None where the run ended before."""
        fault = self.fault
        while not self._checkpoints.is_dir() or len(saved_steps(self._checkpoints)) < fault.after_checkpoints:
            if self._is_over():
                return None
            time.sleep(POLL_S)
        pids = processes(self._run_dir)
        victim = fault.victim if fault.victim in pids else MASTER
        self._wait_for_phase()
        before, corrupted, now_s = saved_steps(self._checkpoints), None, time.time()
        match fault.kind:
            case "kill":
                os.kill(pids[victim], signal.SIGKILL)
            case "hang":
                os.kill(pids[victim], signal.SIGSTOP)
            case "exception":
                write_whole(self._fault_file, f"pid {pids[victim]}")
            case "connection cut":
                cut_connections(pids[victim], pids[MASTER])
            case "full disk":
                fill(self._ballast)
            case "corrupted checkpoint":
                os.kill(pids[MASTER], signal.SIGSTOP)  # so that no newer one is completed meanwhile
                before = saved_steps(self._checkpoints)
                corrupted = before[-1]
                corrupt(self._checkpoints / f"step-{corrupted}")
                os.kill(pids[victim], signal.SIGKILL)
                if victim != MASTER:
                    os.kill(pids[MASTER], signal.SIGCONT)
        return Strike(time_s=now_s, activity=self._seen(), checkpoints_before=before, corrupted=corrupted)

    def _seen(self) -> str:
        """What the victim (or the process watched) is in, and in its phase which checkpoint has no name yet."""
        activity = str(read_activity(self._run_dir / "activity" / self.fault.watched) or "")
        if self.fault.phase != "renaming of a checkpoint":
            return activity
        unnamed = [path.name.removeprefix(".").removesuffix(".part") for path in self._checkpoints.glob(".step-*.part")]
        return "; ".join([activity, *(f"{name} had no name yet" for name in unnamed)])

    def undo(self) -> None:
        """Makes room again, after the fault has had its effect."""
        self._ballast.unlink(missing_ok=True)
        self._fault_file.unlink(missing_ok=True)

    def _wait_for_phase(self) -> None:
        phase, path = self.fault.phase, self._run_dir / "activity" / self.fault.watched
        while not self._is_over() and self._steps_left() > 2:
            if phase == "any":
                return
            if phase == "renaming of a checkpoint":
                if any(self._checkpoints.glob(".step-*.part/*/index.json")):
                    return
            elif (activity := read_activity(path)) and is_in(phase, activity.text):
                return
            time.sleep(POLL_S)


def processes(run_dir: Path) -> dict[str, int]:
    """The process ids of the run's master and workers, by name."""
    found: dict[str, int] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if str(run_dir) not in words or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if "realhf.master" in words:
                found[MASTER] = process.pid
            elif "realhf.worker" in words:
                found[worker_name(int(process.environ()["REALHF_WORKER_INDEX"]))] = process.pid
    return found


def cut_connections(pid: int, master: int) -> None:
    """Shuts down the TCP connections between a process and the master, as the network would, without telling either."""
    ports = {c.laddr.port for c in psutil.Process(master).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    call = ctypes.CDLL(None, use_errno=True).syscall
    handle = os.pidfd_open(pid)
    try:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.raddr and connection.raddr.port in ports:
                copy = call(_PIDFD_GETFD, handle, connection.fd, 0)
                if copy < 0:
                    raise OSError(ctypes.get_errno(), "pidfd_getfd")
                with socket.socket(fileno=copy) as ours:
                    ours.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(handle)


def fill(path: Path) -> None:
    """Writes a file until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


def corrupt(checkpoint: Path) -> None:
    """Changes one bit of one file of a checkpoint."""
    path = max(checkpoint.glob("*/boxes-*.safetensors"))
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        byte = file.read(1)
        file.seek(-8, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
