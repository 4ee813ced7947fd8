"""Measures forward, backward and decode of a single layer, embedding and head, the optimizer, the way of
a request and the collectives on this machine, for every model type of an experiment. `realhf plan` and
`realhf run` then predict from what was measured. Once per model type, dtype and machine is enough. With
--launcher slurm a job measures the same on nodes, and the links within and between them.
Any field of the experiment can be given as --field value.

examples:
  realhf profile experiments/ppo.py
  realhf profile experiments/ppo.py --num-workers 2 --force
  realhf profile experiments/ppo.py --only links,memory    (constants of the machine, in seconds)
  realhf profile experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8
  realhf profile experiments/ppo.py --architecture.hidden-size 512 --max-tokens 8192
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from realhf.api.experiment import AutoSettings
from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.base.numbers import DEVICES, check_range
from realhf.base.options import Option, Options
from realhf.cli.command import Command, launcher_heading
from realhf.cli.options import add_experiment, add_options, given_in, options_of
from realhf.cli.output import Output, Phases
from realhf.cli.profile_tables import missing_of, show
from realhf.launch.launcher import LAUNCHERS, Launcher, NoOptions, find_launcher
from realhf.launch.local import LocalLauncher
from realhf.lifecycle.interruption import Interruption
from realhf.lifecycle.request import experiment_of
from realhf.planning.clusters import cluster_of, hardware_text
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import LAYERS, NETWORK
from realhf.planning.planner import check_hardware
from realhf.planning.request import DevicesRequest
from realhf.profiling.measure import Place, ProfileRequest, measure, measured_before, profile_job, targets_of


@dataclass(frozen=True, kw_only=True)
class NodesRequest(Options):
    """The nodes of a cluster to measure on. `@auto`, or the cluster, tells the numbers that are None."""

    nodes: Annotated[int | None, Option("nodes to measure on (default: that of @auto, else 2)", range=DEVICES)] = None
    gpus_per_node: Annotated[
        int | None,
        Option("devices a node (default: that of @auto, else a node's GPUs, as sinfo tells)", range=DEVICES),
    ] = None
    network_interface: Annotated[
        str | None, Option("the interface between the nodes, for gloo and NCCL", metavar="NAME")
    ] = None
    run_dir: Annotated[
        Path | None,
        Option(
            "where the job's files lie meanwhile, which its nodes have to see (default runs/profile-NAME-TIME)",
            metavar="FOLDER",
        ),
    ] = None


def queueing() -> dict[str, type[Launcher]]:
    """By name the launchers of clusters with a queue."""
    return {name: launcher for name in LAUNCHERS if (launcher := find_launcher(name)).queues}


def options_of_nodes() -> list[type]:
    """The classes of the options that are for nodes of a cluster."""
    return [NodesRequest, *(launcher.options_type for launcher in queueing().values())]


def add_arguments(command: Command) -> None:
    launchers = queueing()
    add_experiment(command)
    command.add_argument("--num-workers", type=int, help="devices to use (default: the GPUs here, else the CPU cores)")
    command.add_argument("--hardware", help="a hardware description, such as h100 or cpu (default: this machine)")
    add_options(command, ProfileRequest, shows_all=True)
    command.add_argument("--force", action="store_true", help="measure again what was measured already")
    command.add_argument(
        "--launcher",
        choices=("local", *launchers),
        default="local",
        help="where to measure: on this machine or on nodes (`--launcher slurm --help`)",
    )
    for options in options_of_nodes():
        add_options(command, options, group=launcher_heading(", ".join(launchers)), shows_all=True)


def execute(arguments: argparse.Namespace) -> int:
    request, out = options_of(ProfileRequest, arguments), Output()
    for options in options_of_nodes():  # a wrong value is told wherever is measured
        options_of(options, arguments)
    experiment = experiment_of(arguments.experiment, arguments.overrides)
    if find_launcher(arguments.launcher).queues:
        place = nodes_of(arguments, experiment)
        request = with_links(request, place.num_nodes, place.num_workers)
    else:
        place = this_machine(arguments, request, experiment.threads)
    hardware, asked = place.hardware, targets_of(experiment) if request.models else []
    if hardware and asked:
        check_hardware(experiment, hardware, is_here=not place.launcher.queues)
    missing = missing_of(asked, hardware, request, arguments.force, out) if hardware else asked
    if hardware and not missing and not request.constants:
        return 0
    kept = () if arguments.force else measured_before(request.profiles_dir)
    job = profile_job(experiment, place, missing, request, kept)
    started, shown = time.monotonic(), ""
    with Interruption() as interruption, Phases() as watch:
        size = place.num_nodes, place.num_workers
        devices = hardware_text(hardware, *size) if hardware else "{} x {} GPUs".format(*size)
        directory = directory_of(arguments, place)
        watch.console.say(f"measuring on {devices}; logs in {directory}")

        def look() -> None:
            nonlocal shown
            interruption.check()
            if (status := place.launcher.status()) != shown:
                shown = status
                watch.console.say(status)

        found, profiles = measure(job, place, directory, request.profiles_dir, watch, look)
    if not hardware:
        out.say(f"the nodes have {found.name} ({found.description})")
        known = [one for one in asked if one.path(found.name, request.profiles_dir) not in profiles]
        missing_of(known, found, request, False, out)
    show(out, found, request, profiles)
    out.say(f"measured in {time.monotonic() - started:.0f} s")
    return 0


def this_machine(arguments: argparse.Namespace, request: ProfileRequest, threads: int | None) -> Place:
    """This machine, with so many threads a worker (None: its part of the cores). Raises UserError for what one machine
    cannot measure, and for nodes beside it."""
    if NETWORK in request.constants:
        raise UserError(
            f"--only {NETWORK} measures between two nodes, and this is one machine; on a login node give --launcher "
            f"slurm: realhf profile {arguments.experiment} --launcher slurm --only {NETWORK}"
        )
    for name, value in given_in(NodesRequest, arguments).items():
        raise UserError(
            f"--{name.replace('_', '-')} {value} is for --launcher slurm; leave it out to measure this machine, on "
            "--num-workers devices"
        )
    devices = DevicesRequest(
        num_workers=arguments.num_workers, hardware=arguments.hardware, place="here", threads=threads
    )
    cluster, launcher = cluster_of(devices), LocalLauncher(NoOptions())
    return Place(launcher=launcher, num_nodes=1, num_workers=cluster.num_devices, hardware=cluster.hardware)


def nodes_of(arguments: argparse.Namespace, experiment: ResolvedExperiment) -> Place:
    """The nodes of a cluster that the command line and `@auto` ask for. Raises UserError for what they cannot be."""
    launcher = find_launcher(arguments.launcher)(node_options(arguments))
    launcher.check()
    num_nodes, per_node = size_of(arguments, launcher, experiment.settings)
    cpu_only = getattr(arguments, "cpu_only", False)
    return Place(
        launcher=launcher,
        num_nodes=num_nodes,
        num_workers=per_node,
        hardware=described(arguments.hardware, cpu_only, num_nodes, per_node, experiment.threads),
        job_name=f"realhf-profile-{Path(arguments.experiment).stem}",
        nodelist=experiment.settings.nodelist,
        network_interface=options_of(NodesRequest, arguments).network_interface,
    )


def directory_of(arguments: argparse.Namespace, place: Place) -> Path:
    """A new directory for the job's files, which all of its workers see."""
    if not place.launcher.queues:
        return Path(tempfile.mkdtemp(prefix="realhf-profile-"))  # mode 0700
    default = Path("runs") / f"profile-{Path(arguments.experiment).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return options_of(NodesRequest, arguments).run_dir or default


def node_options(arguments: argparse.Namespace) -> Any:
    """The options of the launcher. Raises UserError for those that are a run's."""
    options = options_of(find_launcher(arguments.launcher).options_type, arguments)
    until_done = getattr(arguments, "until_done", False)
    if until_done or getattr(arguments, "notice_s", None) is not None:
        name = "--until-done" if until_done else "--notice-s"
        raise UserError(
            f"{name} is for a run, which goes on from a checkpoint; a profile is measured anew: leave it out"
        )
    if arguments.num_workers is not None:
        raise UserError(
            f"--num-workers {arguments.num_workers} is for this machine; with --launcher {arguments.launcher} give "
            "--nodes and --gpus-per-node"
        )
    return options


def size_of(arguments: argparse.Namespace, launcher: Launcher, settings: AutoSettings) -> tuple[int, int]:
    """(nodes, devices of each). Raises UserError for a number out of its range, and where that of a node's devices is
    not known."""
    if settings.launcher not in (None, arguments.launcher):
        settings = replace(settings, nodes=None, gpus_per_node=None)
    asked, only = options_of(NodesRequest, arguments), options_of(ProfileRequest, arguments)
    is_between = not only.words or NETWORK in only.words
    nodes = asked.nodes or settings.nodes or (2 if is_between else 1)
    if NETWORK in only.words and nodes == 1:
        raise UserError(f"--only {NETWORK} measures between two nodes, and --nodes is 1; give --nodes 2")
    per_node = asked.gpus_per_node or settings.gpus_per_node
    cpu_only = getattr(arguments, "cpu_only", False)
    if per_node is None and not cpu_only:
        per_node = launcher.node_devices()
    if per_node is None:
        what = "how many workers a node is to have" if cpu_only else "one number of GPUs for all nodes"
        raise UserError(f"--launcher {arguments.launcher} does not tell {what}; give --gpus-per-node")
    check_range("devices:", nodes * per_node, *DEVICES)
    return nodes, per_node


def with_links(request: ProfileRequest, num_nodes: int, per_node: int) -> ProfileRequest:
    """The request; if it names nothing to measure, with layers and the links that there are."""
    if request.words:
        return request
    words = [*(["links"] if per_node > 1 else []), *([NETWORK] if num_nodes > 1 else []), LAYERS]
    return replace(request, only=",".join(words))


def described(name: str | None, cpu_only: bool, num_nodes: int, per_node: int, threads: int | None) -> Hardware | None:
    """The hardware that is named, or that nodes without GPUs are planned as; None: the nodes will tell."""
    if name is None and not cpu_only:
        return None
    request = DevicesRequest(nodes=num_nodes, gpus_per_node=per_node, hardware=name, place="nodes", cpu_only=cpu_only)
    return cluster_of(replace(request, threads=threads)).hardware
