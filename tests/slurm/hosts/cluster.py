"""Bringing hosts up and down, with SLURM over them, and making them fail."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from testbed.configuration import Place, TestbedShape, slurm_conf
from testbed.keeper import slurm_environment
from testbed.processes import read_text, write_text

from hosts.host import PATIENCE_S, Host, HostsError, wait_for
from hosts.network import Network, address

MARK = "hosts.json"  # in a directory: these are hosts, of this shape
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "nft": "nftables"}
PROGRAMS |= {"faketime": "faketime"}
FAKETIME_LIBRARY = f"/usr/lib/{platform.machine()}-linux-gnu/faketime/libfaketime.so.1"
SLURM_PORT = 6817
SLURMD_PORT = 6818
Names = Literal["known", "loopback", "unknown"]


@dataclass(frozen=True, kw_only=True)
class HostsPlace(Place):
    """SLURM's daemons on hosts of their own, with SLURM's usual ports."""

    host: str = "host0"
    user: str = "root"
    port: int = SLURM_PORT
    controller_address: str = address(0)

    def node_address(self, number: int) -> str:
        return address(number)

    def node_port(self, number: int) -> int:
        return SLURMD_PORT


def why_none() -> str:
    """Why hosts cannot be made here; "" if they can."""
    path = "/usr/sbin:/sbin:/usr/bin:/bin"
    if missing := sorted({package for program, package in PROGRAMS.items() if not shutil.which(program, path=path)}):
        return f"not installed: {', '.join(missing)}; apt-get install iproute2 util-linux nftables faketime"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return f"this machine lends no network of its own: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """The hosts of one directory. All state is in the directory, so any process may take them up."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self._switch = Host(self.directory, "switch")
        self.network = Network(self._switch)

    @property
    def shape(self) -> TestbedShape:
        """Of the cluster; its nodes are the hosts but host0. Raises HostsError where nothing is up."""
        if not (self.directory / MARK).exists():
            raise HostsError(f"no hosts in {self.directory}")
        return TestbedShape(**json.loads(read_text(self.directory / MARK)))

    def __getitem__(self, name: str) -> Host:
        """host0 and the nodes."""
        if name not in self.names:
            raise HostsError(f"no {name!r} among {', '.join(self.names)}")
        return Host(self.directory, name)

    @property
    def names(self) -> tuple[str, ...]:
        return ("host0", *self.shape.node_names)

    @property
    def environment(self) -> dict[str, str]:
        """In which commands reach this SLURM."""
        return slurm_environment(self.directory)

    def run(self, *command: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Runs a command on host0, against this SLURM; standard error is in `stdout` too."""
        return self["host0"].run(*command, env=self.environment, timeout_s=timeout_s)

    # -- up and down

    def up(self, shape: TestbedShape, *, ends_with_caller: bool = False) -> None:
        """Brings up host0 and as many nodes.

        Raises HostsError where that fails, and then has cleaned up; and where the directory holds something else.
        """
        self.down()
        if self.directory.is_dir() and any(self.directory.iterdir()):
            raise HostsError(f"{self.directory} is not empty and holds no hosts")
        for folder in ("etc", "run", "log", "state", "spool"):
            (self.directory / folder).mkdir(parents=True, mode=0o755)
        write_text(self.directory / MARK, json.dumps(asdict(shape)))
        try:
            self._write_configuration(shape)
            self._switch.start(ends_with_caller=ends_with_caller)
            self.network.make()
            for name in self.names:
                self.start(name, ends_with_caller=ends_with_caller)
            self._wait("nodes up", lambda: self._nodes("idle") == set(shape.node_names))
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Ends all hosts, with all that runs on them, and removes what `up` made."""
        if not (self.directory / MARK).exists():
            return
        for name in ("switch", *self.names):
            Host(self.directory, name).kill()
        shutil.rmtree(self.directory)

    def start(self, name: str, *, ends_with_caller: bool = False) -> None:
        """Boots a host that is down, with SLURM's daemons."""
        host = self[name]
        host.start(ends_with_caller=ends_with_caller)
        self.network.connect(host, self.names.index(name))
        self.name_hosts(name, "known")
        d, own = self.directory, host.folder
        files = (f"--key-file={d}/etc/munge.key", f"--socket={d}/run/munge.sock", f"--pid-file={d}/run/munged.pid")
        files = (*files, f"--seed-file={own}/munge.seed", f"--log-file={own}/munged.log")
        host.done("munged", *files, env=self.environment)
        self._wait(f"munge on {name}", (own / "run/munge.sock").exists)
        daemon = ["slurmctld"] if name == "host0" else ["slurmd", "-N", name]
        host.done(*daemon, env=self.environment)

    def fail(self, name: str) -> None:
        """Power loss of a host; `start` boots it again."""
        self[name].kill()

    def resume(self, name: str) -> None:
        """Has SLURM use a node again that was lost."""
        self._wait(f"{name} answers", lambda: bool(self._nodes("idle,down,allocated,mixed,unknown") & {name}))
        self.run("scontrol", "update", f"nodename={name}", "state=resume")
        self._wait(f"{name} up", lambda: bool(self._nodes("idle,allocated,mixed") & {name}))

    # -- surroundings

    def name_hosts(self, name: str, names: Names) -> None:
        """What /etc/hosts says on a host: of all hosts their addresses; of itself, as on Debian, 127.0.1.1; nothing."""
        lines = ["127.0.0.1 localhost"]
        if names == "loopback":
            lines.append(f"127.0.1.1 {name}")
        if names != "unknown":
            others = [other for other in self.names if names == "known" or other != name]
            lines += [f"{address(self.names.index(other))} {other}" for other in others]
        (self[name].folder / "hosts").write_text("\n".join(lines) + "\n")  # the very file: it is mounted

    def set_clock(self, name: str, offset: str) -> None:
        """What SLURM's tasks on a host take for the time: "+200s" from now; "" for the time itself.

        They need `FAKETIME_LIBRARY` in LD_PRELOAD, which `realhf run` hands on to them.
        """
        exports = {"FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
        text = "".join(f"export {key}={value}\n" for key, value in exports.items()) if offset else ""
        write_text(self[name].folder / "prologue", text)

    def make_private(self, name: str, folder: Path) -> None:
        """Gives a host an empty folder of its own in the place of a shared one, until it is booted again."""
        self[name].done("mount", "-t", "tmpfs", "private", str(folder))

    # -- the parts of `up`

    def _write_configuration(self, shape: TestbedShape) -> None:
        etc = self.directory / "etc"
        write_text(etc / "munge.key", os.urandom(64).hex(), mode=0o600)
        prologue = f"cat {self.directory}/$(hostname)/prologue 2>/dev/null; true"
        write_text(etc / "prologue", f"#!/bin/sh\n{prologue}\n", mode=0o755)
        text = slurm_conf(shape, HostsPlace(directory=self.directory))
        write_text(etc / "slurm.conf", f"{text}TaskProlog={etc}/prologue\n")

    def _nodes(self, states: str) -> set[str]:
        shown = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N", "-t", states, "--responding")
        return set(shown.stdout.split()) if shown.returncode == 0 else set()

    def _wait(self, what: str, is_done: Callable[[], bool]) -> None:
        logs = self.directory / "log"
        wait_for(what, is_done, lambda: "".join(f"\n{log}: {read_text(log)[-500:]}" for log in logs.iterdir()))
