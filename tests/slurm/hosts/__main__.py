"""The hosts from a shell: `python -m hosts up|down|exec|...`, in tests/slurm."""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from testbed.configuration import TestbedShape

import hosts
from hosts.cluster import Hosts, why_none
from hosts.host import HostsError

OF_HOST = ("start", "fail", "resume", "cut", "mend", "silence", "unsilence", "undrop")


def main() -> int:
    default_directory = os.environ.get("HOSTS_DIR", f"{tempfile.gettempdir()}/hosts_{os.geteuid()}")
    parser = argparse.ArgumentParser(description=hosts.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(default_directory))
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up")
    up.add_argument("--hosts", type=int, default=3, help="nodes, beside host0")
    up.add_argument("--cpus", type=int, default=8)
    commands.add_parser("down")
    for name in (*OF_HOST, "exec", "drop", "rate", "names"):
        command = commands.add_parser(name)
        command.add_argument("host")
        if name not in OF_HOST:
            help = {"drop": "an nft rule", "rate": "such as 50mbit, or ''", "names": "known, loopback or unknown"}
            command.add_argument("words", nargs=argparse.REMAINDER, help=help.get(name, "the command"))
    arguments = parser.parse_args()
    try:
        return execute(arguments, Hosts(arguments.dir))
    except (HostsError, ValueError, OSError) as error:
        print(f"hosts: error: {error}", file=sys.stderr)
        return 1


def execute(arguments: argparse.Namespace, made: Hosts) -> int:
    """Returns the exit code."""
    match arguments.command:
        case "up":
            if why := why_none():
                raise HostsError(why)
            made.up(TestbedShape(nodes=arguments.hosts, cpus=arguments.cpus, gpus=0, node_prefix="host"))
            print(f"up in {made.directory}\nexport SLURM_CONF={made.directory}/etc/slurm.conf")
        case "down":
            made.down()
        case "exec":
            return subprocess.run(made[arguments.host].command(*arguments.words), env=made.environment).returncode
        case "start" | "fail" | "resume":
            getattr(made, arguments.command)(arguments.host)
        case "drop" | "rate":
            getattr(made.network, arguments.command)(made[arguments.host], " ".join(arguments.words))
        case "names":
            made.name_hosts(arguments.host, arguments.words[0])
        case fault:
            getattr(made.network, fault)(made[arguments.host])
    return 0


if __name__ == "__main__":
    sys.exit(main())
