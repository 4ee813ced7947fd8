"""Faults that strike a run from outside: which, on whom, in which phase; and how each is done."""

import contextlib
import ctypes
import itertools
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from realhf.rundir.checkpoints import saved_steps
from realhf.rundir.flight_recorder import read_activity
from realhf.rundir.paths import MASTER, worker_name

Kind = Literal[
    "kill", "hang", "exception", "full disk", "full run directory", "connection cut", "corrupted checkpoint",
    "damaged file",
]  # fmt: skip
Damage = Literal["bit", "garbage", "cut", "empty"]
Phase = Literal["generation", "reallocation", "transfer", "optimizer", "renaming of a checkpoint", "any"]
NUM_WORKERS = 2
DISK_BYTES, RUN_DISK_BYTES = 32 * 2**20, 96 * 2**20
STRUCK_WITHIN_S = 120.0  # the system ends, stops and cuts at once, if it is not busy with much else
# Files of the newest checkpoint, and of the run directory beside checkpoints; and what is done to each.
OF_CHECKPOINTS: list[tuple[str, Damage]] = [
    ("checkpoints/step-*/*/boxes-*.safetensors", "bit"),
    ("checkpoints/step-*/run.json", "bit"),
    ("checkpoints/step-*/*/index.json", "bit"),
    ("checkpoints/step-*/run.json", "empty"),
    ("checkpoints/step-*/*/index.json", "cut"),
]
OF_RUNS: list[tuple[str, Damage]] = [
    ("status.json", "empty"),
    ("metrics.jsonl", "garbage"),
    ("events.jsonl", "cut"),
    ("plan.json", "garbage"),
    ("experiment.json", "cut"),
    ("trace.json", "garbage"),
    ("metrics.jsonl", "cut"),
    ("status.json", "garbage"),
    ("events.jsonl", "garbage"),
    ("metrics.jsonl", "empty"),
]
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

    In `phase` is the victim, or where that is the master, the worker `watched`. Where a file is damaged, that is
    `file` (a pattern; of several the newest checkpoint's) in the way `damage`, while the run stands still, and the
    victim is killed.
    """

    kind: Kind
    victim: str
    phase: Phase
    watched: str
    after_checkpoints: int
    file: str = ""
    damage: Damage = "bit"


def make_schedule(runs: int, seed: int) -> list[Fault]:
    """The faults of a campaign: all kinds in turn, each over all phases and processes in turn, in a random order."""
    workers = [worker_name(i) for i in range(NUM_WORKERS)]
    phases: list[Phase] = [*ACTIVITIES, "renaming of a checkpoint"]
    kills = [("kill", victim, phase) for phase in ACTIVITIES for victim in (MASTER, *workers)]
    kills += [("kill", victim, phases[-1]) for victim in (MASTER, MASTER, MASTER, *workers)]
    hangs = [("hang", workers[i % 2], phase) for i, phase in enumerate(phases)] + [("hang", MASTER, "any")]
    exceptions = [("exception", worker, phase) for worker in workers for phase in ("generation", "optimizer")]
    cuts = [("connection cut", workers[i % 2], phase) for i, phase in enumerate(phases)]
    disks = [("full disk", "a disk", "any"), ("full run directory", "a disk", "any")] * 2
    corruptions = [("corrupted checkpoint", victim, "any") for victim in (MASTER, *workers)]
    damages = [("damaged file", victim, "any") for victim in (MASTER, *workers)]
    groups = [kills, hangs, exceptions, cuts, disks, corruptions, damages]
    generator = random.Random(seed)
    for group in (kills, hangs, exceptions, cuts, corruptions, damages):
        generator.shuffle(group)
    weights = [14, 5, 5, 5, 4, 5, 10]  # of 48; hangs take long
    chosen: list[tuple[str, str, str]] = []
    for group, weight in zip(groups, weights, strict=True):
        count = max(1, round(runs * weight / sum(weights)))
        chosen += [group[i % len(group)] for i in range(count)]
    generator.shuffle(chosen)
    turn = 3 * seed % len(OF_RUNS)  # runs without recovery begin with the plan
    of_runs = OF_RUNS[turn:] + OF_RUNS[:turn]
    files = {"corrupted checkpoint": itertools.cycle(OF_CHECKPOINTS), "damaged file": itertools.cycle(of_runs)}
    faults = []
    for kind, victim, phase in chosen[:runs]:
        file, damage = next(files[kind]) if kind in files else ("", "bit")
        faults.append(
            Fault(
                kind=kind,  # type: ignore[arg-type]
                victim=victim,
                phase=phase,  # type: ignore[arg-type]
                watched=victim if victim in workers else generator.choice(workers),
                after_checkpoints=generator.choice((2, 3)),
                file=file,
                damage=damage,
            )
        )
    return faults


def one_of_each(schedule: Sequence[tuple[Fault, bool]]) -> list[tuple[Fault, bool]]:
    """The first fault of every kind with recovery, and the first kill without."""
    first: dict[tuple[Kind, bool], Fault] = {}
    for fault, recovers in schedule:
        if recovers or fault.kind == "kill":
            first.setdefault((fault.kind, recovers), fault)
    return [(fault, recovers) for (_, recovers), fault in first.items()]


@dataclass
class Strike:
    """What was hit, and what it was doing: `activity` as the flight recorder has it afterwards.

    `evidence` is what was seen of the strike, "" if nothing was: then the run was not struck. `corrupted` is the step
    of the checkpoint that was damaged, `lost_steps` those whose metrics were.
    """

    time_s: float
    activity: str
    checkpoints_before: list[int]
    evidence: str
    corrupted: int | None = None
    lost_steps: frozenset[int] = frozenset()


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
        self._ballast = (run_dir if fault.kind == "full run directory" else self._checkpoints) / "ballast"
        self._cut_ports: set[int] = set()

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
        before, now_s, hit = saved_steps(self._checkpoints), time.time(), Hit()
        match fault.kind:
            case "kill":
                hit.evidence = kill(pids[victim])
            case "hang":
                os.kill(pids[victim], signal.SIGSTOP)
                hit.evidence = wait_until(lambda: status_of(pids[victim]) == psutil.STATUS_STOPPED, "it is stopped")
            case "exception":
                write_whole(self._fault_file, f"pid {pids[victim]}")
                gone = wait_until(lambda: not self._fault_file.exists() or self._is_over(), "it raised")
                hit.evidence = "" if self._fault_file.exists() else gone
            case "connection cut":
                self._cut_ports = cut_connections(pids[victim], pids[MASTER])
                hit.evidence = f"{len(self._cut_ports)} connections cut" if self._cut_ports else ""
            case "full disk" | "full run directory":
                fill(self._ballast)
                room = os.statvfs(self._ballast.parent).f_bavail
                hit.evidence = "" if room else "no block is free"
            case "corrupted checkpoint" | "damaged file":
                os.kill(pids[MASTER], signal.SIGSTOP)  # so that nothing is written meanwhile
                wait_until(lambda: status_of(pids[MASTER]) == psutil.STATUS_STOPPED, "it is stopped")
                before = saved_steps(self._checkpoints)
                hit = self._damage(before[-1])
                hit.evidence += f"; {kill(pids[victim])}"
                if victim != MASTER:
                    os.kill(pids[MASTER], signal.SIGCONT)
        return Strike(
            time_s=now_s,
            activity=self._seen(),
            checkpoints_before=before,
            evidence=hit.evidence,
            corrupted=hit.corrupted,
            lost_steps=hit.lost_steps,
        )

    def _damage(self, newest: int) -> "Hit":
        """Damages the file of the fault, in the newest checkpoint if it is of one."""
        path = max(self._run_dir.glob(self.fault.file.replace("step-*", f"step-{newest}")))
        is_metrics = path.name == "metrics.jsonl"
        before = readable_steps(path) if is_metrics else set()
        evidence = damage(path, self.fault.damage)
        return Hit(
            evidence=f"{path.relative_to(self._run_dir)}: {evidence}" if evidence else "",
            corrupted=newest if self.fault.kind == "corrupted checkpoint" else None,
            lost_steps=frozenset(before - readable_steps(path)) if is_metrics else frozenset(),
        )

    def has_come_back(self) -> bool:
        """Whether the victim of a cut has a connection with the master again, beside those that were cut."""
        pids = processes(self._run_dir)
        if not self._cut_ports or not {self.fault.victim, MASTER} <= pids.keys():
            return False
        with contextlib.suppress(psutil.Error):
            found = connections_with(pids[self.fault.victim], pids[MASTER])
            return any(c.status == psutil.CONN_ESTABLISHED and c.laddr.port not in self._cut_ports for c in found)
        return False

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


@dataclass
class Hit:
    """What a strike was seen to do; see `Strike`."""

    evidence: str = ""
    corrupted: int | None = None
    lost_steps: frozenset[int] = frozenset()


def wait_until(is_so: Callable[[], bool], then: str) -> str:
    """`then` as soon as it is so, "" if it never is."""
    deadline = time.monotonic() + STRUCK_WITHIN_S
    while not is_so():
        if time.monotonic() > deadline:
            return ""
        time.sleep(POLL_S)
    return then


def kill(pid: int) -> str:
    os.kill(pid, signal.SIGKILL)
    return wait_until(lambda: status_of(pid) in (None, psutil.STATUS_ZOMBIE), "it is dead")


def status_of(pid: int) -> str | None:
    """None: there is no such process."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None


def connections_with(pid: int, master: int) -> list[Any]:
    """The TCP connections of a process with the master."""
    ports = {c.laddr.port for c in psutil.Process(master).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return [c for c in psutil.Process(pid).net_connections("tcp") if c.raddr and c.raddr.port in ports]


def cut_connections(pid: int, master: int) -> set[int]:
    """Shuts down the TCP connections between a process and the master, as the network would, without telling either.

    Returns the ports that the process had for them.
    """
    call, cut = ctypes.CDLL(None, use_errno=True).syscall, set()
    handle = os.pidfd_open(pid)
    try:
        for connection in connections_with(pid, master):
            copy = call(_PIDFD_GETFD, handle, connection.fd, 0)
            if copy < 0:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
            with socket.socket(fileno=copy) as ours:
                ours.shutdown(socket.SHUT_RDWR)
            cut.add(connection.laddr.port)
    finally:
        os.close(handle)
    return cut


def fill(path: Path) -> None:
    """Writes a file until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


def damage(path: Path, how: Damage) -> str:
    """Changes a file in place; what was done, "" if it is as it was."""
    content = path.read_bytes()
    middle = len(content) // 2
    match how:
        case "bit":
            changed = content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]
        case "garbage":  # no text in any encoding of ours
            changed = content[:middle] + b"\xff" * 8 + content[middle + 8 :]
        case "cut":
            changed = content[:middle]
        case "empty":
            changed = b""
    with path.open("r+b") as file:
        file.write(changed)
        file.truncate()
    return f"{how}, {len(content)} bytes before and {len(changed)} after" if changed != content else ""


def readable_steps(metrics: Path) -> set[int]:
    """The steps of the lines that are whole."""
    found = set()
    for line in metrics.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            found.add(int(json.loads(line)["step"]))
    return found


def write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
