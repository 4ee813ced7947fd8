"""Fault campaign: the main job, small, broken at recorded places, must end as if nothing had happened.

Every run trains on two workers with two steps in flight and checkpoints written beside training. After two or three
of these a fault strikes, in a phase that the schedule names: a process is killed or stopped, the disk of the
checkpoints or of the whole run is full, a connection cut, an interface raises, a checkpoint or a file of the run
directory is damaged. Every strike is seen to strike, and something to come of it, or the run does not hold. With
`--recover auto` the run has to end by itself with the metrics and parameters of the run without a fault, bit for bit,
from the newest good checkpoint. Some runs (`--without`) have no recovery: those have to end with a message that names
the victim, and `--resume` has to finish them as well, or to say which file it cannot go on without.

The faults come from outside. Linux only; disks that can be filled are mounted in a namespace of their own (`unshare`).
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.common import argument_parser, commit, finish
from lib.fault_campaign import Campaign, mount
from lib.fault_injection import Fault, make_schedule, one_of_each
from lib.fault_outcome import cases, read_rows, row, write_tables

MEASURES = (
    "realhf/launch",
    ":!realhf/launch/slurm",
    "realhf/lifecycle",
    "realhf/master",
    "realhf/rundir",
    "realhf/transport",
    "realhf/worker",
    "realhf/models/checkpoint*.py",
    "benchmarks/lib/fault_campaign.py",
    "benchmarks/lib/fault_checks.py",
    "benchmarks/lib/fault_injection.py",
    "benchmarks/lib/fault_outcome.py",
    "benchmarks/jobs/fault_job.py",
    "benchmarks/jobs/fault_job_interface.py",
)
FOLDER_BYTES, SHARED_BYTES = 2**31, 2**28
SHARED_MEMORY = Path("/dev/shm")
IN_NAMESPACE = "REALHF_FAULTS_IN_NAMESPACE"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--each", action="store_true", help="one run of each kind, and one without recovery")
    parser.add_argument("--runs", type=int, default=48, help="with --recover auto (default 48)")
    parser.add_argument("--without", type=int, default=12, help="further runs without recovery (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--only", type=int, nargs="+", metavar="RUN", help="of the schedule these runs alone")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--call-timeout-s", type=float, default=20.0, help="of the runs (default 20)")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="a row a run; those in FILE.jsonl are done")
    arguments = parser.parse_args()
    if IN_NAMESPACE not in os.environ:  # mounts are then nobody else's, and go with the last process
        enter_namespace()
    runs, without = (1, 1) if arguments.quick else (arguments.runs, arguments.without)
    schedule = make_schedules(runs, without, arguments.seed)
    if arguments.each:
        schedule = one_of_each(schedule)
    outcomes = read_rows(arguments.table, commit()) if arguments.table else []
    done = {outcome.number for outcome in outcomes}
    wanted = set(arguments.only or range(1, len(schedule) + 1)) - done
    with folder_in_memory() as folder:
        mount(SHARED_MEMORY, SHARED_BYTES)  # in the namespace: what others do there is not seen
        campaign = Campaign(folder, call_timeout_s=arguments.call_timeout_s, shared_memory=SHARED_MEMORY)
        with ThreadPoolExecutor(arguments.jobs) as threads:
            left = [(n, *entry) for n, entry in enumerate(schedule, start=1) if n in wanted]
            for outcome in threads.map(lambda entry: campaign.run(*entry), left):
                outcomes.append(outcome)
                print(json.dumps(row(outcome)), file=sys.stderr, flush=True)
                if arguments.table:
                    write_tables(outcomes, arguments.table)
    finish("faults", cases(outcomes), arguments.json)
    sys.exit(not all(outcome.holds for outcome in outcomes))


def make_schedules(runs: int, without: int, seed: int) -> list[tuple[Fault, bool]]:
    """Every fault, and whether its run recovers by itself; those that do not come last."""
    schedule = [(fault, True) for fault in make_schedule(runs, seed)]
    return schedule + [(fault, False) for fault in make_schedule(without, seed + 1)]


def enter_namespace() -> None:
    """Becomes this program anew in a mount namespace of its own."""
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]
    command = ["unshare", *namespaces, sys.executable, *sys.argv]
    os.execvpe(command[0], command, {**os.environ, IN_NAMESPACE: "1"})


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder whose disk is never slow, for a while."""
    with tempfile.TemporaryDirectory(prefix="realhf-faults-") as name:
        mount(Path(name), FOLDER_BYTES)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--recursive", name], check=True)


if __name__ == "__main__":
    main()
