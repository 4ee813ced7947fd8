"""How Python processes and SLURM's commands are started."""

import ast
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.launch.slurm.commands import output_of, slurm_command
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


def test_the_working_directory_is_not_searched_for_modules(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the working directory was run')")
    command = python_command("realhf.data.sort_task", "--help")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_command_lines_are_made_in_one_place() -> None:
    made_in = [
        str(path.relative_to(ROOT))
        for folder in ("realhf", "scripts", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if any(isinstance(node, ast.Constant) and node.value == "-m" for node in ast.walk(ast.parse(path.read_text())))
    ]
    assert made_in == ["realhf/base/code_files.py"]


def test_a_slurm_command_is_told_nothing_behind_our_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither by the job that it is called in, nor by defaults for sbatch, nor by the terminal."""
    (tmp_path / "squeue").write_text(
        '#!/bin/bash\necho "$@"; /usr/bin/env | /usr/bin/sort; /bin/cat; echo no >&2; exit 3\n'
    )
    (tmp_path / "squeue").chmod(0o755)
    for name in list(os.environ):
        monkeypatch.delenv(name)
    own = {"PATH": str(tmp_path), "MY_SLURM_": "kept", "SLURM_CONF": "/etc/slurm.conf"}
    for name, value in {**own, "SLURM_JOB_ID": "1", "SRUN_CPUS": "2", "SBATCH_QOS": "high"}.items():
        monkeypatch.setenv(name, value)
    done = slurm_command("squeue", "--me", "a b")
    assert (done.returncode, done.stderr) == (3, "no\n")
    words, *lines = done.stdout.splitlines()
    assert words == "--me a b"
    assert dict(line.split("=", 1) for line in lines if not line.startswith(("PWD", "SHLVL", "_="))) == {
        **own, "SLURM_BITSTR_LEN": "0"
    }  # fmt: skip
    monkeypatch.delenv("SLURM_CONF")
    assert "SLURM_CONF" not in slurm_command("squeue").stdout
    with pytest.raises(UserError, match=r"^sbatch was not found: is this a machine of a SLURM cluster\? else use"):
        slurm_command("sbatch")


def test_a_slurm_command_that_does_not_answer_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines_s: list[float] = []

    def run(command: tuple[str, ...], *, timeout: float, stdin: int, **_: Any) -> None:
        assert stdin == subprocess.DEVNULL
        deadlines_s.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    done = slurm_command("true", timeout_s=2.5)
    assert (done.args, done.returncode, done.stdout, done.stderr) == (("true",), 1, "", "no answer within 2.5 s")
    slurm_command("true")
    assert deadlines_s == [2.5, 60]


@pytest.mark.parametrize(
    ("stdout", "stderr", "said"), [(" a\n  b ", " \n", "a b"), ("a", "c\n\nd\n", "c d"), ("", "", "")]
)
def test_what_a_command_has_said_is_one_line(stdout: str, stderr: str, said: str) -> None:
    assert output_of(subprocess.CompletedProcess((), 0, stdout, stderr)) == said
