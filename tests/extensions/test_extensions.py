"""What it takes to extend the system: each patch of this folder adds one thing, in few files, and then it is there.

A patch whose context has changed is made anew: `git diff -U1 realhf > tests/extensions/NAME.patch`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PPO = str(ROOT / "experiments/ppo.py")
MOST_FILES = {"option_of_run": 2, "rule_of_layouts": 3, "kind_of_call": 2}

SCRIPT = """
from realhf.api import GenerationOptions, Policy, Prompts, auto, loss_function, tensor_function


@tensor_function
def surprise(rollout, entropies):
    return {"advantage": [values - values.mean() for values in entropies.entropy]}


@loss_function
def reinforce(logprob, batch):
    return -batch.packed("advantage").values * logprob


@auto(batch_size=8, steps=1)
def surprised(prompts: Prompts, actor: Policy) -> None:
    rollout = actor.generate(prompts, GenerationOptions(max_new_tokens=4))
    actor.update(surprise(rollout, actor.entropies(rollout)), reinforce)
"""


class Tree:
    """A copy of the package in a folder of its own, with a patch of this one. Commands run in that folder."""

    def __init__(self, folder: Path, patch: str):
        self.folder = folder
        shutil.copytree(ROOT / "realhf", folder / "realhf")
        subprocess.run(["git", "apply", str(HERE / f"{patch}.patch")], cwd=folder, check=True, timeout=PATIENCE_S)

    def python(self, *words: str, code: int = 0) -> str:
        """The output of Python with these words, and behind it the errors."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "120"}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def realhf(self, *words: str, code: int = 0) -> str:
        return self.python("-m", "realhf.cli", *words, code=code)


@pytest.mark.parametrize("patch", MOST_FILES)
def test_a_patch_changes_few_files(patch: str) -> None:
    changed = re.findall(r"^\+\+\+ b/(realhf|csrc)/", (HERE / f"{patch}.patch").read_text(), re.MULTILINE)
    assert 1 <= len(changed) <= MOST_FILES[patch]
    assert {f"{one}.patch" for one in MOST_FILES} == {path.name for path in HERE.glob("*.patch")}


def test_an_option_of_run(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "option_of_run")
    assert re.search(r"--job-name NAME +name of the run's jobs", tree.realhf("run", "--help-all"))
    plan = str(ROOT / "tests/plans/single.json")
    words = ["run", PPO, "--plan", plan, "--launcher", "slurm", "--cpu-only", "--dry-run"]
    assert "#SBATCH --job-name=realhf-ppo\n" in tree.realhf(*words)
    assert "#SBATCH --job-name=mine\n" in tree.realhf(*words, "--job-name", "mine")


def test_a_rule_that_forbids_a_layout(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "rule_of_layouts")
    text = tree.realhf("plan", PPO, "--plan", str(ROOT / "tests/plans/pp4.json"), code=2)
    assert "pp=4 has stages of one layer" in text
    found = tree.python(
        "-c",
        "from realhf.data.sort_task import SORT_MODEL; from realhf.planning.options import legal_strategies; "
        "print([one.pp for one in legal_strategies(SORT_MODEL, 4)])",
    )
    assert set(json.loads(found)) == {1, 2}, "a search takes none either"


def test_a_kind_of_call(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "kind_of_call")
    (tmp_path / "surprised.py").write_text(SCRIPT)
    tree.python("-m", "realhf.data.sort_task", "sorting")
    data = ["--data", "sorting/prompts.jsonl", "--tokenizer", "sorting"]
    tree.realhf("run", "surprised.py", *data, "--num-workers", "1", "--run-dir", "run", "--record", "entropy")
    (metrics,) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert {"actor_generate", "actor_inference", "actor_train_step"} == {*metrics["calls"]}
    recorded = load_file(tmp_path / "run/rollouts/step-1/actor_inference-0.safetensors")
    assert {*recorded} == {f"entropy/{sample}" for sample in range(8)}
    assert all((values > 0).all() for values in recorded.values())
