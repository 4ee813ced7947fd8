"""Starting real runs from tests, and reading what they left."""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from realhf import cli
from realhf.architecture.model import DecoderConfig
from realhf.data.sort_task import SORT_MODEL
from realhf.engine.build import initial_value
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters
from realhf.models.checkpoint import CheckpointReader
from realhf.worker import rollouts
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class FinishedRun:
    """A run directory after a run that ended well."""

    path: Path

    @cached_property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def recorded(self, step: int, key: str, call: str = "actor_generate") -> dict[int, Tensor]:
        return rollouts.read(self.path / "rollouts", step, call, key)

    def parameters(self, model: str, config: DecoderConfig) -> Tensor:
        """All parameters at the end, in one float64 vector."""
        return self._read("latest", model, config)

    def parameters_at(self, step: int, model: str, config: DecoderConfig) -> Tensor:
        """As `parameters`, of the checkpoint after `step` steps."""
        return self._read(f"step-{step}", model, config)

    def _read(self, checkpoint: str, model: str, config: DecoderConfig) -> Tensor:
        reader = CheckpointReader(self.path / "checkpoints" / checkpoint / model)
        specs = decoder_parameters(config)
        boxes = [Box(spec.name, (0,) * len(spec.shape), spec.shape) for spec in specs]
        return torch.cat([reader.read(box).flatten().double() for box in boxes])


def initial_parameters(config: DecoderConfig, seed: int) -> Tensor:
    """The random weights from which a run of `seed` starts, as `FinishedRun.parameters` orders them."""
    return torch.cat([initial_value(spec, seed).flatten().double() for spec in decoder_parameters(config)])


ACTOR = SORT_MODEL
CRITIC = SORT_MODEL.with_head("scalar")
# The same layers and as many heads as four workers need, with little to compute.
SMALL_ACTOR = replace(SORT_MODEL, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=4)
SMALL_CRITIC = SMALL_ACTOR.with_head("scalar")
SMALL = ("--batch-size", "32", "--architecture.hidden-size", "32", "--architecture.intermediate-size", "48")
SMALL = (*SMALL, "--architecture.num-heads", "4", "--architecture.num-kv-heads", "4")


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "realhf.cli", *map(str, words)]


def realhf(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """One `realhf` command from the checkout's root, its output captured."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # for interfaces that import from tests
    return subprocess.run(command(*words), cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def realhf_here(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """As `realhf`, in this process: for commands that start no others, without the seconds that one takes to begin."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as ended:  # by the parser of options
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def finished(run_dir: Path, experiment: str | Path, *words: str | Path) -> FinishedRun:
    """Runs an experiment, a file or one of experiments/, to its end in `run_dir`; a bad end fails the test with what it
    printed."""
    done = realhf("run", experiment_file(experiment), "--run-dir", run_dir, *words)
    assert done.returncode == 0, done.stderr[-4000:]
    return FinishedRun(run_dir)


def experiment_file(experiment: str | Path) -> Path:
    """A file as it is; a name is one of experiments/."""
    return experiment if isinstance(experiment, Path) else Path(f"experiments/{experiment}.py")


def benchmark(name: str, *words: str | Path) -> str:
    """What `benchmarks/NAME.py` printed; its exit code is 0."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
