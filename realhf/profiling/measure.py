"""Measures the model types of an experiment and the network, here or on a cluster's nodes: a job without a master."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from realhf.api.resolved import ResolvedExperiment
from realhf.architecture.transformers_config import TransformersConfig
from realhf.base.errors import RunError, UserError
from realhf.base.files import delete, write_atomically
from realhf.base.options import Option, Options
from realhf.launch.launcher import Launcher
from realhf.launch.process import Job, workers_of
from realhf.launch.supervisor import supervise
from realhf.planning.model.descriptions import LEFT_FILE, leave_description, read_hardware
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import (
    CONSTANTS_FILE,
    LAYERS,
    MEASUREMENTS,
    NETWORK,
    Measurement,
    constants_path,
    load_constants,
    save_constants,
)
from realhf.planning.model.profile import load_profile, profiles_root, save_profile
from realhf.planning.request import Watch
from realhf.profiling.job import JOB_FILE, RESULTS, ProfileJob, ProfileTarget
from realhf.rundir.flight_recorder import read_activity
from realhf.rundir.paths import RunDirectory, worker_name

WORKER_MODULE = "realhf.profiling.profiler"  # started, not imported: this process does without torch

LEAST_MAX_TOKENS = 64
MAX_SEQUENCES = 128


@dataclass(frozen=True, kw_only=True)
class ProfileRequest(Options):
    """The settings of a measurement. Raises UserError if a number is out of its range, or `only` has another word."""

    profiles_dir: Annotated[
        Path | None, Option("write below this folder (default: where plans look)", metavar="FOLDER")
    ] = None
    only: Annotated[
        str,
        Option(
            f"measure this alone: {', '.join(MEASUREMENTS)} (constants of the machine; {NETWORK}: between nodes), "
            f"{LAYERS} (the models' profiles); several with commas (default: layers; under SLURM the links as well)",
            metavar="WHAT",
        ),
    ] = ""
    repetitions: Annotated[int, Option("readings of the clock a size", range=(1, 1000))] = 5
    max_tokens: Annotated[
        int, Option("largest micro-batch; larger ones are extrapolated", range=(LEAST_MAX_TOKENS, 2**20))
    ] = 4096
    timeout_s: Annotated[float, Option("longest the measuring may take", range=(0.001, 10**7), unit="seconds")] = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for word in self.words:
            if word not in (*MEASUREMENTS, LAYERS):
                raise UserError(f"--only {word}: choose from {', '.join((*MEASUREMENTS, LAYERS))}, with commas between")

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word.strip() for word in self.only.split(",") if word.strip())

    @property
    def constants(self) -> tuple[Measurement, ...]:
        """The constants of the machine that are asked for."""
        return tuple(name for name in MEASUREMENTS if name in self.words)

    @property
    def models(self) -> bool:
        """Whether the models' profiles are asked for."""
        return not self.words or LAYERS in self.words


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job measures: with `num_workers` on each of `num_nodes` nodes. `hardware`: None if they will tell."""

    launcher: Launcher
    num_nodes: int
    num_workers: int
    hardware: Hardware | None
    job_name: str = "realhf-profile"
    nodelist: str | None = None
    network_interface: str | None = None


def targets_of(experiment: ResolvedExperiment) -> list[ProfileTarget]:
    """Every model type with its dtype once, in the order of the calls, but for those that transformers computes.

    Raises:
        UserError: transformers computes all of them.
    """
    models, setups = experiment.graph.models, experiment.setups
    pairs = dict.fromkeys(
        (model, setups[name].dtype) for name, model in models.items() if not isinstance(model, TransformersConfig)
    )
    if not pairs:
        raise UserError(
            "transformers computes all models of the experiment, and the profiler measures this project's decoder; "
            "plan without a profile, by the models' dimensions; `realhf run --replan suggest` plans again with the "
            "measured times of calls"
        )
    chosen = experiment.reproducible
    return [ProfileTarget(model=model, dtype=dtype, reproducible=chosen) for model, dtype in pairs]


def profile_job(
    experiment: ResolvedExperiment,
    place: Place,
    targets: Sequence[ProfileTarget],
    request: ProfileRequest,
    kept: tuple[str, ...],
) -> ProfileJob:
    """The job of measuring an experiment. `kept`: see `ProfileJob`."""
    batch_size = experiment.settings.batch_size
    responses = [getattr(call.interface_impl, "max_new_tokens", 0) for call in experiment.calls]
    of_data = max(experiment.dataset.lengths().values())  # the longest key's
    mean, longest = max(1, round(of_data.mean) + max(responses)), of_data.longest + max(responses)
    return ProfileJob(
        hardware=place.hardware,
        targets=tuple(targets),
        num_workers=place.num_workers,
        batch_size=batch_size,
        sequence_length=mean,
        length_spread=min(longest - mean, mean - 1),
        max_tokens=request.max_tokens,
        max_sequences=max(2, min(batch_size, MAX_SEQUENCES)),
        repetitions=request.repetitions,
        timeout_s=request.timeout_s,
        constants=request.constants,
        dtypes=tuple(dict.fromkeys(setup.dtype for setup in experiment.setups.values())),
        num_nodes=place.num_nodes,
        network_interface=place.network_interface,
        kept=kept,
    )


def measured_before(root: Path | None) -> tuple[str, ...]:
    """The profiles that lie below a folder of profiles, as `ProfileJob.kept` names them."""
    folder = root or profiles_root()
    return tuple(str(path.relative_to(folder)) for path in sorted(folder.glob("*/*.json")))


def measure(
    job: ProfileJob, place: Place, directory: Path, root: Path | None, watch: Watch, look: Callable[[], None]
) -> tuple[Hardware, tuple[Path, ...]]:
    """Carries out a job; returns the hardware of its devices, and the files of the profiles.

    The workers write into `directory`, which is new or empty and on a file system that they share, and this process
    from there to the profiles below `root`, which the nodes need not see. The directory is gone afterwards. `watch`
    gets the measurement that goes on. `look`: called ten times a second; an exception from it ends the job.

    Raises RunError if a worker failed or the job's timeout is over: the directory is then kept, with the logs.
    UserError where the launcher refuses the job; KeyboardInterrupt. However it ends, no process and no job is left.
    """
    makes_folder = not directory.parent.exists()
    files = RunDirectory.create(directory)
    results = files.path / RESULTS
    try:
        results.mkdir()
        write_atomically(files.path / JOB_FILE, msgspec.json.encode(job))
        threads = job.hardware.threads if job.hardware else 1
        of_profiler = Job(
            name=place.job_name,
            directory=files,
            processes=workers_of(WORKER_MODULE, files, job.world_size, threads),
            workers_per_node=job.num_workers,
            nodelist=place.nodelist,
        )
        supervise(place.launcher, of_profiler, _on_poll(job, files, place.launcher, watch, look))
        found = _taken(job, results, root)
    except RunError as error:
        error.add_note(f"logs of the job are kept in {files.path}")
        raise
    except BaseException:
        _remove(files.path, makes_folder)
        raise
    _remove(files.path, makes_folder)
    return found


def _on_poll(
    job: ProfileJob, directory: RunDirectory, launcher: Launcher, watch: Watch, look: Callable[[], None]
) -> Callable[[], None]:
    """Reports the measurement of worker 0, and ends the waiting after the timeout. A job's wait for nodes does not
    count."""
    deadline = time.monotonic() + job.timeout_s
    now = "starting the workers"

    def update() -> None:
        nonlocal now, deadline
        look()
        if launcher.is_waiting():
            deadline = time.monotonic() + job.timeout_s
        activity = read_activity(directory.activity(worker_name(0)))
        now = activity.text if activity else now
        watch(now, "")
        if time.monotonic() > deadline:
            raise RunError(
                f"measuring took longer than --timeout-s {job.timeout_s:g}, the last of it {now}; "
                "raise it or lower --max-tokens"
            )

    return update


def _taken(job: ProfileJob, results: Path, root: Path | None) -> tuple[Hardware, tuple[Path, ...]]:
    """Moves the results to the place where plans look for them."""
    hardware = job.hardware or read_hardware(results / LEFT_FILE)
    profiles = []
    for target in job.targets:
        if (measured := results / target.file).is_file():  # not of one that was kept
            profiles.append(target.path(hardware.name, root))
            save_profile(load_profile(measured), profiles[-1])
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
