"""Recorded data of a run's steps, for looking at and for replaying: rollouts/step-N/CALL-RANK.safetensors."""

from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from realhf.api.errors import UserError


def record(folder: Path, step: int, call: str, rank: int, columns: dict[str, list[Tensor]], ids: Sequence[int]) -> None:
    """Writes one rank's outputs of a call, each sample's tensor under the name `key/id`."""
    directory = _step_folder(folder, step)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{key}/{sample}": value.contiguous()
        for key, values in columns.items()
        for sample, value in zip(ids, values, strict=True)
    }
    part = directory / f".{call}-{rank}.part"
    save_file(tensors, part)
    part.replace(directory / f"{call}-{rank}.safetensors")


def read(folder: Path, step: int, call: str, key: str) -> dict[int, Tensor]:
    """All samples of a key that a run recorded for a call, by id.

    Raises:
        UserError: nothing was recorded there.
    """
    found: dict[int, Tensor] = {}
    for path in sorted(_step_folder(folder, step).glob(f"{call}-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {
                int(name.rpartition("/")[2]): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 (not a mapping)
                if name.rpartition("/")[0] == key
            }
    if not found:
        raise UserError(
            f"{folder}: no {key!r} of {call}, step {step + 1}; record one with `realhf run ... --record {key}` "
            "and give RUN_DIR/rollouts"
        )
    return found


def _step_folder(folder: Path, step: int) -> Path:
    """Named as people count: from 1."""
    return folder / f"step-{step + 1}"
