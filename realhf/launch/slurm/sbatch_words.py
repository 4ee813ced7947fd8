"""Which further options of sbatch a run may have."""

from realhf.base.errors import UserError

# Options of sbatch with which the job would not be the one that the launcher watches, and their replacements.
_TAKEN = {
    **dict.fromkeys(("--array", "-a"), "a run is one job; give --seeds or --sweep for several runs as an array"),
    **dict.fromkeys(("--clusters", "-M"), "submit on a login node of that cluster"),
    **dict.fromkeys(("--wait", "-W", "--wrap", "--test-only"), "leave it out"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "give --cpus-per-worker"),
    **dict.fromkeys(("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node"), "give --nodes and --gpus-per-node"),
    **dict.fromkeys(
        ("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task"), "give --gpus-per-node and --gpu-type"
    ),
    **dict.fromkeys(("--output", "-o", "--error", "-e"), "it is launcher/slurm.log in the run directory"),
}
_LEAST_ABBREVIATION = len("--arr")


def check_sbatch_words(value: str) -> None:
    """Raises UserError for words that are no options of sbatch, or ones that the launcher gives itself."""
    if not value.startswith("-") or "\n" in value:
        raise UserError(f"{value!r} is no sbatch option; write one as --name=value")
    for word in value.split():
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        full = name
        if name not in _TAKEN and len(name) >= _LEAST_ABBREVIATION:  # sbatch takes the beginning of a name for it
            full = next((taken for taken in _TAKEN if taken.startswith(name)), name)
        if full in _TAKEN:
            raise UserError(f"--sbatch {value}: {full} is not for a run: {_TAKEN[full]}")
