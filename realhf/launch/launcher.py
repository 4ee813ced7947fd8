"""What a launcher is: it starts processes from specs, tells which have ended, and leaves none behind."""

import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

MASTER = "master"
WORKER_INDEX_VARIABLE = "REALHF_WORKER_INDEX"


def worker_name(index: int) -> str:
    return f"worker-{index}"


def worker_of(name: str) -> int | None:
    """The index of the worker whose process has this name, None for the master's."""
    prefix, _, index = name.partition("-")
    return int(index) if prefix == "worker" and index.isdecimal() else None


def worker_index(environ: Mapping[str, str]) -> int | None:
    """The index that a launcher gave to this worker process through its environment, None outside of one."""
    text = environ.get(WORKER_INDEX_VARIABLE)
    return None if text is None else int(text)


def python_command(module: str, *words: str) -> tuple[str, ...]:
    """The command line of every Python process that is started: `module` with these words.

    Without -P the working directory would lead `sys.path`: a file `json.py` lying there would be run in place of
    Python's own. What these processes start in turn (multiprocessing) has -P too.
    """
    return (sys.executable, "-P", "-m", module, *words)


def process_environment(threads: int = 1) -> dict[str, str]:
    """What every process gets: `threads` unless the user asks for others, its lines at once, memory in huge pages, and
    freed memory of tensors that can be used again.

    malloc asks for huge pages (glibc from 2.35 on; others do not know the option). A model of 144 MB that one
    process sends to three or seven others was there in 0.75 and 0.88 of the time, since fewer pages are looked up.
    `csrc/memory/aligned.cpp` says why it is loaded; what the user preloads comes first, another malloc for instance.
    """
    own, preloaded = os.environ.get("GLIBC_TUNABLES"), os.environ.get("LD_PRELOAD")
    threads_text = os.environ.get("OMP_NUM_THREADS", str(threads))
    aligned = _aligned_memory()
    return {
        **({"LD_PRELOAD": ":".join(filter(None, [preloaded, aligned]))} if aligned else {}),
        "OMP_NUM_THREADS": threads_text,
        # Threads that wait for each other by spinning take the cores from whoever is waited for, where all cores are
        # in use: a step of PPO with two threads on two busy cores took ten times as long as with one.
        **({} if threads_text == "1" else {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}),
        "PYTHONUNBUFFERED": "1",
        # Of two values of one option the later counts: the user's.
        "GLIBC_TUNABLES": ":".join(filter(None, ["glibc.malloc.hugetlb=1", own])),
    }


def _aligned_memory() -> str | None:
    """The library of `csrc/memory`; None where malloc is not glibc's or the loader cannot read the name."""
    module = importlib.util.find_spec("realhf.machine._aligned")
    if module is None or module.origin is None or platform.libc_ver()[0] != "glibc":
        return None
    return None if {" ", ":"} & set(module.origin) else module.origin


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to start: `name` is "master" or "worker-INDEX".

    `env` is added to the launcher's own environment; a worker finds its index in it besides
    (`worker_index`). What the process prints goes to `log_path`.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    log_path: Path

    def __post_init__(self) -> None:
        assert self.name == MASTER or worker_name(self.index or 0) == self.name, f"process name {self.name!r}"
        assert self.argv, f"{self.name} has no command"

    @property
    def index(self) -> int | None:
        """The worker's index, None for the master."""
        return worker_of(self.name)


# The exit code of a worker that has told the master what failed. Who ends with another one has died without a word.
TOLD_RETURNCODE = 86

# The exit code of a process of whose end only the cluster knows.
UNKNOWN_RETURNCODE = 255


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a process ended: `returncode` is its exit code, or -N if signal N killed it (as in subprocess).

    `note` is what the cluster had to say about it, such as a node failure; empty if nothing.
    """

    name: str
    returncode: int
    log_path: Path
    note: str = ""


class Launcher(Protocol):
    """Starts, watches and ends the processes of one run. Used from one thread, `start` called once."""

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Starts one process a spec. Raises UserError or RunError if that cannot be; then none is left."""

    def poll(self) -> list[Exit]:
        """The processes that have ended since the last poll, in the order in which they ended. Does not wait.

        Raises RunError where the launcher has lost sight of them or gives up; then none is left.
        """

    def stop(self, *, grace_s: float = 5.0) -> None:
        """Ends what is left: asks (SIGTERM), and after `grace_s` kills. Returns when nothing is left.

        May be called at any time and more than once; what it ended is not reported by `poll`.
        Raises RunError where something cannot be ended.
        """
