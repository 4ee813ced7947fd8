"""Commands of `realhf`, run as a user runs them, each case in a folder of its own; and what they leave.

Nothing of the package is imported: whatever moves inside it, the commands stay.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.golden.contents import compact, numbers_in
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
INPUTS = Path(__file__).parent / "inputs"
FOLDERS = {"experiments": ROOT / "experiments", "plans": ROOT / "tests" / "plans", "inputs": INPUTS}

# What would change an answer from one shell to the next.
LEFT_OUT = (
    "GLIBC_TUNABLES", "LD_PRELOAD", "COLUMNS", "XDG_DATA_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING", "NCCL_GRAPH_REGISTER", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
)  # fmt: skip
SET = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", "SLURM_CONF": "/no/cluster/here"}


def prepared(folder: Path, *, profiled: bool) -> Path:
    """`folder`, with links to what the cases read; `profiled`: with the recorded profiles of two workers."""
    folder.mkdir(parents=True)
    for name, target in FOLDERS.items():
        (folder / name).symlink_to(target)
    if profiled:
        shutil.copytree(INPUTS / "profiles", folder / "data" / "realhf" / "profiles")
    return folder


def realhf(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One command, run in `folder`."""
    env = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    env |= SET | {"XDG_DATA_HOME": str(folder / "data"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "realhf.cli", *shlex.split(words)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def carried_out(commands: Iterable[str], folder: Path) -> dict[str, Any]:
    """Runs commands one after the other in a prepared folder.

    Returns the exit code of each command with the tables that it printed, or the numbers of the error or the batch
    script; and the content of every JSON file in the folder.
    """
    printed = [_outcome(realhf(words, folder), folder) for words in commands]
    files = {path.name: compact(json.loads(path.read_bytes())) for path in sorted(folder.glob("*.json"))}
    return {"commands": printed, "files": files}


def _outcome(done: subprocess.CompletedProcess[str], folder: Path) -> dict[str, Any]:
    if done.returncode not in (0, 2):
        raise AssertionError(f"{done.args} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    if done.returncode:
        return {"exit": done.returncode, "error": numbers_in(anywhere(done.stderr, folder).splitlines()[-1])}
    if done.stdout.startswith("#!"):
        return {"exit": 0, "script": script_lines(anywhere(done.stdout, folder))}
    return {"exit": 0, "tables": table_rows(done.stdout)}


def anywhere(text: str, folder: Path) -> str:
    """Text without what is of this machine: the case's folder, the checkout, the interpreter, the built library."""
    for found, name in ((str(folder), "FOLDER"), (sys.executable, "PYTHON"), (str(ROOT), "CHECKOUT")):
        text = text.replace(found, name)
    return re.sub(r"LD_PRELOAD=\S+ ", "", text)


def script_lines(text: str) -> list[str]:
    """The lines of a batch script without comments, #SBATCH is none, and without the environment of who made it."""
    unwanted = r"\s*#(?!SBATCH|!)|export (?!REALHF_EXITS=)\w+="
    lines = (line for line in text.splitlines() if not re.match(unwanted, line))
    return [re.sub(r"\s+# .*", "", line) for line in lines if line.strip()]


def table_rows(text: str) -> list[list[float]]:
    """The numbers in the rows of all printed tables; a row begins with a space, prose does not. What stands above a
    rule are names of columns."""
    lines = text.splitlines()
    rows = (
        numbers_in(line)
        for line, below in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith(" ") and not below.startswith(" ─")
    )
    return [row for row in rows if row]
