"""The worked examples of scripts/slurm do what they say."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_job_of_ppo_sh_is_as_its_words_say(tmp_path: Path) -> None:
    realhf = tmp_path / "realhf"
    realhf.write_text(f'#!/bin/bash\nexec {sys.executable} -m realhf.cli "$@"\n')
    realhf.chmod(0o755)
    script = ROOT / "scripts/slurm/ppo.sh"
    env = {**os.environ, "REALHF": str(realhf), "OMP_NUM_THREADS": "1"}
    words = (str(script), "--dry-run", "--rule", "heuristic")
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in ("partition=gpu", "account=lab", "time=1-00:00:00", "nodes=2", "gres=gpu:h100:8", "mem=800G"):
        assert f"#SBATCH --{line}" in lines
    assert "#SBATCH --ntasks-per-node=97" in lines
    assert "{ module load cuda/12.4" in lines


def test_ppo_sbatch_takes_a_run_directory_for_each_task(tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    realhf = tmp_path / ".venv/bin/realhf"
    realhf.write_text('#!/bin/bash\necho "$@"\n')
    realhf.chmod(0o755)
    bash = shutil.which("bash")
    assert bash
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17"}  # as of a job with --export=NONE
    words = (bash, str(ROOT / "scripts/slurm/ppo.sbatch"), "--steps", "3")
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "run experiments/ppo.py --run-dir runs/ppo-17 --steps 3\n"
