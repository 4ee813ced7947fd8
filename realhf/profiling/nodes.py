"""The workers of all nodes of a profile, together: their hardware, and the network between them."""

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from realhf.base.errors import RunError, UserError
from realhf.base.files import write_atomically
from realhf.cpu.host_group import host_identity
from realhf.machine.gpus import visible_gpus
from realhf.machine.network import BY_INTERFACE, addresses, interface_of, own_address, source_of
from realhf.planning.here import gpu_hardware
from realhf.planning.model.measured import MeasuredConstant
from realhf.profiling.job import ProfileJob
from realhf.profiling.model_bench import Stopwatch
from realhf.profiling.network_bench import NetworkBench
from realhf.rundir.paths import RunDirectory
from realhf.worker.device import device_name
from realhf.worker.device_check import check_device
from realhf.worker.reachability import check_reachability

LOOPBACK = "lo"
LOOK_EVERY_S = 1.0
NAMED = 4  # nodes


@dataclass(frozen=True)
class Network:
    """The constants measured between the nodes, and when and where in words."""

    constants: dict[str, MeasuredConstant]
    source: str


def on_found(job: ProfileJob, rank: int, device: torch.device) -> ProfileJob:
    """The job on this worker's device: with the name of the hardware, and without constants that were measured before.

    Raises UserError if the device differs from the description.
    """
    check_device(job.described, rank, device)
    if job.hardware:
        return job
    hardware = gpu_hardware(visible_gpus()[0], job.num_workers)
    if rank == 0:
        write_atomically(job.description_path, msgspec.yaml.encode(hardware))
    targets = tuple(t for t in job.targets if f"{hardware.name}/{Path(t.path).name}" not in job.kept)
    return msgspec.structs.replace(job, hardware=hardware.name, targets=targets)


class Nodes:
    """All workers of a job of several nodes, who meet through a file in the job's directory."""

    def __init__(self, job: ProfileJob, directory: RunDirectory, rank: int, device: torch.device) -> None:
        self.job, self.rank, self.device = job, rank, device
        self.store = dist.FileStore(str(directory.rendezvous / "nodes"), job.world_size)
        self.store.set_timeout(timedelta(seconds=job.timeout_s))

    @property
    def is_on_first(self) -> bool:
        return self.rank < self.job.num_workers

    def network(self) -> Network:
        """Measures the links between the nodes; all workers call it together.

        Raises RunError if a node does not reach another one, UserError if they have other devices.
        """
        self._choose_interface()
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.PrefixStore("torch", self.store),
            rank=self.rank,
            world_size=self.job.world_size,
            timeout=timedelta(seconds=self.job.timeout_s),
        )
        places = self._places()
        check_alike(places)
        watch = Stopwatch(self.device, self.job.repetitions)
        bench = NetworkBench(
            self.job.num_nodes, self.job.num_workers, self.rank, self.device, watch, self.job.timeout_s
        )
        found = bench.found()
        dist.destroy_process_group()
        hosts = list(dict.fromkeys(host for host, _ in places))
        more = f" and {len(hosts) - NAMED} more" if len(hosts) > NAMED else ""
        return Network(found, f"{time.strftime('%Y-%m-%d')} between {', '.join(hosts[:NAMED])}{more}")

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

    def _choose_interface(self) -> None:
        """Has gloo, and NCCL where an interface is named, use the network between the nodes, which has to be open."""
        named = self.job.network_interface
        if self.rank == 0:
            self.store.set("address", own_address(named, BY_INTERFACE))
        first = self.store.get("address").decode()
        interface = named or interface_of(source_of(first))
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if named:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", named)
        chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
        # NCCL, where no interface is named, may choose another one than gloo.
        if chosen in addresses() and chosen != LOOPBACK and (named or self.device.type == "cpu"):
            check_reachability(self.store, self.rank, self.job.world_size, host_identity(), chosen)


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
    """From now on new process groups use the loopback interface, as for a profile of one machine."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
