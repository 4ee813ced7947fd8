"""The variables that a job takes from the environment of its submission. The batch script writes them all down."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realhf.launch.slurm.script import SlurmOptions

# Defaults of sbatch that users and centres may set for a run. Its other options are the launcher's.
_OF_OPTIONS = {"SBATCH_PARTITION": "partition", "SBATCH_ACCOUNT": "account", "SBATCH_TIMELIMIT": "time_limit"}
_OF_SBATCH = {
    "SBATCH_QOS": "--qos",
    "SBATCH_CONSTRAINT": "--constraint",
    "SBATCH_RESERVATION": "--reservation",
    "SBATCH_WCKEY": "--wckey",
}
# The variables that the processes of a run need where `--export=NONE` is the rule. No variable that may hold a secret:
# the script is a file.
_NEEDED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|HOME|USER|LOGNAME|LANG|LC_ALL|XDG_\w+_HOME|TRACKIO_DIR"
    r"|(REALHF|HF|TORCH|NCCL|GLOO|UCX|CUDA|OMP)_\w+"
)
_NOT_KEPT = re.compile(
    r"REALHF_(WORKER_INDEX|DEVICE|EXITS|LOGS|STOP|LAUNCH_ID)|CUDA_VISIBLE_DEVICES"
    r"|(?i:.*(TOKEN|SECRET|PASSW|PASSPHRASE|KEY|CREDENTIAL|AUTH).*|.*_PASS|.*_PW)"
)
# An address with a user and a password, such as HF_ENDPOINT may have.
_SECRET_VALUE = re.compile(r"://[^/\s]*@")


def with_environment(options: SlurmOptions, environment: Mapping[str, str]) -> SlurmOptions:
    """The options with the defaults that the environment has for sbatch, and with the variables that tasks need."""
    defaults: dict[str, Any] = {
        name: environment[variable]
        for variable, name in _OF_OPTIONS.items()
        if environment.get(variable) and getattr(options, name) is None
    }
    words = tuple(
        f"{name}={environment[variable]}" for variable, name in _OF_SBATCH.items() if environment.get(variable)
    )
    needed = {
        name: value
        for name, value in environment.items()
        if _NEEDED.fullmatch(name) and not _NOT_KEPT.fullmatch(name) and not _SECRET_VALUE.search(value)
    }
    # The values that the user gives come last, and count.
    return replace(options, **defaults, sbatch=words + options.sbatch, environment=tuple(sorted(needed.items())))
