"""Measures the model types of an experiment on this machine: starts the profiler's workers and waits for them."""

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from realhf.api.resolved import ResolvedExperiment
from realhf.architecture.transformers_config import TransformersConfig
from realhf.base.errors import RunError, UserError
from realhf.base.files import write_atomically
from realhf.base.options import Option, Options
from realhf.launch.launcher import Launcher, NoOptions
from realhf.launch.local import LocalLauncher
from realhf.launch.process import Job, workers_of
from realhf.launch.supervisor import supervise
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import leave_description
from realhf.planning.model.measured import LAYERS, MEASUREMENTS, NETWORK, Measurement, constants_path
from realhf.planning.model.profile import profile_path
from realhf.planning.request import Watch
from realhf.profiling.job import JOB_FILE, ProfileJob, ProfileTarget
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


def targets_of(experiment: ResolvedExperiment, hardware: str, request: ProfileRequest) -> list[ProfileTarget]:
    """Every model type with its dtype once, in the order of the calls, but for those that transformers computes; their
    profiles are of the `hardware`.

    Raises:
        UserError: transformers computes all of them.
    """
    models, setups, root = experiment.graph.models, experiment.setups, request.profiles_dir
    pairs = dict.fromkeys(
        (model, setups[name].dtype) for name, model in models.items() if not isinstance(model, TransformersConfig)
    )
    if not pairs:
        raise UserError(
            "transformers computes all models of the experiment, and the profiler measures this project's decoder; "
            "plan without a profile, by the models' dimensions; `realhf run --replan suggest` plans again with the "
            "measured times of calls"
        )
    return [
        ProfileTarget(model=model, dtype=dtype, path=str(profile_path(model, dtype, hardware, root).absolute()))
        for model, dtype in pairs
    ]


def profile_job(
    experiment: ResolvedExperiment,
    hardware: str,
    num_workers: int,
    targets: list[ProfileTarget],
    request: ProfileRequest,
) -> ProfileJob:
    """The job of measuring an experiment with `num_workers` of a machine."""
    batch_size = experiment.settings.batch_size
    responses = [getattr(call.interface_impl, "max_new_tokens", 0) for call in experiment.calls]
    of_data = max(experiment.dataset.lengths().values())  # the longest key's
    mean, longest = max(1, round(of_data.mean) + max(responses)), of_data.longest + max(responses)
    return ProfileJob(
        hardware=hardware,
        targets=tuple(targets),
        num_workers=num_workers,
        batch_size=batch_size,
        sequence_length=mean,
        length_spread=min(longest - mean, mean - 1),
        max_tokens=request.max_tokens,
        max_sequences=max(2, min(batch_size, MAX_SEQUENCES)),
        repetitions=request.repetitions,
        timeout_s=request.timeout_s,
        constants=request.constants,
        dtypes=tuple(dict.fromkeys(setup.dtype for setup in experiment.setups.values())),
        constants_path=str(constants_path(hardware, request.profiles_dir).absolute()),
    )


def measure(
    experiment: ResolvedExperiment,
    cluster: Cluster,
    targets: list[ProfileTarget],
    request: ProfileRequest,
    watch: Watch,
) -> None:
    """Writes the profiles of `targets`, the constants that the request asks for, and a description of the hardware
    beside them.

    Raises RunError if a worker failed or the request's timeout is over; the output of the workers is then kept.
    """
    job = profile_job(experiment, cluster.hardware.name, cluster.num_devices, targets, request)
    folder = Path(tempfile.mkdtemp(prefix="realhf-profile-"))  # mode 0700
    try:
        directory = RunDirectory.create(folder)
        write_atomically(folder / JOB_FILE, msgspec.json.encode(job))
        count, loopback = job.num_workers, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        workers = workers_of(WORKER_MODULE, directory, count, cluster.hardware.threads, **loopback)
        of_profiler = Job(directory=directory, processes=workers, workers_per_node=count)
        launcher = LocalLauncher(NoOptions())
        supervise(launcher, of_profiler, on_poll(job, directory, launcher, watch))
    except RunError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    leave_description(cluster.hardware, request.profiles_dir)


def on_poll(job: ProfileJob, directory: RunDirectory, launcher: Launcher, watch: Watch) -> Callable[[], None]:
    """Reports the measurement of worker 0, and ends the waiting after the timeout. A job's wait for nodes does not
    count."""
    deadline = time.monotonic() + job.timeout_s
    measuring = "starting the workers"

    def update() -> None:
        nonlocal measuring, deadline
        if launcher.is_waiting():
            deadline = time.monotonic() + job.timeout_s
        activity = read_activity(directory.activity(worker_name(0)))
        measuring = activity.text if activity else measuring
        watch(measuring, "")
        if time.monotonic() > deadline:
            raise RunError(
                f"measuring took longer than --timeout-s {job.timeout_s:g}, the last of it {measuring}; "
                f"raise it or lower --max-tokens; logs in {directory.logs}"
            )

    return update
