"""Which devices a command line means, and what hardware they are."""

import argparse
from pathlib import Path

from realhf.base.errors import UserError
from realhf.base.numbers import DEVICES, check_range
from realhf.dataflow.plan import load_plan
from realhf.machine.gpus import count_gpus, visible_gpus
from realhf.machine.host import read_host
from realhf.planning.cluster import Cluster
from realhf.planning.clusters import with_memory
from realhf.planning.here import CPU, check_here, divided, gpu_hardware, hardware_here
from realhf.planning.model.descriptions import left_descriptions, load_hardware
from realhf.planning.model.hardware import GIB, Hardware
from realhf.rundir.run import Run, RunSpec


def cluster_of(arguments: argparse.Namespace, num_devices: int | None = None, saved: RunSpec | None = None) -> Cluster:
    """The cluster of the command line's --nodes, --gpus-per-node, --num-workers, --hardware and --memory-gb.

    `num_devices` is taken where the command line says nothing (a given plan's), the hardware of a `saved` run
    likewise. Where all workers are on this machine (`--launcher local`), they share its cores and its memory.

    Raises:
        UserError: the numbers contradict each other, or the hardware is not known or not what is here.
    """
    for name in ("nodes", "gpus_per_node", "num_workers"):
        if getattr(arguments, name) is not None:
            check_range(f"--{name.replace('_', '-')}", getattr(arguments, name), *DEVICES)
    total = arguments.num_workers
    if total is None and arguments.gpus_per_node is None:
        total = num_devices or local_devices()
    per_node = arguments.gpus_per_node or total // arguments.nodes
    if per_node < 1 or (total is not None and per_node * arguments.nodes != total):
        raise UserError(
            f"--num-workers {total} is not --nodes {arguments.nodes} x --gpus-per-node {per_node}; give any two of them"
        )
    hardware = with_memory(_hardware(arguments, saved), arguments.memory_gb)
    is_local = arguments.launcher == "local"
    sharing = arguments.nodes * per_node if is_local else per_node
    if saved is None or hardware != saved.hardware or sharing != saved.num_workers:
        hardware = divided(hardware, sharing)
    if is_local:
        check_here(hardware, is_given=bool(arguments.hardware))
    return Cluster(
        num_nodes=arguments.nodes,
        devices_per_node=per_node,
        device_memory_bytes=hardware.device_memory_bytes,
        hardware=hardware,
    )


def hardware_text(hardware: Hardware, num_nodes: int, devices_per_node: int) -> str:
    """`1 x 2 cpu with 10.9 GiB each (...)`: what is planned for."""
    return (
        f"{num_nodes} x {devices_per_node} {hardware.name} with {hardware.device_memory_bytes / GIB:.1f} GiB each "
        f"({hardware.description})"
    )


def said_of_hardware(run: Run, given: Path | None) -> list[str]:
    """What a run is planned for; whether it counts on more memory than there is; and of a `given` plan, whether it
    comes from elsewhere and needs more memory than it is to have."""
    hardware, workers = run.spec.hardware, run.spec.num_workers
    if hardware is None:
        return []
    per_node = run.spec.devices_per_node
    lines = [f"planned for {hardware_text(hardware, workers // per_node, per_node)}"]
    there, each = read_host().memory_bytes / GIB, hardware.device_memory_bytes / GIB
    if hardware.host_cores is not None and workers * each > there:
        lines.append(
            f"warning: {workers} workers with {each:.1f} GiB each count on more than this machine's {there:.1f}"
        )
    made_for = load_plan(given).notes.get("hardware", hardware.name) if given else hardware.name
    if made_for != hardware.name:
        lines.append(f"note: {given} was made for {made_for}; its times and memory are predicted anew")
    needs = [memory.peak_bytes / GIB for memory in run.plan.rationale.memory] if run.plan.rationale else []
    if given and max(needs, default=0) > each:
        lines.append(f"warning: {given} needs {max(needs):.1f} GiB on a device, and they have {each:.1f} GiB")
    return lines


def local_devices() -> int:
    """The number of GPUs that a run on this machine uses, or of its cores where there is none."""
    return count_gpus() or read_host().cores


def has_gpus() -> bool:
    """Whether a run on this machine uses GPUs."""
    return count_gpus() > 0


def _hardware(arguments: argparse.Namespace, saved: RunSpec | None) -> Hardware:
    """The hardware of --hardware, of the run as it was planned, of the nodes of a SLURM job, or of this machine."""
    if arguments.hardware:
        gpus = visible_gpus()
        here = gpu_hardware(gpus[0], len(gpus)) if gpus else None
        return here if here and here.name == arguments.hardware else load_hardware(arguments.hardware)
    if saved is not None and saved.hardware is not None:
        return saved.hardware
    return _of_nodes(arguments.cpu_only) if arguments.launcher == "slurm" else hardware_here()


def _of_nodes(cpu_only: bool) -> Hardware:
    """What can be known of a cluster's nodes from a machine that may be unlike them.

    Raises:
        UserError: their GPUs cannot be known.
    """
    if cpu_only:
        return load_hardware(CPU)
    gpus = visible_gpus()
    if gpus:
        return gpu_hardware(gpus[0], len(gpus))
    profiled = [found for name in left_descriptions() if (found := load_hardware(name)).is_gpu]
    if len(profiled) == 1:
        return profiled[0]
    kinds = f"profiles of {', '.join(one.name for one in profiled)}" if profiled else "no profile of any"
    raise UserError(
        f"this machine has no GPU and {kinds}, so that the kind of the nodes' GPUs is not known; give it with "
        "--hardware (h100, or the path of a .yaml file), or --cpu-only for nodes without GPUs"
    )
