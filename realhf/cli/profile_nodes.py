"""`realhf profile --launcher NAME`: measure on the nodes of a cluster, from its login node."""

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.experiment import AutoSettings
from realhf.base.errors import UserError
from realhf.base.numbers import DEVICES, check_range
from realhf.base.options import Common
from realhf.cli.command import Command, launcher_heading
from realhf.cli.options import add_options, options_of
from realhf.cli.output import Output, Phases
from realhf.cli.profile_tables import missing_of, show
from realhf.launch.launcher import LAUNCHERS, Launcher, find_launcher
from realhf.lifecycle.interruption import Interruption
from realhf.lifecycle.request import experiment_of
from realhf.planning.clusters import cluster_of
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import LAYERS, NETWORK
from realhf.planning.request import DevicesRequest
from realhf.profiling.measure import ProfileRequest, profile_job, targets_of
from realhf.profiling.on_nodes import Measuring, measure_on_nodes, measured_before


def queueing() -> dict[str, type[Launcher]]:
    """By name the launchers of clusters with a queue."""
    return {name: launcher for name in LAUNCHERS if (launcher := find_launcher(name)).queues}


def add_node_arguments(command: Command) -> None:
    launchers = queueing()
    group = launcher_heading(", ".join(launchers))
    option = partial(Common, group=group)
    command.add("--nodes", option("nodes to measure on (default: that of @auto, else 2)"), type=int, metavar="N")
    command.add(
        "--gpus-per-node",
        option("devices a node (default: that of @auto, else a node's GPUs, as sinfo tells)"),
        type=int,
        metavar="N",
    )
    command.add("--network-interface", option("the interface between the nodes, for gloo and NCCL"), metavar="NAME")
    command.add(
        "--run-dir",
        option("where the job's files lie meanwhile, which its nodes have to see (default runs/profile-NAME-TIME)"),
        type=Path,
        metavar="FOLDER",
    )
    for launcher in launchers.values():
        add_options(command, launcher.options_type, group=group, shows_all=True)


def profile_nodes(arguments: argparse.Namespace) -> int:
    """Submits a job, waits for it, and puts what it has measured where plans look for it."""
    options = node_options(arguments)
    experiment = experiment_of(arguments.experiment, arguments.overrides)
    launcher, settings, out = find_launcher(arguments.launcher)(options), experiment.settings, Output()
    launcher.check()
    num_nodes, per_node = size_of(arguments, launcher, settings)
    request = with_links(options_of(ProfileRequest, arguments), num_nodes, per_node)
    hardware = described(arguments.hardware, getattr(arguments, "cpu_only", False), num_nodes, per_node)
    targets = targets_of(experiment, hardware.name if hardware else "", request) if request.models else []
    if hardware:
        targets = missing_of(targets, arguments.force, out)
        if not targets and not request.constants:
            return 0
    job = msgspec.structs.replace(
        profile_job(experiment, hardware.name if hardware else "", per_node, targets, request),
        num_nodes=num_nodes,
        network_interface=arguments.network_interface,
        described=hardware,
        kept=() if arguments.force else measured_before(request.profiles_dir),
    )
    name = f"profile-{Path(arguments.experiment).stem}"
    directory = arguments.run_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    started, shown = time.monotonic(), ""
    with Interruption() as interruption, Phases() as watch:
        watch.say(f"measuring on {num_nodes} x {per_node} {hardware.name if hardware else 'GPUs'}; logs in {directory}")

        def look() -> None:
            nonlocal shown
            interruption.check()
            if (status := launcher.status()) != shown:
                shown = status
                watch.say(status)

        measuring = Measuring(
            launcher=launcher,
            directory=directory,
            name=f"realhf-{name}",
            nodelist=settings.nodelist,
            watch=watch,
            look=look,
        )
        found, profiles = measure_on_nodes(job, measuring, request.profiles_dir)
    if not hardware:
        out.say(f"the nodes have {found.name} ({found.description})")
        known = targets_of(experiment, found.name, request) if request.models else []
        missing_of([one for one in known if Path(one.path) not in profiles], False, out)
    show(out, found, request, profiles)
    out.say(f"measured in {time.monotonic() - started:.0f} s")
    return 0


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
    only = options_of(ProfileRequest, arguments)
    is_between = not only.words or NETWORK in only.words
    nodes = settings.nodes if arguments.nodes is None else arguments.nodes
    nodes = (2 if is_between else 1) if nodes is None else nodes
    if NETWORK in only.words and nodes == 1:
        raise UserError(f"--only {NETWORK} measures between two nodes, and --nodes is 1; give --nodes 2")
    per_node = settings.gpus_per_node if arguments.gpus_per_node is None else arguments.gpus_per_node
    cpu_only = getattr(arguments, "cpu_only", False)
    if per_node is None and not cpu_only:
        per_node = launcher.node_devices()
    if per_node is None:
        what = "how many workers a node is to have" if cpu_only else "one number of GPUs for all nodes"
        raise UserError(f"--launcher {arguments.launcher} does not tell {what}; give --gpus-per-node")
    for flag, number in (("--nodes", nodes), ("--gpus-per-node", per_node), ("devices:", nodes * per_node)):
        check_range(flag, number, *DEVICES)
    return nodes, per_node


def with_links(request: ProfileRequest, num_nodes: int, per_node: int) -> ProfileRequest:
    """The request; if it names nothing to measure, with layers and the links that there are."""
    if request.words:
        return request
    words = [*(["links"] if per_node > 1 else []), *([NETWORK] if num_nodes > 1 else []), LAYERS]
    return replace(request, only=",".join(words))


def described(name: str | None, cpu_only: bool, num_nodes: int, per_node: int) -> Hardware | None:
    """The hardware that is named, or that nodes without GPUs are planned as; None: the nodes will tell."""
    if name is None and not cpu_only:
        return None
    request = DevicesRequest(nodes=num_nodes, gpus_per_node=per_node, hardware=name, place="nodes", cpu_only=cpu_only)
    return cluster_of(request).hardware
