"""Real processes of a run whose launcher saw GPUs that are not there."""

from pathlib import Path

import pytest

from realhf.cli import main
from realhf.launch import devices
from tests.unit.machine.nvml import H100, stand_in, uuid_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.distributed


def test_workers_that_do_not_find_their_gpu_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They take no CPU in its place, where they would wait for each other."""
    stand_in(monkeypatch, tmp_path, [H100] * 2)
    monkeypatch.setattr(devices, "torch_cuda_version", lambda: "12.8")
    monkeypatch.chdir(ROOT)
    words = ["run", "experiments/sft.py", "--run-dir", str(tmp_path / "run"), "--num-workers", "2"]
    assert main([*words, "--data-dir", str(tmp_path / "data")]) == 1
    said = capsys.readouterr().err
    for part in (
        "this worker is to have a GPU of its own, CUDA_VISIBLE_DEVICES='GPU-",
        "sees 0; try `realhf doctor --gpu` on this machine, or set CUDA_VISIBLE_DEVICES= (to nothing)",
    ):
        assert part in said
    assert uuid_of(0) in said or uuid_of(1) in said
