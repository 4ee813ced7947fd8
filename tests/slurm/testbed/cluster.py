"""Bringing the virtual cluster up and down, and making its nodes fail."""

import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from testbed.configuration import Place, TestbedShape, gres_conf, hosts_file, slurm_conf, slurmdbd_conf
from testbed.keeper import (
    PROGRAM_PATH,
    daemon_file,
    live_daemon,
    live_keepers,
    output_file,
    slurm_environment,
)
from testbed.processes import descendants, process_state, read_text, write_text

FOLDERS = ("etc", "run", "log", "state", "spool", "dev", "db")
MARK = "testbed.json"  # in a directory: this is a testbed, of this shape
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults")
ACCOUNTING_PACKAGES = "slurmdbd mariadb-server-core mariadb-client-core"
PATIENCE_S = 300.0  # for what takes seconds where nothing else runs
MAX_PATH_LENGTH = 80  # munge's socket has a short limit
ENDED_LAST = ("munged", "mariadb", "slurmdbd")  # the others need them for an orderly end


class TestbedError(Exception):
    """The cluster could not be brought into the state asked for; the text says why."""

    __test__ = False


def missing_programs(*, with_accounting: bool = False) -> list[str]:
    """The programs a testbed needs and this machine lacks."""
    wanted = PROGRAMS + (ACCOUNTING_PROGRAMS if with_accounting else ())
    return [program for program in wanted if not shutil.which(program, path=PROGRAM_PATH)]


class Testbed:
    """The cluster of one directory. All state is in the directory, so any process may take it up."""

    __test__ = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()

    @property
    def slurm_conf(self) -> Path:
        """What the environment variable SLURM_CONF has to name."""
        return self.directory / "etc/slurm.conf"

    @property
    def exists(self) -> bool:
        return (self.directory / MARK).exists()

    def run(self, *command: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Runs a SLURM command against this cluster; standard error is in `stdout` too."""
        try:
            return subprocess.run(
                command,
                env=slurm_environment(self.directory),
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as expired:
            raise TestbedError(f"{command[0]} did not end within {timeout_s:g} s") from expired

    # -- up and down

    def up(self, shape: TestbedShape) -> None:
        """Brings the cluster up, or back up where some of its daemons have died.

        Raises TestbedError where that fails, and then has cleaned up; and where the directory
        holds something else.
        """
        keepers = [keeper for keeper in live_keepers(self.directory).values() if keeper]
        if keepers:
            self._take_up(shape, keepers)
            return
        self.down()  # what a broken-off one left
        self._check(shape)
        self._write_files(shape)
        try:
            self._start_services(shape)
            self._spawn("slurmctld", ["slurmctld", "-D", "-i"])
            for name in shape.node_names:
                self._spawn(name, ["slurmd", "-D", "-N", name], is_node=True)
            self._wait("slurmctld", lambda: _listening(self._place.port), daemon="slurmctld")
            self._wait("nodes up", lambda: self._nodes_are_up(shape), daemon="node1")
        except BaseException:
            self.down()
            raise

    def down(self) -> list[str]:
        """Ends all daemons and their jobs and removes what `up` made.

        Returns the names of daemons whose keeper was gone, hence whose children may still live.
        """
        if not self.exists:
            return []
        keepers = live_keepers(self.directory)
        for is_last in (False, True):
            group = [k for name, k in keepers.items() if k and (name in ENDED_LAST) == is_last]
            for keeper in group:
                os.kill(keeper, signal.SIGTERM)
            self._wait(f"end of keepers {group}", lambda group=group: not any(map(process_state, group)))  # type: ignore[misc]
        made_directory = json.loads(read_text(self.directory / MARK))["made_directory"]
        for folder in FOLDERS:
            shutil.rmtree(self.directory / folder, ignore_errors=True)
        (self.directory / MARK).unlink()
        if made_directory and not any(self.directory.iterdir()):
            self.directory.rmdir()
        return [name for name, keeper in keepers.items() if not keeper]

    # -- faults

    def crash(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends one daemon, such as "slurmctld" or "node2"; its tasks live on. With SIGTERM slurmctld saves what it
        knows: killed, it forgets its newest jobs, and gives their numbers to others."""
        keeper = self._keeper(name)
        daemon = live_daemon(self.directory, name, keeper)
        if daemon:
            os.kill(daemon, number)
        self._wait(f"crash of {name}", lambda: not live_daemon(self.directory, name, keeper))

    def fail(self, name: str) -> None:
        """Kills a whole node: its slurmd, its steps and their tasks."""
        keeper = self._keeper(name)
        os.kill(keeper, signal.SIGUSR1)
        self._wait(f"failure of {name}", lambda: not live_daemon(self.directory, name, keeper))

    def heal(self, name: str) -> None:
        """Starts a daemon again after `crash` or `fail`."""
        keeper = self._keeper(name)
        os.kill(keeper, signal.SIGHUP)
        self._wait(f"start of {name}", lambda: bool(live_daemon(self.directory, name, keeper)))

    def hide(self, name: str, folder: Path) -> None:
        """Puts an empty file system over a folder, for what runs on one node from now on."""
        self._on_node(name, "mount", "-t", "tmpfs", "none", str(folder))

    def show(self, name: str, folder: Path) -> None:
        """Undoes `hide`."""
        self._on_node(name, "umount", str(folder))

    def _on_node(self, name: str, *command: str) -> None:
        user = ("--user", "--preserve-credentials") if os.geteuid() else ()
        enter = ("nsenter", "--target", str(self._keeper(name)), "--mount", *user)
        done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode:
            raise TestbedError(f"{name}: {' '.join(command)}: {done.stderr}")

    # -- looking

    def status(self) -> tuple[bool, str]:
        """Whether all daemons live and the controller answers, and a text with the particulars."""
        if not self.exists:
            raise TestbedError(f"no testbed in {self.directory}")
        lines, is_well = [], True
        for name, keeper in live_keepers(self.directory).items():
            daemon = live_daemon(self.directory, name, keeper)
            is_well &= daemon is not None
            num_below = len(descendants(keeper)) if keeper else 0
            lines.append(f"{name:10} keeper {keeper or 'DEAD':>7}  daemon {daemon or 'DEAD':>7}  processes {num_below}")
        answer = self.run("sinfo", "-N", "-p", "main", "-o", "%N %T %c %m %G %E")
        return is_well and answer.returncode == 0, "\n".join([*lines, answer.stdout.strip()])

    # -- the parts of `up`

    def _take_up(self, shape: TestbedShape, keepers: Sequence[int]) -> None:
        old = json.loads(read_text(self.directory / MARK))["shape"]
        if old != asdict(shape):
            raise TestbedError(f"another testbed runs in {self.directory}: {old}; bring it down first")
        for keeper in keepers:
            os.kill(keeper, signal.SIGHUP)
        self._wait("nodes up", lambda: self._nodes_are_up(shape), daemon="slurmctld")

    def _check(self, shape: TestbedShape) -> None:
        if self.directory.is_dir() and any(self.directory.iterdir()):
            raise TestbedError(f"{self.directory} is not empty and holds no testbed")
        text = str(self.directory)
        if len(text) > MAX_PATH_LENGTH or not all(c.isalnum() or c in "/._-+" for c in text):
            raise TestbedError(f"need a plain directory name of at most {MAX_PATH_LENGTH} characters: {text}")
        if missing := missing_programs(with_accounting=shape.with_accounting):
            raise TestbedError(
                f"not found: {', '.join(missing)}; apt-get install munge slurmctld slurmd slurm-client"
                + (f" {ACCOUNTING_PACKAGES}" if shape.with_accounting else "")
            )

    def _write_files(self, shape: TestbedShape) -> None:
        made_directory = not self.directory.is_dir()
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / MARK).open("x") as mark:  # fails where another `up` got here first
            json.dump({"shape": asdict(shape), "made_directory": made_directory}, mark)
        for folder in (*FOLDERS, *(f"spool/{name}" for name in shape.node_names)):
            (self.directory / folder).mkdir(mode=0o755)
        self._place = Place(
            directory=self.directory,
            host=socket.gethostname().split(".")[0],
            user=pwd.getpwuid(os.geteuid()).pw_name,
            port=_free_ports(shape.nodes + 3),
        )
        etc = self.directory / "etc"
        write_text(etc / "munge.key", os.urandom(64).hex(), mode=0o600)
        write_text(etc / "slurmdbd.conf", slurmdbd_conf(self._place), mode=0o600)
        write_text(etc / "hosts", hosts_file(shape, self._place, read_text(Path("/etc/hosts"))))
        for gpu in range(shape.gpus):  # slurmd wants character devices, links will do
            (self.directory / f"dev/gpu{gpu}").symlink_to("/dev/null")
        write_text(etc / "gres.conf", gres_conf(shape, self._place))
        write_text(etc / "slurm.conf", slurm_conf(shape, self._place))

    def _start_services(self, shape: TestbedShape) -> None:
        d, place = self.directory, self._place
        munge_files = (f"--key-file={d}/etc/munge.key", f"--socket={d}/run/munge.sock")
        munge_state = (f"--pid-file={d}/run/munged.slurm", f"--seed-file={d}/state/munge.seed")
        self._spawn("munged", ["munged", "-F", *munge_files, *munge_state])
        self._wait("munge socket", (d / "run/munge.sock").exists, daemon="munged")
        if not shape.with_accounting:
            return
        database = ["--no-defaults", f"--datadir={d}/db", f"--tmpdir={d}/db", f"--user={place.user}"]
        made = self.run("mariadb-install-db", *database, "--auth-root-authentication-method=normal")
        if made.returncode:
            raise TestbedError(f"mariadb-install-db: {made.stdout[-1500:]}")
        listen = [f"--socket={d}/run/db.sock", "--bind-address=127.0.0.1", f"--port={place.database_port}"]
        limits = ["--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"]
        self._spawn("mariadb", ["mariadbd", *database, *listen, *limits, f"--pid-file={d}/run/db.slurm"])
        self._wait("mariadb", lambda: _listening(place.database_port), daemon="mariadb")
        self._spawn("slurmdbd", ["slurmdbd", "-D"])
        self._wait("slurmdbd", lambda: _listening(place.accounting_port), daemon="slurmdbd")

    def _spawn(self, name: str, command: Sequence[str], *, is_node: bool = False) -> None:
        """Starts a daemon below a keeper of its own, which outlives this process."""
        kind = "node" if is_node else "service"
        with output_file(self.directory, name).open("ab") as output:
            subprocess.run(
                [sys.executable, "-m", "testbed.keeper", str(self.directory), name, kind, *command],
                cwd=Path(__file__).parent.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                check=True,
                timeout=PATIENCE_S,
            )
        self._wait(f"start of {name}", lambda: bool(read_text(daemon_file(self.directory, name))))

    def _nodes_are_up(self, shape: TestbedShape) -> bool:
        states = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T").stdout.split()
        return len(states) == shape.nodes and set(states) <= {"idle", "mixed", "allocated", "completing"}

    def _keeper(self, name: str) -> int:
        keeper = live_keepers(self.directory).get(name)
        if not keeper:
            raise TestbedError(f"no running {name!r} in {self.directory}")
        return keeper

    def _wait(self, what: str, is_done: Callable[[], bool], *, daemon: str = "") -> None:
        """Until `is_done`; gives up after PATIENCE_S, and at once when `daemon` has died."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_done():
            is_dead = daemon and not live_daemon(self.directory, daemon, live_keepers(self.directory).get(daemon))
            if is_dead or time.monotonic() > deadline:
                why = f"{daemon} died" if is_dead else f"not within {PATIENCE_S:g} s"
                output = read_text(output_file(self.directory, daemon)) if daemon else ""
                raise TestbedError(f"{what}: {why}\n{output[-1500:]}")
            time.sleep(0.05)


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_ports(number: int) -> int:
    """The first of `number` ports in a row that nobody listens on."""
    while True:
        first = random.randrange(15_000, 32_000)
        if not any(map(_listening, range(first, first + number))):
            return first
