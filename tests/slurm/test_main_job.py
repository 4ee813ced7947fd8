"""PPO under a real SLURM of two virtual nodes: the local launcher's results, and clean ends."""

import json
import re
from pathlib import Path

import pytest
from testbed.cluster import Testbed

from tests.e2e.runs import FinishedRun, finished, realhf

PLAN = "tests/plans/generate_dp4_train_tp2_pp2.json"
SMALL = ("--steps", "2", "--seed", "7", "--no-evaluate", "--dtype", "float64", "--batch-size", "32", "--plan", PLAN)
ON_GPUS = ("--launcher", "slurm", "--nodes", "2", "--gpus-per-node", "2", "--network-interface", "lo")
SLURM = (*ON_GPUS, "--cpu-only")

RAISES = """
from dataclasses import dataclass
from typing import ClassVar

from realhf.api.decorator import auto
from realhf.dataflow.graph import GENERATE, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset


@dataclass(frozen=True, kw_only=True)
class Stumbles(InterfaceConfig):
    implementation: ClassVar[str] = "stumbles:StumblesInterface"
    max_new_tokens: int = 2


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class Experiment:
    seed: int = 0
    steps: int = 1
    data_dir: str = ""

    @property
    def rpcs(self):
        return [
            ModelFunctionCallDef(
                model_name="actor",
                model_type=sort_task.SORT_MODEL,
                interface_type=GENERATE,
                interface_impl=Stumbles(),
                input_data=["prompt"],
                output_data=["seq"],
            )
        ]

    @property
    def dataset(self):
        data = sort_task.ensure(self.data_dir)
        return PromptDataset(path=f"{data}/prompts.jsonl", tokenizer=f"{data}/tokenizer.json", max_prompt_tokens=9)
"""
STUMBLES = """
class StumblesInterface:
    def __init__(self, config):
        pass

    def generate(self, model, batch, context):
        raise ArithmeticError("the interface stumbled")
"""


def queue(cluster: Testbed) -> str:
    return cluster.run("squeue", "-h").stdout


@pytest.mark.slurm
def test_slurm_gives_the_local_launchers_metrics(slurm_testbed: Testbed, tmp_path: Path) -> None:
    local = finished(tmp_path / "local", "ppo", *SMALL)
    done = realhf("run", "experiments/ppo.py", "--run-dir", tmp_path / "slurm", *SLURM, *SMALL)
    assert done.returncode == 0, done.stderr[-4000:]
    expected, got = local.metrics, FinishedRun(tmp_path / "slurm").metrics
    assert len(got) == 2
    for ours, theirs in zip(got, expected, strict=True):
        measured = {"time_s", "tokens_per_s", "calls", "peak_bytes"}
        assert {k: v for k, v in ours.items() if k not in measured} == {
            k: v for k, v in theirs.items() if k not in measured
        }
    assert queue(slurm_testbed) == ""


@pytest.mark.slurm
@pytest.mark.slow
def test_workers_that_torch_shows_no_gpu_say_so(slurm_testbed: Testbed, tmp_path: Path) -> None:
    """Those that SLURM gives them here are none that CUDA knows."""
    words = ("run", "experiments/ppo.py", "--run-dir", tmp_path / "run", *ON_GPUS, "--hardware", "h100", *SMALL)
    done = realhf(*words)
    assert done.returncode == 1, done.stderr[-4000:]
    assert re.search(r"a GPU of its own, CUDA_VISIBLE_DEVICES='[01]', and torch .* sees 0; .* --cpu-only", done.stderr)
    assert queue(slurm_testbed) == ""


@pytest.mark.slurm
def test_a_failing_task_ends_the_job_with_its_message(slurm_testbed: Testbed, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(RAISES)
    (tmp_path / "stumbles.py").write_text(STUMBLES)
    run_dir = tmp_path / "run"
    words = ("run", tmp_path / "failing.py", "--run-dir", run_dir, "--data-dir", tmp_path / "data")
    done = realhf(*words, *SLURM)
    assert done.returncode == 1, done.stderr[-4000:]
    assert "ArithmeticError: the interface stumbled" in done.stderr
    assert "actor_generate of step 1" in done.stderr
    assert "worker-" in done.stderr
    assert json.loads((run_dir / "status.json").read_text())["state"] == "failed"
    assert queue(slurm_testbed) == ""
