"""Runs a Python program of unknown origin, as a model writes them, with limits that need no privileges."""

import contextlib
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from realhf.base.errors import UserError
from realhf.base.numbers import check_range
from realhf.rewards import confined

_LOOK_S = 0.1
_MIB = 2**20
_OPEN_FILES = 64


@dataclass(frozen=True, kw_only=True)
class Limits:
    """time_s: from start to end. memory_mb: of the address space. files_mb: of all files that the program writes."""

    time_s: float = 10.0
    memory_mb: int = 1024
    files_mb: int = 16

    def __post_init__(self) -> None:
        check_range("time_s", self.time_s, 0.01, 3600, "s")
        check_range("memory_mb", self.memory_mb, 64, 2**20, "MiB")
        check_range("files_mb", self.files_mb, 0, 2**20, "MiB")


def run_program(code: str, limits: Limits) -> bytes | None:
    """Runs `code` as a file in an empty folder that is removed afterwards, with an empty input and a bare environment.

    The program may write a report to the file descriptor `REPORT_FD`; the report begins with `REPORT_WORD`, a variable
    that is not known before. Both names stand in `code` as words to be replaced.

    Returns:
        what it reported, without the word; None if it reported nothing within the limits.

    Raises:
        UserError: no temporary folder can be made.
    """
    reader, writer = os.pipe()
    word = secrets.token_hex(16).encode()
    try:
        with tempfile.TemporaryDirectory(prefix="realhf-program-") as folder:
            program = Path(folder) / "program.py"
            program.write_text(code.replace("REPORT_WORD", word.decode()).replace("REPORT_FD", str(writer)))
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", confined.__file__, _request(folder, str(program), limits)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(writer,),
                start_new_session=True,
            )
            try:
                _wait(child, folder, limits)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            os.set_blocking(reader, False)
            report = os.read(reader, 4096) if select.select([reader], [], [], 0)[0] else b""
    except OSError as error:
        raise UserError(
            f"a program cannot be run in {tempfile.gettempdir()} ({error}); set TMPDIR to a folder of yours"
        ) from None
    finally:
        os.close(reader)
        os.close(writer)
    return report.removeprefix(word) if report.startswith(word) else None


def _request(folder: str, program: str, limits: Limits) -> str:
    """For `confined.main`."""
    seconds = math.ceil(limits.time_s) + 1
    size = limits.files_mb * _MIB
    return json.dumps(
        {
            "parent": os.getpid(),
            "folder": folder,
            "readable": sorted({sys.prefix, sys.base_prefix, *(p for p in sys.path if "site-packages" in p)}),
            "limits": {
                "CPU": seconds,
                "AS": limits.memory_mb * _MIB,
                "FSIZE": size,
                "NOFILE": _OPEN_FILES,
                "CORE": 0,
            },
            "command": [sys.executable, "-I", program],
            "environment": {
                "PATH": "/usr/bin:/bin",
                "HOME": folder,
                "TMPDIR": folder,
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        }
    )


def _wait(child: "subprocess.Popen[bytes]", folder: str, limits: Limits) -> None:
    """Until the program has ended or has to be ended."""
    deadline = time.monotonic() + limits.time_s
    own = _used_bytes(folder)  # the program itself
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(min(_LOOK_S, left_s))
            return
        if _used_bytes(folder) - own > limits.files_mb * _MIB:
            return


def _used_bytes(folder: str) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
