"""Samples that a run recorded, from the files of all ranks."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from realhf.base.errors import UserError
from realhf.data.recorded import read_recorded, step_folder


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    """Two ranks of a call, another call of a like name, another step."""
    files = {
        "step-3/actor-0": {"seq/0": [1, 2], "seq/10": [3], "seq/mask/4": [9], "logprobs/0": [8]},
        "step-3/actor-1": {"seq/1": [4, 5, 6]},
        "step-3/actor_2-0": {"seq/2": [7]},
        "step-4/actor-0": {"seq/3": [7]},
    }
    for name, samples in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file({key: np.array(values) for key, values in samples.items()}, tmp_path / f"{name}.safetensors")
    return tmp_path


def test_samples_of_all_ranks_by_id(rollouts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_folder(rollouts, 2) == rollouts / "step-3"
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(sorted(glob(self, pattern), reverse=True)))
    found = read_recorded(rollouts, 2, "actor", "seq")
    assert list(found) == [0, 10, 1], "rank by rank, whatever order the disk has"
    assert {sample: (one.path.name, one.value.tolist()) for sample, one in found.items()} == {
        0: ("actor-0.safetensors", [1, 2]),
        10: ("actor-0.safetensors", [3]),
        1: ("actor-1.safetensors", [4, 5, 6]),
    }
    assert {sample: one.value.tolist() for sample, one in read_recorded(rollouts, 2, "actor", "seq/mask").items()} == {
        4: [9]
    }


@pytest.mark.parametrize(("step", "call", "key"), [(2, "actor", "values"), (2, "critic", "seq"), (6, "actor", "seq")])
def test_nothing_recorded(step: int, call: str, key: str, rollouts: Path) -> None:
    message = (
        f"{rollouts}: no {key!r} of {call}, step {step + 1}; record one with `realhf run ... --record {key}` and give "
        "RUN_DIR/rollouts"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        read_recorded(rollouts, step, call, key)
