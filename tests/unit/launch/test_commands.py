"""How Python processes are started."""

import ast
import subprocess
from pathlib import Path

from realhf.base.code_files import python_command
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
