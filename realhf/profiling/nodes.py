"""The workers of all nodes of a profile, together: their hardware, and the network between them."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from realhf.base.errors import RunError, UserError
from realhf.base.files import write_atomically
from realhf.machine.gpus import visible_gpus
from realhf.machine.network import BY_INTERFACE, interface_of, own_address, source_of
from realhf.parallel.groups import make_world
from realhf.planning.here import gpu_hardware
from realhf.planning.model.descriptions import LEFT_FILE
from realhf.planning.model.measured import NETWORK, MeasuredConstants
from realhf.profiling.job import ProfileJob
from realhf.profiling.model_bench import Stopwatch
from realhf.profiling.network_bench import NetworkBench
from realhf.rundir.paths import RunDirectory
from realhf.worker.device import check_device, device_name
from realhf.worker.reachability import LOOPBACK, join_network

LOOK_EVERY_S = 1.0
NAMED = 4  # nodes


def on_found(job: ProfileJob, results: Path, rank: int, device: torch.device) -> ProfileJob:
    """The job on this worker's device: with the hardware, and without the targets that were measured before. Where the
    job names no hardware, worker 0 writes its description into `results`.

    Raises UserError if the device differs from the description.
    """
    check_device(job.hardware, rank, device)
    if job.hardware:
        return job
    hardware = gpu_hardware(visible_gpus()[0], job.num_workers)
    if rank == 0:
        write_atomically(results / LEFT_FILE, msgspec.yaml.encode(hardware))
    targets = tuple(target for target in job.targets if f"{hardware.name}/{target.file}" not in job.kept)
    return msgspec.structs.replace(job, hardware=hardware, targets=targets)


class Nodes:
    """All workers of a job of several nodes, who meet through a file in the job's directory."""

    def __init__(self, job: ProfileJob, directory: RunDirectory, rank: int, device: torch.device) -> None:
        assert job.hardware is not None, "`on_found` has named it"
        self.job, self.rank, self.device, self.hardware = job, rank, device, job.hardware.name
        self.store = dist.FileStore(str(directory.rendezvous / "nodes"), job.world_size)
        self.store.set_timeout(timedelta(seconds=job.timeout_s))

    @property
    def is_on_first(self) -> bool:
        return self.rank < self.job.num_workers

    def network(self) -> MeasuredConstants:
        """Measures the links between the nodes, and says when and between which; all workers call it together.

        Raises RunError if a node does not reach another one, UserError if they have other devices.
        """
        if self.rank == 0:
            self.store.set("address", own_address(self.job.network_interface, BY_INTERFACE))
        on_first = interface_of(source_of(self.store.get("address").decode()))
        join_network(self.store, self.rank, self.job.world_size, self.device, self.job.network_interface, on_first)
        store = dist.PrefixStore("torch", self.store)
        make_world(store, self.rank, self.job.world_size, self.device, self.job.timeout_s)
        places = self._places()
        check_alike(places)
        watch = Stopwatch(self.device, self.job.repetitions)
        found = NetworkBench(self.job.num_nodes, self.job.num_workers, self.rank, watch, self.job.timeout_s).found()
        dist.destroy_process_group()
        hosts = list(dict.fromkeys(host for host, _ in places))
        more = f" and {len(hosts) - NAMED} more" if len(hosts) > NAMED else ""
        source = f"{time.strftime('%Y-%m-%d')} between {', '.join(hosts[:NAMED])}{more}"
        return MeasuredConstants(hardware=self.hardware, constants=found, measured={NETWORK: source})

    def wait_for_first(self) -> None:
        """Waits on another node until the first has measured the rest: where a worker ends early, some clusters end
        the others soon after."""
        deadline = time.monotonic() + self.job.timeout_s
        while not self.store.check(["measured"]):
            if time.monotonic() > deadline:
                raise RunError(f"the first node has not measured within {self.job.timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)

    def tell_end(self) -> None:
        """Lets the workers of other nodes end."""
        self.store.set("measured", "1")

    def _places(self) -> list[tuple[str, str]]:
        """(host, device) of all workers."""
        own = (socket.gethostname(), device_name(self.device))
        self.store.set(f"place {self.rank}", msgspec.json.encode(own).decode())
        texts = (self.store.get(f"place {rank}") for rank in range(self.job.world_size))
        return [msgspec.json.decode(text, type=tuple[str, str]) for text in texts]


def check_alike(places: list[tuple[str, str]]) -> None:
    """Raises UserError if workers, by (host, device), have devices of several kinds."""
    first_host, first = places[0]
    for host, device in places:
        if device != first:
            raise UserError(
                f"{first_host} has {first}, and {host} has {device}: a profile is of nodes of one kind; choose them by "
                "--gpu-type, --partition or --nodelist"
            )


def stay_within_node() -> None:
    """From now on new process groups use the loopback interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
