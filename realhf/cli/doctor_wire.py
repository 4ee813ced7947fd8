"""Checks of what master and workers talk over: encryption, network interfaces, names, keys."""

import asyncio
import contextlib
import socket
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import zmq

from realhf.base.errors import UserError
from realhf.cli.findings import Finding
from realhf.transport.client import Client
from realhf.transport.codec import Codec
from realhf.transport.keys import WorkerKeys, load_master_keys, load_worker_keys, make_run_keys
from realhf.transport.messages import Heartbeat, Hello, ToMaster, ToWorker
from realhf.transport.server import Server

HANDSHAKE_S = 120.0


def find_curve() -> str:
    detail = f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"
    if not zmq.has("curve"):
        raise UserError(f"{detail} cannot encrypt (no CURVE)")
    return f"{detail} with CURVE"


def find_loopback() -> str:
    """The interface that local runs name to gloo, and a connection over it."""
    addresses = {a.address for a in psutil.net_if_addrs().get("lo", ()) if a.family is socket.AF_INET}
    if not addresses:
        raise UserError(f"no interface lo with an IPv4 address; there are {', '.join(psutil.net_if_addrs()) or 'none'}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
    return f"lo has {', '.join(sorted(addresses))} and takes connections"


def find_host_name() -> str | Finding:
    """Under SLURM the master listens on the address that its host's name stands for, and others must reach it."""
    name = socket.gethostname()
    own = {
        interface: address.address
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family is socket.AF_INET and psutil.net_if_stats()[interface].isup
    }
    interfaces = ", ".join(f"{interface} {address}" for interface, address in own.items()) or "none"
    remedy = "put the host into DNS or /etc/hosts with an address that other nodes reach; one machine needs none of it"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding("warn", f"{name} is not known ({error}); interfaces: {interfaces}", remedy)
    if address not in own.values() and not address.startswith("127."):
        return Finding("warn", f"{name} is {address}, no address of this machine ({interfaces})", remedy)
    if address.startswith("127.") and len(own) > 1:
        return Finding("info", f"{name} is {address}, which only this machine reaches; interfaces: {interfaces}")
    return f"{name} is {address}; interfaces: {interfaces}"


def find_keys(runs_dir: Path) -> str:
    """Keys where run directories are to lie: a worker with the run's key gets in, a stranger and exposed files do not.
    Raises PermissionError if somebody got in who must not, TimeoutError if a handshake did not come about."""
    parent = next(path for path in (runs_dir.absolute(), *runs_dir.absolute().parents) if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=".realhf-doctor-", dir=parent) as name:
        folder, others = Path(name, "keys"), Path(name, "others")
        for keys in (folder, others):
            make_run_keys(keys, num_workers=1)
        worker = load_worker_keys(folder, worker=0)
        asyncio.run(_handshakes(folder, worker, replace(load_worker_keys(others, worker=0), master=worker.master)))
        secret = folder / "worker-0.secret"
        secret.chmod(0o644)
        try:
            load_worker_keys(folder, worker=0)
        except UserError:
            return "a run's worker gets in; a stranger's and an exposed key are refused"
        raise PermissionError(f"a key of mode {secret.stat().st_mode & 0o777:04o} was taken")


async def _handshakes(keys: Path, worker: WorkerKeys, stranger: WorkerKeys) -> None:
    """The stranger first: when the worker has been heard, the stranger has had its time."""
    to_master, to_worker = Codec[ToMaster](ToMaster), Codec[ToWorker](ToWorker)
    beat = partial(Heartbeat, activity="doctor")
    with contextlib.ExitStack() as ended:
        server = Server("127.0.0.1", load_master_keys(keys, num_workers=1), incoming=to_master, outgoing=to_worker)
        ended.callback(server.close)
        connected = partial(
            Client, server.address, incoming=to_worker, outgoing=to_master, heartbeat=beat, heartbeat_s=HANDSHAKE_S
        )
        async with asyncio.timeout(HANDSHAKE_S):
            for pid, party in enumerate((stranger, worker)):
                client = connected(party)
                ended.callback(client.close)
                client.send(Hello(worker=0, pid=pid, host="doctor"))
                while party is stranger and not server.num_refused:
                    await asyncio.sleep(0.01)
            while not isinstance(message := (await server.recv())[1], Hello):
                pass
            if message.pid != 1:
                raise PermissionError("a party without a key of the run was let in")
