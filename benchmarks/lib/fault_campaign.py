"""Runs of the small main job that are struck by faults, and what became of each."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.fault_job import PLAN
from lib.common import commit
from lib.fault_checks import Reference, leaks, read_events
from lib.fault_injection import DISK_BYTES, RUN_DISK_BYTES, Fault, Injector, Strike
from lib.fault_outcome import Outcome

from realhf.base.code_files import python_command
from realhf.dataflow.plan import save_plan
from realhf.rundir.events import Event

EXPERIMENT = Path(__file__).parents[1] / "jobs/fault_job.py"
DEADLINE_S = 1500.0  # of a whole run, on a machine that may be busy with much else
REFUSED = 2  # the exit code of `realhf run` for what its user has to change


@dataclass(frozen=True, kw_only=True)
class Found:
    """How a run ended: its exit code and error, whether a cut connection came back, and what `--resume` refused."""

    code: int
    message: str
    came_back: bool
    refusal: str


class Campaign:
    """Runs of so many steps in `folder`, checkpoints every `interval` of them.

    Args:
        call_timeout_s: what a hang is noticed by. Calls take hundredths of a second where the machine is idle.
        hold_at: the step (from 1) in which every run waits until it was struck; None: none waits.
        shared_memory: the folder of shared memory, where nothing but these runs may be at work; None: not looked at.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int = 16,
        interval: int = 3,
        call_timeout_s: float = 30.0,
        hold_at: int | None = None,
        shared_memory: Path | None = None,
    ):
        self._folder, self._steps, self._interval, self._call_timeout_s = folder, steps, interval, call_timeout_s
        self._hold_at, self._shared_memory = hold_at, shared_memory
        self._plan, self._commit = folder / "plan.json", commit()
        save_plan(PLAN, self._plan)
        self._reference_process = self._start(folder / "reference", "--recover", "never")

    def reference(self) -> Reference:
        """The run without a fault, which runs beside the first ones. Ends the program if it failed."""
        if self._reference_process.wait(DEADLINE_S):
            sys.exit(f"the run without a fault failed:\n{self._output(self._folder / 'reference').read_text()}")
        return Reference(self._folder / "reference")

    def run(self, number: int, fault: Fault, recovers: bool) -> Outcome:
        """One run that is struck; without recovery it is resumed afterwards. A run that does not hold is kept."""
        run_dir, started = self._folder / f"run-{number}", time.monotonic()
        if self._hold_at is not None:
            self._fault_file(run_dir).write_text(f"hold {self._hold_at - 1}")
        words = ("--recover", "auto" if recovers else "never", "--max-restarts", "9")
        disk = self._disk(fault, run_dir)
        if disk == run_dir:
            run_dir.mkdir()
            mount(disk, RUN_DISK_BYTES)
        process = self._start(run_dir, *words)
        if disk and disk != run_dir:
            self._mount_when_there(disk, process)
        injector = Injector(
            fault,
            run_dir,
            self._fault_file(run_dir),
            is_over=lambda: process.poll() is not None,
            steps_left=lambda: self._steps - _steps_made(run_dir),
        )
        strike = injector.strike()
        came_back = self._wait_for_effect(run_dir, process, injector, strike.time_s if strike else 0.0)
        injector.undo()
        code, refusal = process.wait(DEADLINE_S), ""
        message = self._errors(run_dir)
        # Where nothing can be written, nothing can be recovered before there is room.
        if code and (not recovers or disk == run_dir):
            start = self._output(run_dir).stat().st_size
            if self._start(run_dir, "--resume").wait(DEADLINE_S) == REFUSED:
                refusal = self._errors(run_dir, start)
        found = Found(code=code, message=message, came_back=came_back, refusal=refusal)
        outcome = self._outcome(number, fault, run_dir, strike, "auto" if recovers else "by hand", found, started)
        if not outcome.holds:
            self._keep(number, run_dir)
        if disk:
            subprocess.run(["umount", str(disk)], check=True)
        shutil.rmtree(run_dir)
        return outcome

    def _disk(self, fault: Fault, run_dir: Path) -> Path | None:
        """The folder that is a disk of its own, to be filled."""
        match fault.kind:
            case "full disk":
                return run_dir / "checkpoints"
            case "full run directory":
                return run_dir
        return None

    def _errors(self, run_dir: Path, start: int = 0) -> str:
        """What was said from the first error on, of the output from `start` on."""
        return self._output(run_dir).read_bytes()[start:].decode(errors="replace").partition("error: ")[2]

    def _start(self, run_dir: Path, *words: str) -> subprocess.Popen[bytes]:
        command = list(python_command("realhf.cli", "run", str(EXPERIMENT), "--run-dir", str(run_dir)))
        if "--resume" not in words:
            command += ["--plan", str(self._plan), "--steps", str(self._steps)]
            command += ["--checkpoint-every", str(self._interval)]
            command += ["--reference-eta", "0.1"]  # the reference follows the actor, so it is a state too
            command += ["--call-timeout-s", str(self._call_timeout_s), "--fault-file", str(self._fault_file(run_dir))]
        _temporary(run_dir).mkdir(exist_ok=True)
        with self._output(run_dir).open("ab") as file:
            return subprocess.Popen(
                [*command, *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(_temporary(run_dir))},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def _output(self, run_dir: Path) -> Path:
        return run_dir.with_suffix(".txt")

    def _fault_file(self, run_dir: Path) -> Path:
        return run_dir.with_suffix(".fault")

    def _mount_when_there(self, disk: Path, process: subprocess.Popen[bytes]) -> None:
        while not disk.is_dir() and process.poll() is None:
            time.sleep(0.005)
        mount(disk, DISK_BYTES)

    def _wait_for_effect(
        self, run_dir: Path, process: subprocess.Popen[bytes], injector: Injector, struck_s: float
    ) -> bool:
        """Until the run has noted a failure, or has ended. A cut connection may do no harm: returns whether it was seen
        to come back."""
        deadline, came_back = time.monotonic() + DEADLINE_S, False
        while process.poll() is None and time.monotonic() < deadline:
            came_back = came_back or injector.has_come_back()
            events = read_events(run_dir)
            if any(event.event == "failed" and event.time_s >= struck_s for event in events):
                break
            time.sleep(0.02)
        return came_back

    def _keep(self, number: int, run_dir: Path) -> None:
        kept = Path(tempfile.mkdtemp(prefix=f"realhf-fault-{number}-"))
        shutil.copytree(run_dir, kept / "run", symlinks=True)
        shutil.copy(self._output(run_dir), kept / "output.txt")
        print(f"run {number} does not hold; it is kept in {kept}", file=sys.stderr)

    def _outcome(
        self, number: int, fault: Fault, run_dir: Path, strike: Strike | None, mode: str, found: "Found", started: float
    ) -> Outcome:
        # Before the strike there may be a failure of a machine that is too busy.
        struck_s = strike.time_s if strike else 0.0
        events = read_events(run_dir)
        since = [event for event in events if event.time_s >= struck_s]
        failure = _first(since, "failed")
        again = _first(since, "restarted") or _first(since, "resumed")
        reason = failure.message if failure else ""
        set_aside = [path.name for path in (run_dir / "checkpoints").glob("damaged-*")]
        corrupted = strike.corrupted if strike else None
        # Whatever was newer than the one restored was set aside: there may be only what was corrupted on purpose.
        is_newest = set(set_aside) <= {f"damaged-step-{corrupted}"}
        if again is not None:
            done = {event.step for event in events[: events.index(again)] if event.event == "checkpoint"} - {corrupted}
            is_newest &= again.step == max(done | {again.step}, default=0)
        effect = "failed" if failure or found.code else "came back" if found.came_back else ""
        return Outcome(
            number=number,
            commit=self._commit,
            mode=mode,
            interval=self._interval,
            fault=fault,
            activity=strike.activity if strike else "the run had ended",
            evidence=strike.evidence if strike else "",
            effect=effect,
            refusal=_first_line(found.refusal, run_dir),
            is_plain=fault.kind == "exception" or "Traceback" not in self._output(run_dir).read_text(errors="replace"),
            steps_at_failure=failure.step if failure else None,
            checkpoints_before=strike.checkpoints_before if strike else [],
            noticed_after_s=round(failure.time_s - struck_s, 1) if failure else None,
            restored=again.step if again else None,
            is_newest_good=is_newest,
            redone=max(0, failure.step - again.step) if failure and again else None,
            is_equal=self.reference().is_equalled_by(run_dir, strike.lost_steps if strike else frozenset()),
            message=_first_line(reason or found.message, run_dir),
            names_victim=effect != "failed" or _names(fault, (reason or found.message).partition("\n")[0]),
            left_behind=leaks(run_dir, _temporary(run_dir), self._shared_memory),
            seconds=round(time.monotonic() - started, 1),
        )


def mount(folder: Path, size_bytes: int) -> None:
    """A disk of this size in memory, in place of `folder`."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True)


def _temporary(run_dir: Path) -> Path:
    """Where the run's processes put temporary files; it must be empty in the end."""
    return run_dir.with_suffix(".temporary")


def _first_line(text: str, run_dir: Path) -> str:
    return text.partition("\n")[0].replace(str(run_dir), "RUN_DIR")


def _first(events: Sequence[Event], kind: str) -> Event | None:
    return next((event for event in events if event.event == kind), None)


def _names(fault: Fault, message: str) -> bool:
    """Whether the first line of a message names the victim: the process, for a disk the checkpoint and the reason."""
    if fault.kind == "full disk":
        return "checkpoint" in message and "No space left" in message
    if fault.kind == "full run directory":
        return "No space left" in message
    return fault.victim in message.replace("worker ", "worker-")


def _steps_made(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
