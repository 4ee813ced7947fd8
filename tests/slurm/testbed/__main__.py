"""The testbed from a shell: `python -m testbed up|down|status|env|crash|fail|heal`, in tests/slurm."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import testbed
from testbed.cluster import Testbed, TestbedError
from testbed.configuration import TestbedShape


def main() -> int:
    default_directory = os.environ.get("SLURM_TESTBED_DIR", f"{tempfile.gettempdir()}/slurm_testbed_{os.geteuid()}")
    parser = argparse.ArgumentParser(description=testbed.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["up", "down", "status", "env", "crash", "fail", "heal"])
    parser.add_argument("name", nargs="?", default="", help="of a daemon, for crash, fail and heal")
    parser.add_argument("--dir", type=Path, default=Path(default_directory))
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cpus", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--memory-mb", type=int, default=16_000)
    parser.add_argument("--accounting", action="store_true")
    arguments = parser.parse_args()
    try:
        return execute(arguments, Testbed(arguments.dir))
    except (TestbedError, ValueError, OSError) as error:
        print(f"testbed: error: {error}", file=sys.stderr)
        return 1


def execute(arguments: argparse.Namespace, cluster: Testbed) -> int:
    """Returns the exit code."""
    export = f"export SLURM_CONF={cluster.slurm_conf}"
    match arguments.command:
        case "up":
            started_s = time.monotonic()
            cluster.up(
                TestbedShape(
                    nodes=arguments.nodes,
                    cpus=arguments.cpus,
                    gpus=arguments.gpus,
                    memory_mb=arguments.memory_mb,
                    with_accounting=arguments.accounting,
                )
            )
            print(f"up after {time.monotonic() - started_s:.1f} s in {cluster.directory}\n{export}")
        case "down":
            lost = cluster.down()
            print("down" + (f"; {', '.join(lost)} had lost their keepers: look for orphans" if lost else ""))
        case "status":
            is_well, text = cluster.status()
            print(f"{text}\n{export}")
            return 0 if is_well else 1
        case "env":
            print(export)
        case "crash":
            cluster.crash(arguments.name)
        case "fail":
            cluster.fail(arguments.name)
        case "heal":
            cluster.heal(arguments.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
