"""`realhf profile`: measure layers, decode steps and collectives, once per model type, here or on a cluster's nodes."""

import argparse
import time
from pathlib import Path

from realhf.base.errors import UserError
from realhf.cli.command import Command
from realhf.cli.options import add_experiment, add_options, options_of
from realhf.cli.output import Output, Phases
from realhf.cli.profile_nodes import add_node_arguments, profile_nodes, queueing
from realhf.cli.profile_tables import missing_of, show
from realhf.lifecycle.request import experiment_of
from realhf.planning.clusters import cluster_of, hardware_text
from realhf.planning.model.measured import NETWORK
from realhf.planning.request import DevicesRequest
from realhf.profiling.measure import ProfileRequest, measure, targets_of

DESCRIPTION = """Measures forward, backward and decode of a single layer, embedding and head, the optimizer, the way of
a request and the collectives on this machine, for every model type of an experiment. `realhf plan` and
`realhf run` then predict from what was measured. Once per model type, dtype and machine is enough. With
--launcher slurm a job measures the same on nodes, and the links within and between them.
Any field of the experiment can be given as --field value."""

EXAMPLE = """examples:
  realhf profile experiments/ppo.py
  realhf profile experiments/ppo.py --num-workers 2 --force
  realhf profile experiments/ppo.py --only links,memory    (constants of the machine, in seconds)
  realhf profile experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8
  realhf profile experiments/ppo.py --architecture.hidden-size 512 --max-tokens 8192"""


def add_arguments(command: Command) -> None:
    add_experiment(command)
    command.add_argument("--num-workers", type=int, help="devices to use (default: the GPUs here, else the CPU cores)")
    command.add_argument("--hardware", help="a hardware description, such as h100 or cpu (default: this machine)")
    add_options(command, ProfileRequest, shows_all=True)
    command.add_argument("--force", action="store_true", help="measure again what was measured already")
    command.add_argument(
        "--launcher",
        choices=("local", *queueing()),
        default="local",
        help="where to measure: on this machine or on nodes (`--launcher slurm --help`)",
    )
    add_node_arguments(command)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.launcher in queueing():
        return profile_nodes(arguments)
    request = options_of(ProfileRequest, arguments)
    check_here(request, arguments)
    devices = DevicesRequest(num_workers=arguments.num_workers, hardware=arguments.hardware, place="here")
    experiment = experiment_of(arguments.experiment, arguments.overrides)
    cluster, out = cluster_of(devices), Output()
    targets = targets_of(experiment, cluster.hardware.name, request) if request.models else []
    missing = missing_of(targets, arguments.force, out)
    if not missing and not request.constants:
        return 0
    out.say(f"measuring {hardware_text(cluster.hardware, 1, cluster.num_devices)}")
    started = time.monotonic()
    with Phases() as watch:
        measure(experiment, cluster, missing, request, watch)
    show(out, cluster.hardware, request, [Path(target.path) for target in missing])
    out.say(f"measured in {time.monotonic() - started:.0f} s")
    return 0


def check_here(request: ProfileRequest, arguments: argparse.Namespace) -> None:
    """Raises UserError for what one machine cannot measure, and for nodes beside it."""
    if NETWORK in request.constants:
        raise UserError(
            f"--only {NETWORK} measures between two nodes, and this is one machine; on a login node give --launcher "
            f"slurm: realhf profile {arguments.experiment} --launcher slurm --only {NETWORK}"
        )
    for name in ("nodes", "gpus_per_node", "run_dir", "network_interface"):
        if getattr(arguments, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(arguments, name)} is for --launcher slurm; leave it out to "
                "measure this machine, on --num-workers devices"
            )
