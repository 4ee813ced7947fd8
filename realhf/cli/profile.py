"""`realhf profile`: measure layers, decode steps and collectives of this machine, once per model type."""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from realhf.api.experiment import auto_settings, models_of
from realhf.base.errors import RunError
from realhf.base.files import write_atomically
from realhf.base.numbers import check_range
from realhf.dataflow.graph import DataflowGraph
from realhf.launch.launcher import NoOptions
from realhf.launch.local import LocalLauncher
from realhf.launch.process import Job, ProcessSpec, process_environment, python_command
from realhf.launch.supervisor import supervise
from realhf.lifecycle.experiment import experiment_of
from realhf.planning.clusters import cluster_of, hardware_text
from realhf.planning.model.descriptions import leave_description
from realhf.planning.model.profile import LayerProfile, load_profile, profile_path
from realhf.planning.request import DevicesRequest
from realhf.profiling.job import JOB_FILE, ProfileJob, ProfileTarget
from realhf.rundir.flight_recorder import read_activity
from realhf.rundir.paths import RunDirectory, worker_name

WORKER_MODULE = "realhf.profiling.profiler"  # started, not imported: this process does without torch

LEAST_MAX_TOKENS = 64
DEFAULT_MAX_TOKENS = 4096
MAX_SEQUENCES = 128

DESCRIPTION = """Measures forward, backward and decode of a single layer, embedding and head, the optimizer, the way of
a request and the collectives on this machine, for every model type of an experiment. `realhf plan` and
`realhf run` then predict from what was measured. Once per model type, dtype and machine is enough.
Any field of the experiment can be given as --field value."""

EXAMPLE = """examples:
  realhf profile experiments/ppo.py
  realhf profile experiments/ppo.py --num-workers 2 --force
  realhf profile experiments/ppo.py --model.hidden-size 512 --max-tokens 8192"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("experiment", help="a Python file with one dataclass under @auto")
    command.add_argument("--num-workers", type=int, help="devices to use (default: the GPUs here, else the CPU cores)")
    command.add_argument("--hardware", help="a hardware description, such as h100 or cpu (default: this machine)")
    command.add_argument("--profiles-dir", type=Path, help="write below this folder (default: where plans look)")
    command.add_argument("--repetitions", type=int, default=5, help="readings of the clock a size (default 5)")
    command.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        help=f"largest micro-batch; larger ones are extrapolated (default {DEFAULT_MAX_TOKENS})",
    )
    command.add_argument("--timeout-s", type=float, default=900.0, help="longest the measuring may take (default 900)")
    command.add_argument("--force", action="store_true", help="measure again what was measured already")


def execute(arguments: argparse.Namespace) -> int:
    _check(arguments)
    experiment = experiment_of(arguments.experiment, arguments.overrides)
    cluster = cluster_of(DevicesRequest(num_workers=arguments.num_workers, hardware=arguments.hardware, place="here"))
    targets = _targets(experiment, cluster.hardware.name, arguments.profiles_dir)
    missing = [target for target in targets if arguments.force or not Path(target.path).is_file()]
    console = Console()
    for target in targets:
        if target not in missing:
            load_profile(target.path)
            console.print(f"kept {target.path} (--force measures again)", highlight=False, soft_wrap=True)
    if not missing:
        return 0
    console.print(
        f"measuring {hardware_text(cluster.hardware, 1, cluster.num_devices)}", highlight=False, soft_wrap=True
    )
    started = time.monotonic()
    job = _job(arguments, experiment, cluster.hardware.name, cluster.num_devices, tuple(missing))
    _measure(job, cluster.hardware.threads, Console(stderr=True))
    leave_description(cluster.hardware, arguments.profiles_dir)
    for target in missing:
        profile = load_profile(target.path)
        console.print(timings_table(profile))
        _print_collectives(console, profile)
        console.print(f"written to {target.path}", highlight=False, soft_wrap=True)
    console.print(f"measured in {time.monotonic() - started:.0f} s", highlight=False, soft_wrap=True)
    return 0


def timings_table(profile: LayerProfile) -> Table:
    """A layer's times in a micro-batch of a middle size and a decode step of a middle number of sequences."""
    sizes = profile.tensor[0].layer_forward.sizes
    tokens = sizes[len(sizes) * 2 // 3]
    batches = profile.tensor[0].layer_decode[0].seconds.sizes
    sequences = batches[len(batches) // 2]
    model = profile.model
    title = f"{model.head} model, hidden {model.hidden_size}, {profile.dtype}: one layer, {tokens:.0f} tokens"
    table = Table(title=title, title_justify="left")
    columns = ("tp", "forward ms", "backward ms", "head forward ms", f"decode ms ({sequences:.0f} sequences)")
    for column in columns:
        table.add_column(column, justify="right")
    for timings in profile.tensor:
        decode = timings.layer_decode[len(timings.layer_decode) // 2].seconds.at(sequences)
        curves = (timings.layer_forward, timings.layer_backward, timings.head_forward)
        seconds = [*(curve.at(tokens) for curve in curves), decode]
        table.add_row(str(timings.tp), *(f"{1000 * s:.3f}" for s in seconds))
    return table


def _print_collectives(console: Console, profile: LayerProfile) -> None:
    for timings in profile.collective("all_reduce"):
        latency_s, (size_bytes, seconds) = (
            timings.seconds.seconds[0],
            (
                timings.seconds.sizes[-1],
                timings.seconds.seconds[-1],
            ),
        )
        console.print(
            f"all-reduce over {timings.group_size}: {1e6 * latency_s:.0f} us for {timings.seconds.sizes[0]:.0f} bytes, "
            f"{size_bytes / seconds / 1e9:.2f} GB/s at {size_bytes / 2**20:.0f} MiB",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"call {1000 * profile.call_overhead_s:.2f} ms, sampling {1000 * profile.sampling_s:.2f} ms, "
        f"optimizer {1e9 * profile.optimizer_s_per_parameter:.2f} ns a parameter",
        highlight=False,
        soft_wrap=True,
    )


def _check(arguments: argparse.Namespace) -> None:
    check_range("--repetitions", arguments.repetitions, 1, 1000)
    check_range("--max-tokens", arguments.max_tokens, LEAST_MAX_TOKENS, 2**20)
    check_range("--timeout-s", arguments.timeout_s, 0.001, 10**7, "seconds")


def _targets(experiment: Any, hardware: str, root: Path | None) -> list[ProfileTarget]:
    """Every model type with its dtype once, in the order of the calls."""
    models = DataflowGraph(experiment.rpcs, experiment.dataset.keys).models
    setups = models_of(experiment)
    pairs = dict.fromkeys((model, setups[name].dtype) for name, model in models.items())
    return [
        ProfileTarget(model=model, dtype=dtype, path=str(profile_path(model, dtype, hardware, root).absolute()))
        for model, dtype in pairs
    ]


def _job(
    arguments: argparse.Namespace,
    experiment: Any,
    hardware: str,
    num_workers: int,
    targets: tuple[ProfileTarget, ...],
) -> ProfileJob:
    batch_size = auto_settings(experiment).batch_size
    mean, longest = _sequence_lengths(experiment)
    return ProfileJob(
        hardware=hardware,
        targets=targets,
        num_workers=num_workers,
        batch_size=batch_size,
        sequence_length=mean,
        length_spread=min(longest - mean, mean - 1),
        max_tokens=arguments.max_tokens,
        max_sequences=max(2, min(batch_size, MAX_SEQUENCES)),
        repetitions=arguments.repetitions,
        timeout_s=arguments.timeout_s,
    )


def _sequence_lengths(experiment: Any) -> tuple[int, int]:
    """Mean and largest number of tokens of a sequence: of the data set's longest key, and the response to it."""
    responses = [getattr(call.interface_impl, "max_new_tokens", 0) for call in experiment.rpcs]
    mean, longest = max(experiment.dataset.lengths().values())
    return max(1, round(mean) + max(responses)), longest + max(responses)


def _measure(job: ProfileJob, threads: int, console: Console) -> None:
    """Starts the workers, of `threads` each, and returns when they have written the profiles.

    Raises:
        RunError: a worker failed, or all of it took longer than the job's timeout; what they printed is then kept.
    """
    folder = Path(tempfile.mkdtemp(prefix="realhf-profile-"))  # mode 0700
    try:
        directory = RunDirectory.create(folder)
        write_atomically(folder / JOB_FILE, msgspec.json.encode(job))
        if not console.is_terminal:
            console.print("starting the workers", highlight=False, soft_wrap=True)
        with console.status("starting the workers") as status:
            supervise(
                LocalLauncher(NoOptions()),
                _workers(job, directory, threads),
                _progress(job, directory, console, status.update),
            )
    except RunError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _progress(
    job: ProfileJob, directory: RunDirectory, console: Console, show: Callable[[str], None]
) -> Callable[[], None]:
    """What to do while waiting: show what worker 0 measures (a line each where there is no terminal), keep time."""
    deadline = time.monotonic() + job.timeout_s
    shown = ""

    def update() -> None:
        nonlocal shown
        activity = read_activity(directory.activity(worker_name(0)))
        text = activity.text if activity else shown
        if text != shown:
            shown = text
            if console.is_terminal:
                show(text)
            else:
                console.print(text, highlight=False, soft_wrap=True)
        if time.monotonic() > deadline:
            raise RunError(
                f"measuring took longer than --timeout-s {job.timeout_s:g}, the last of it {shown or 'the start'}; "
                f"raise it or lower --max-tokens; logs in {directory.logs}"
            )

    return update


def _workers(job: ProfileJob, directory: RunDirectory, threads: int) -> Job:
    env = {**process_environment(threads), "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    command = python_command(WORKER_MODULE, str(directory.path))
    workers = (
        ProcessSpec(name=name, argv=command, env=env, log_path=directory.log(name))
        for name in map(worker_name, range(job.num_workers))
    )
    return Job(directory=directory, processes=tuple(workers), workers_per_node=job.num_workers)
