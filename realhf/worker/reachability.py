"""Whether the workers' hosts reach each other, found out before process groups wait for it: who cannot reach whom."""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from realhf.base.errors import RunError
from realhf.cpu.host_group import host_identity
from realhf.machine.network import addresses

logger = logging.getLogger(__name__)

LOOPBACK = "lo"
REACH_S = 20.0  # in which a host answers
_SHOWN = 3


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker can be reached. Workers of one `identity` share memory."""

    rank: int
    host: str
    identity: int
    interface: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"worker {self.rank} on {self.host}"


def join_network(
    store: dist.Store, rank: int, num_workers: int, device: torch.device, named: str | None, found: str
) -> None:
    """Has gloo, and NCCL where an interface is `named`, use one network, before process groups are made; all workers
    together find out whether their hosts reach each other there.

    `found`: the interface that gloo takes where none is named. NCCL, which knows more kinds of networks, then chooses
    by itself. Raises RunError as `check_reachability`.
    """
    if named:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", named)
    if interface := named or found:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen in addresses() and chosen != LOOPBACK and (named or device.type == "cpu"):
        check_reachability(store, rank, num_workers, host_identity(), chosen)


def check_reachability(store: dist.Store, rank: int, num_workers: int, identity: int, interface: str) -> None:
    """Returns when every worker has reached a worker of each other host, over the interface that groups will use.

    Raises RunError that says who cannot reach whom, under which address, port and interface.
    """
    store = dist.PrefixStore("places", store)
    found = addresses().get(interface)
    if not found:
        raise RunError(f"worker {rank} on {socket.gethostname()} has no interface {interface}; it has {addresses()}")
    family = socket.AF_INET6 if ":" in found[0] else socket.AF_INET
    # The kernel completes connections to a listening socket, so no thread has to accept them.
    with socket.create_server((found[0], 0), family=family, backlog=4096) as server:
        own = Place(
            rank=rank,
            host=socket.gethostname(),
            identity=identity,
            interface=interface,
            address=found[0],
            port=server.getsockname()[1],
        )
        store.set(str(rank), msgspec.json.encode(own).decode())
        places = [msgspec.json.decode(store.get(str(other)), type=Place) for other in range(num_workers)]
        neighbours = [place.rank for place in places if place.identity == identity and place.rank != rank]
        others = others_to_reach(own, places)
        errors = asyncio.run(_reach(others))
        if failed := {place: error for place, error in zip(others, errors, strict=True) if error}:
            raise unreached(own, failed)
        logger.info("%s shares memory with workers %s and reaches %d other hosts", own, neighbours, len(others))
        store.set(f"done {rank}", "1")
        store.wait([f"done {other}" for other in range(num_workers)])


def others_to_reach(own: Place, places: Sequence[Place]) -> list[Place]:
    """One worker of every other host; workers of a host begin with different ones, to spread the load."""
    by_host: dict[int, list[Place]] = {}
    for place in places:
        by_host.setdefault(place.identity, []).append(place)
    return [there[own.rank % len(there)] for identity, there in by_host.items() if identity != own.identity]


def unreached(own: Place, failed: dict[Place, str]) -> RunError:
    """The error of a worker that does not reach others."""
    lines = [
        f"{own} ({own.address}, {own.interface}) cannot reach {place} at {place.address} port {place.port} "
        f"({place.interface}): {error}"
        for place, error in list(failed.items())[:_SHOWN]
    ]
    more = [f"{len(failed) - _SHOWN} more hosts cannot be reached"] if len(failed) > _SHOWN else []
    remedy = (
        "workers connect to each other at ports that the system chooses: open them between the hosts, or name the "
        "interface of a network where they are open by --network-interface"
    )
    return RunError("\n".join([*lines, *more, remedy]))


async def _reach(places: Sequence[Place]) -> list[str]:
    return await asyncio.gather(*map(_try, places))


async def _try(place: Place) -> str:
    """Why the place cannot be reached; "" if it can."""
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(place.address, place.port)
            writer.close()
    except TimeoutError:
        return f"no answer within {REACH_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""
