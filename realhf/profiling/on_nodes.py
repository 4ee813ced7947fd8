"""Measures the model types of an experiment, and the network, on a cluster's nodes: one job without a master."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from realhf.base.errors import RunError
from realhf.base.files import delete, write_atomically
from realhf.launch.launcher import Launcher
from realhf.launch.process import Job, workers_of
from realhf.launch.supervisor import supervise
from realhf.planning.model.descriptions import LEFT_FILE, leave_description, read_hardware
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import CONSTANTS_FILE, constants_path, load_constants, save_constants
from realhf.planning.model.profile import load_profile, profile_path, profiles_root, save_profile
from realhf.planning.request import Watch
from realhf.profiling.job import JOB_FILE, ProfileJob
from realhf.profiling.measure import WORKER_MODULE, on_poll
from realhf.rundir.paths import RunDirectory

RESULTS = "results"  # in the job's directory


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How a job is carried out. `directory` is new, and on a file system that the nodes share; `name` is the job's.

    `look`: called ten times a second; an exception from it ends the job. `watch`: see `realhf.profiling.measure`.
    """

    launcher: Launcher
    directory: Path
    name: str
    nodelist: str | None
    watch: Watch
    look: Callable[[], None]


def measured_before(root: Path | None) -> tuple[str, ...]:
    """The profiles that lie below a folder of profiles, as `ProfileJob.kept` names them."""
    folder = root or profiles_root()
    return tuple(str(path.relative_to(folder)) for path in sorted(folder.glob("*/*.json")))


def measure_on_nodes(job: ProfileJob, measuring: Measuring, root: Path | None) -> tuple[Hardware, tuple[Path, ...]]:
    """Runs the measurement on the nodes; returns their hardware, and the files of the profiles.

    The nodes write into the job's directory, and this process from there to the profiles below `root`, which the nodes
    need not see. The directory is gone afterwards.

    Raises RunError if a worker failed or the job's timeout is over: the directory is then kept, with the logs.
    UserError where SLURM refuses the job; KeyboardInterrupt. However it ends, no job is left.
    """
    makes_folder = not measuring.directory.parent.exists()
    directory = RunDirectory.create(measuring.directory)
    try:
        results = directory.path / RESULTS
        results.mkdir()
        targets = (msgspec.structs.replace(t, path=str(results / Path(t.path).name)) for t in job.targets)
        job = msgspec.structs.replace(
            job,
            targets=tuple(targets),
            constants_path=str(results / CONSTANTS_FILE),
            description_path=str(results / LEFT_FILE),
        )
        write_atomically(directory.path / JOB_FILE, msgspec.json.encode(job))
        _supervised(job, directory, measuring)
        found = _taken(job, results, root)
    except RunError as error:
        error.add_note(f"logs of the job are kept in {directory.path}")
        raise
    except BaseException:
        _remove(directory.path, makes_folder)
        raise
    _remove(directory.path, makes_folder)
    return found


def _supervised(job: ProfileJob, directory: RunDirectory, measuring: Measuring) -> None:
    threads = job.described.threads if job.described else 1
    alone = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if job.num_nodes == 1 else {}
    of_profiler = Job(
        name=measuring.name,
        directory=directory,
        processes=workers_of(WORKER_MODULE, directory, job.world_size, threads, **alone),
        workers_per_node=job.num_workers,
        nodelist=measuring.nodelist,
    )
    update = on_poll(job, directory, measuring.launcher, measuring.watch)

    def look() -> None:
        measuring.look()
        update()

    supervise(measuring.launcher, of_profiler, look)


def _taken(job: ProfileJob, results: Path, root: Path | None) -> tuple[Hardware, tuple[Path, ...]]:
    """Moves the profiles of the nodes to the place where plans look for them."""
    hardware = job.described or read_hardware(results / LEFT_FILE)
    profiles = []
    for target in job.targets:
        if Path(target.path).is_file():  # not of one that was kept
            profiles.append(profile_path(target.model, target.dtype, hardware.name, root).absolute())
            save_profile(load_profile(target.path), profiles[-1])
    if job.constants:
        save_constants(load_constants(results / CONSTANTS_FILE), constants_path(hardware.name, root))
    leave_description(hardware, root)
    return hardware, tuple(profiles)


def _remove(folder: Path, and_above: bool) -> None:
    """Removes a folder, and ignores errors; `and_above`: the folder above it too, if nothing else is there."""
    with contextlib.suppress(OSError):
        delete(folder)
        if and_above:
            folder.parent.rmdir()
