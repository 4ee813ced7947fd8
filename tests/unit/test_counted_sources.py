"""What the scripts that count lines of code and words count, on a small checkout."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PYTHON = '''"""The one of three lines.

size: of a file
"""

import os  # nobody


class A:
    """Sums what is left. Of a file
    it reads a line."""

    # What follows is one comment
    # of two lines.
    text = "three words here: what was read" + """
        so many words
    """
    path = f"of {os.sep} which is a path"
'''
CPP = """// Of a header.
#include <string>

/* so many
   lines */
int f() {
    return 1;  // of which
}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "realhf/base").mkdir(parents=True)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "realhf/base/a.py").write_text(PYTHON)
    (tmp_path / "csrc/a.cpp").write_text(CPP)
    return tmp_path


def run(script: str, *words: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, SCRIPTS / script, *words], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_lines_of_code(checkout: Path) -> None:
    """Neither blank lines, comments nor docstrings; directives and the lines of other strings are code."""
    code, lines = run("count_lines.py", str(checkout))
    assert (code, [line.split() for line in lines]) == (
        0, [["4", "csrc"], ["6", "realhf/base"], ["10", "together"]]
    )  # fmt: skip


def test_hits_by_file(checkout: Path) -> None:
    code, lines = run("check_words.py", str(checkout), "--show", "")
    assert code == 1
    shown = [line.replace(f"{checkout}/", "") for line in lines if re.match(r"\S+:\d+: ", line)]
    assert shown == [
        "realhf/base/a.py:1: The one of three lines.",
        "realhf/base/a.py:1: of a file",
        "realhf/base/a.py:10: Sums what is left.",
        "realhf/base/a.py:10: Of a file it reads a line.",
        "realhf/base/a.py:18: of X which is a path",
        "realhf/base/a.py:15: so many words",
        "realhf/base/a.py:6: nobody",
        "realhf/base/a.py:13: What follows is one comment of two lines.",
        "csrc/a.cpp:1: Of a header.",
        "csrc/a.cpp:4: so many lines",
        "csrc/a.cpp:7: of which",
    ]
