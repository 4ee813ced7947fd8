"""Fault campaign: the main job, small, broken at recorded places, must end as if nothing had happened.

Every run trains on two workers with two steps in flight and checkpoints written beside training. After two or three
of these a fault strikes: a process is killed or stopped, a disk is full, a connection cut, an interface raises, a
checkpoint is corrupted; in a phase that the schedule names. With `--recover auto` the run has to end by itself with the
metrics and parameters of the run without a fault, bit for bit, from the newest good checkpoint. Some runs (`--without`)
have no recovery: those have to end with a message that names the victim, and `--resume` has to finish them as well.

The faults come from outside. Linux only; disks that can be filled are mounted in a namespace of their own (`unshare`).
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from common import case, finish
from fault_checks import Reference, leaks
from fault_injection import DISK_BYTES, Fault, Injector, Strike, make_schedule

from realhf.api.plan import CallPlan, ExecutionPlan, save_plan
from realhf.scheduler.events import Event, read_events

EXPERIMENT = Path(__file__).with_name("fault_job.py")
STEPS, INTERVAL = 16, 3
FOLDER_BYTES = 2**31
DEADLINE_S = 900.0
CALL_TIMEOUT_S = 120.0
IN_NAMESPACE = "REALHF_FAULTS_IN_NAMESPACE"
BOTH, FIRST, SECOND = CallPlan(devices=(0, 2), dp=2), CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
# Reallocations before every generation, transfers between all calls, and devices that work on different calls.
PLAN = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), tp=2),
        "reward_inference": SECOND,
        "reference_inference": FIRST,
        "critic_inference": SECOND,
        "actor_train_step": BOTH,
        "critic_train_step": SECOND,
    },
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run: the fault, what it met, and what became of the run. Steps count from 1; None: there was no restart."""

    number: int
    mode: str
    fault: Fault
    activity: str
    steps_at_failure: int | None
    checkpoints_before: list[int]
    restored: int | None
    is_newest_good: bool
    redone: int | None
    is_equal: bool
    message: str
    names_victim: bool
    left_behind: list[str]
    seconds: float

    @property
    def is_restored(self) -> bool:
        """From the newest good checkpoint, never from the beginning."""
        return self.restored is None or (self.restored > 0 and self.is_newest_good)

    @property
    def intervals_redone(self) -> int:
        """Checkpoint intervals begun after the restored step and lost, beside one that was corrupted on purpose.

        Two: the checkpoint between them was being written, which goes on beside training; no third one begins
        before it is complete.
        """
        corrupted = self.fault.kind == "corrupted checkpoint"
        return max(0, math.ceil((self.redone or 0) / INTERVAL) - corrupted)

    @property
    def holds(self) -> bool:
        return (
            self.is_equal
            and self.is_restored
            and self.intervals_redone <= 2
            and self.names_victim
            and not self.left_behind
        )


class Campaign:
    """Runs faults one after the other in `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._plan = folder / "plan.json"
        save_plan(PLAN, self._plan)
        reference = folder / "reference"
        code = self._start(reference, "--recover", "never").wait(DEADLINE_S)
        if code:
            sys.exit(f"the run without a fault failed:\n{(folder / 'reference.txt').read_text()}")
        self._reference = Reference(reference)

    def run(self, number: int, fault: Fault, recovers: bool) -> Outcome:
        run_dir, started = self._folder / f"run-{number}", time.monotonic()
        words = ("--recover", "auto" if recovers else "never", "--max-restarts", "9")
        process = self._start(run_dir, *words)
        disk = run_dir / "checkpoints"
        if fault.kind == "full disk":
            self._mount_when_there(disk, process)
        injector = Injector(
            fault,
            run_dir,
            self._fault_file(run_dir),
            is_over=lambda: process.poll() is not None,
            steps_left=lambda: STEPS - _steps_made(run_dir),
        )
        strike = injector.strike()
        self._wait_for_effect(run_dir, process, strike.time_s if strike else 0.0)
        injector.undo()
        code = process.wait(DEADLINE_S)
        message = self._output(run_dir).read_text().partition("error: ")[2]
        if not recovers and code:
            resumed = self._start(run_dir, "--resume")
            resumed.wait(DEADLINE_S)
        outcome = self._outcome(number, fault, run_dir, strike, "auto" if recovers else "by hand", message, started)
        if not outcome.holds:
            kept = Path(tempfile.mkdtemp(prefix=f"realhf-fault-{number}-"))
            shutil.copytree(run_dir, kept / "run", symlinks=True)
            shutil.copy(self._output(run_dir), kept / "output.txt")
            print(f"run {number} does not hold; it is kept in {kept}", file=sys.stderr)
        if fault.kind == "full disk":
            subprocess.run(["umount", str(disk)], check=True)
        shutil.rmtree(run_dir)
        return outcome

    def _start(self, run_dir: Path, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "realhf.cli", "run", str(EXPERIMENT), "--run-dir", str(run_dir)]
        if "--resume" not in words:
            command += ["--plan", str(self._plan), "--steps", str(STEPS), "--checkpoint-every", str(INTERVAL)]
            command += ["--reference-eta", "0.1"]  # the reference follows the actor, so it is a state too
            command += ["--call-timeout-s", str(CALL_TIMEOUT_S), "--fault-file", str(self._fault_file(run_dir))]
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

    def _wait_for_effect(self, run_dir: Path, process: subprocess.Popen[bytes], struck_s: float) -> None:
        """Until the run has noted a failure, or has ended: a cut connection may do no harm."""
        deadline = time.monotonic() + DEADLINE_S
        while process.poll() is None and time.monotonic() < deadline:
            events = read_events(run_dir / "events.jsonl")
            if any(event.event == "failed" and event.time_s >= struck_s for event in events):
                return
            time.sleep(0.02)

    def _outcome(
        self, number: int, fault: Fault, run_dir: Path, strike: Strike | None, mode: str, message: str, started: float
    ) -> Outcome:
        # Before the strike there may be a failure of a machine that is too busy.
        struck_s = strike.time_s if strike else 0.0
        events = read_events(run_dir / "events.jsonl")
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
        return Outcome(
            number=number,
            mode=mode,
            fault=fault,
            activity=strike.activity if strike else "the run had ended",
            steps_at_failure=failure.step if failure else None,
            checkpoints_before=strike.checkpoints_before if strike else [],
            restored=again.step if again else None,
            is_newest_good=is_newest,
            redone=max(0, failure.step - again.step) if failure and again else None,
            is_equal=self._reference.is_equalled_by(run_dir),
            message=(reason or message).splitlines()[0] if reason or message else "",
            names_victim=failure is None or _names(fault, reason),
            left_behind=leaks(run_dir, _temporary(run_dir)),
            seconds=round(time.monotonic() - started, 1),
        )


def mount(folder: Path, size_bytes: int) -> None:
    """A disk of this size in memory, in place of `folder`."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True)


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder whose disk is never slow, for a while."""
    with tempfile.TemporaryDirectory(prefix="realhf-faults-") as name:
        mount(Path(name), FOLDER_BYTES)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--recursive", name], check=True)


def _temporary(run_dir: Path) -> Path:
    """Where the run's processes put temporary files; it must be empty in the end."""
    return run_dir.with_suffix(".temporary")


def _first(events: Sequence[Event], kind: str) -> Event | None:
    return next((event for event in events if event.event == kind), None)


def _names(fault: Fault, message: str) -> bool:
    """Whether a message names the victim: the process, or for a disk the path of the checkpoint and the reason."""
    if fault.kind == "full disk":
        return "checkpoint" in message and "No space left" in message
    return fault.victim in message.replace("worker ", "worker-")


def _steps_made(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def write_tables(outcomes: Sequence[Outcome], path: Path) -> None:
    """A row a run, as a Markdown table at `path` and as JSON lines beside it."""
    columns = (
        "run", "mode", "fault", "victim", "phase", "it was in", "steps made", "checkpoints before", "restored",
        "newest good", "steps redone", "equal", "nothing left", "s",
    )  # fmt: skip
    lines = ["# Outcomes of the fault campaign", "", "Written by `benchmarks/faults.py`; steps count from 1.", ""]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for o in outcomes:
        cells = (
            o.number, o.mode, o.fault.kind, o.fault.victim, o.fault.phase, o.activity, _text(o.steps_at_failure),
            ", ".join(map(str, o.checkpoints_before)), _text(o.restored), _yes(o.is_newest_good), _text(o.redone),
            _yes(o.is_equal), _yes(not o.left_behind), f"{o.seconds:.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".jsonl").write_text("".join(json.dumps(_row(o)) + "\n" for o in outcomes))


def _row(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome) | {"holds": outcome.holds}


def read_rows(table: Path) -> list[Outcome]:
    """What an earlier invocation with the same schedule has found: a campaign that was stopped goes on."""
    path = table.with_suffix(".jsonl")
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Outcome) for line in lines]


def _text(number: int | None) -> str:
    return "-" if number is None else str(number)


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def cases(outcomes: Sequence[Outcome]) -> list[dict]:
    """How many runs are as they should be, of how many; a target is to be reached in every run."""
    total = len(outcomes)
    counts = {
        "runs that end with the same metrics and parameters": sum(o.is_equal for o in outcomes),
        "runs that go on from the newest good checkpoint, never from step 0": sum(o.is_restored for o in outcomes),
        "runs that redo one checkpoint interval, or two where the one between them was being written": sum(
            o.intervals_redone <= 2 for o in outcomes
        ),
        "runs whose message names the victim": sum(o.names_victim for o in outcomes),
        "runs that leave nothing behind": sum(not o.left_behind for o in outcomes),
    }
    found = [
        case(name, count, "runs", baseline=total, ratio=count / total, target=total, holds=count == total)
        for name, count in counts.items()
    ]
    short = sum(o.intervals_redone <= 1 for o in outcomes)
    name = "of these, runs that redo at most one interval"
    return [*found, case(name, short, "runs", baseline=total, ratio=short / total, target=0, holds=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs, under a minute on an idle machine")
    parser.add_argument("--runs", type=int, default=60, help="with --recover auto (default 60)")
    parser.add_argument("--without", type=int, default=12, help="further runs without recovery (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="a row a run; those in FILE.jsonl are done")
    arguments = parser.parse_args()
    if IN_NAMESPACE not in os.environ:  # mounts are then nobody else's, and go with the last process
        namespaces = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]
        command = ["unshare", *namespaces, sys.executable, *sys.argv]
        os.execvpe(command[0], command, {**os.environ, IN_NAMESPACE: "1"})
    runs, without = (1, 1) if arguments.quick else (arguments.runs, arguments.without)
    schedule = [(fault, True) for fault in make_schedule(runs, arguments.seed)]
    schedule += [(fault, False) for fault in make_schedule(without, arguments.seed + 1)]
    outcomes = read_rows(arguments.table) if arguments.table else []
    with folder_in_memory() as folder:
        campaign = Campaign(folder)
        with ThreadPoolExecutor(arguments.jobs) as threads:
            done = {outcome.number for outcome in outcomes}
            left = [(n, *entry) for n, entry in enumerate(schedule, start=1) if n not in done]
            for outcome in threads.map(lambda entry: campaign.run(*entry), left):
                outcomes.append(outcome)
                print(json.dumps(_row(outcome)), file=sys.stderr, flush=True)
                if arguments.table:
                    write_tables(outcomes, arguments.table)
    finish("faults", cases(outcomes), arguments.json)
    sys.exit(not all(outcome.holds for outcome in outcomes))


if __name__ == "__main__":
    main()
