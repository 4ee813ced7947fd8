"""The first process of a host: makes its surroundings its own, says so in a file, and reaps what its processes leave.

    python init.py DIRECTORY NAME

It is started in namespaces of its own (`host.py`). DIRECTORY has a folder of the host's name; of it `run` takes the
place of DIRECTORY/run, so that daemons of several hosts can use one configuration.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def main() -> None:
    directory, name = Path(sys.argv[1]), sys.argv[2]
    own = directory / name
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, lambda *_: None)  # ignored by default, then not waited for either
    socket.sethostname(name)
    for words in (
        ("-t", "tmpfs", "-o", "mode=1777", "shm", "/dev/shm"),
        ("--bind", str(own / "boot_id"), "/proc/sys/kernel/random/boot_id"),
        ("--bind", str(own / "hosts"), "/etc/hosts"),
        ("--bind", str(own / "run"), str(directory / "run")),
    ):
        subprocess.run(["mount", *words], check=True)
    (own / "ready").touch()
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
