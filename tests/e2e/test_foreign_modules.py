"""Files that lie in the working directory or beside the experiment do not take the place of installed modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.waiting import PATIENCE_S

TRAPS = ("json", "msgspec", "numpy", "safetensors", "torch", "yaml", "zmq")
EXPERIMENT = f"""
from dataclasses import dataclass

from beside import TINY
from beside_interface import MySFT

from realhf.api.decorator import auto
from realhf.architecture.model import DecoderConfig
from realhf.rundir.run import load_experiment_class

@auto(batch_size=4)
@dataclass(frozen=True, kw_only=True)
class Mine(load_experiment_class({str(ROOT / "experiments/sft.py")!r})):
    architecture: DecoderConfig = TINY

    @property
    def rpcs(self):
        from dataclasses import replace
        return [replace(call, interface_impl=MySFT(**vars(call.interface_impl))) for call in super().rpcs]
"""
BESIDE = """
from dataclasses import replace
from realhf.data.sort_task import SORT_MODEL

TINY = replace(SORT_MODEL, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2)
"""
BESIDE_INTERFACE = """
from dataclasses import dataclass
from typing import ClassVar
from realhf.api import Update

@dataclass(frozen=True, kw_only=True)
class MySFT(Update):
    implementation: ClassVar[str] = "beside_implementation:MySFTInterface"
"""
BESIDE_IMPLEMENTATION = """
import msgspec, numpy, torch
from realhf.algorithms.script.update import UpdateInterface

class MySFTInterface(UpdateInterface):
    pass
"""


def lay_traps(folder: Path) -> None:
    for name in TRAPS:
        (folder / f"{name}.py").write_text("open(__file__ + '.was-run', 'w')\nraise SystemExit(99)\n")


@pytest.mark.distributed
def test_no_command_runs_what_lies_in_the_working_directory(tmp_path: Path) -> None:
    here, experiment = tmp_path / "here", tmp_path / "experiment"
    for folder in (here, experiment):
        folder.mkdir()
        lay_traps(folder)
    (experiment / "mine.py").write_text(EXPERIMENT)
    (experiment / "beside.py").write_text(BESIDE)
    (experiment / "beside_interface.py").write_text(BESIDE_INTERFACE)
    (experiment / "beside_implementation.py").write_text(BESIDE_IMPLEMENTATION)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)

    def realhf(*words: str) -> str:
        command = [str(Path(sys.executable).with_name("realhf")), *words]
        done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert not list(tmp_path.rglob("*.was-run")), f"{words}: {done.stderr[-2000:]}"
        assert done.returncode == 0, f"{words}: {done.stderr[-4000:]}"
        return done.stdout

    small = ("--num-workers", "1", "--evaluations", "100", "--no-evaluate")
    mine = str(experiment / "mine.py")
    assert "sft_train_step" in realhf("plan", mine, *small)
    realhf("run", mine, *small, "--batch-size", "4", "--steps", "1", "--run-dir", "run")
    assert "step 1 of 1" in realhf("status", "run")
    realhf("report", "run")
    realhf("convert", "run/checkpoints/latest/sft", "exported")
    assert (here / "exported/config.json").is_file()
