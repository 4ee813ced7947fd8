"""Recorded data of a run's steps, for looking at and for replaying: rollouts/step-N/CALL-RANK.safetensors."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from realhf.data.recorded import read_recorded, step_folder


def record(folder: Path, step: int, call: str, rank: int, columns: dict[str, list[Tensor]], ids: Sequence[int]) -> None:
    """Writes one rank's outputs of a call, each sample's tensor under the name `key/id`."""
    directory = step_folder(folder, step)
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
    """See `read_recorded`."""
    return {i: torch.from_numpy(sample.value) for i, sample in read_recorded(folder, step, call, key).items()}
