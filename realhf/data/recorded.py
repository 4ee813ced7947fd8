"""Reads the samples that a run recorded: rollouts/step-N/CALL-RANK.safetensors. No torch here."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

from realhf.base.errors import UserError


@dataclass(frozen=True)
class Recorded:
    """The value of a key of one sample, and the file it is in."""

    path: Path
    value: np.ndarray


def read_recorded(folder: Path, step: int, call: str, key: str) -> dict[int, Recorded]:
    """All samples of a key that a run recorded for a call, by id.

    Raises:
        UserError: nothing was recorded there, or a file cannot be read.
    """
    found: dict[int, Recorded] = {}
    for path in sorted(step_folder(folder, step).glob(f"{call}-*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                found |= {
                    int(name.rpartition("/")[2]): Recorded(path, file.get_tensor(name))
                    for name in file.keys()  # noqa: SIM118 (not a mapping)
                    if name.rpartition("/")[0] == key
                }
        except Exception as error:  # the library raises exceptions of its own, and what NumPy raises
            raise UserError(f"{path}: no file of recorded rollouts ({error}); record them again") from None
    if not found:
        raise UserError(
            f"{folder}: no {key!r} of {call}, step {step + 1}; record one with `realhf run ... --record {key}` "
            "and give RUN_DIR/rollouts"
        )
    return found


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step; its name counts from 1."""
    return folder / f"step-{step + 1}"
