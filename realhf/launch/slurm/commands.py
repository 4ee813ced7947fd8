"""SLURM's commands, run with a deadline and without variables of the environment that would change their meaning."""

import os
import shutil
import subprocess

from realhf.base.errors import UserError

TIMEOUT_S = 60.0


def slurm_command(*command: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Runs a SLURM command, with a deadline. Raises UserError where there is no such command."""
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} was not found: is this a machine of a SLURM cluster? else use --launcher local")
    try:
        return subprocess.run(
            command, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {timeout_s:g} s")


def output_of(ended: subprocess.CompletedProcess[str]) -> str:
    """The output of a command, in one line."""
    return " ".join((ended.stderr.strip() or ended.stdout.strip()).split())


def _environment() -> dict[str, str]:
    """Without the variables of an enclosing job, which would mean that job, and without defaults for sbatch, which
    would override the lines of the batch script; the script has the defaults that count (`defaults.py`)."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SRUN_", "SBATCH_"))}
    env["SLURM_BITSTR_LEN"] = "0"  # the tasks of an array are shown in full
    if "SLURM_CONF" in os.environ:
        env["SLURM_CONF"] = os.environ["SLURM_CONF"]
    return env
