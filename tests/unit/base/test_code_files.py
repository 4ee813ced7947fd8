"""Files of Python code that a user names."""

import os
import sys
from pathlib import Path

import pytest

from realhf.base.code_files import load_code_file


def test_code_is_that_of_the_file_however_soon_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for number in (1, 2):  # of one size, in one second
        file.write_text(f"nodes = {number}\n")
        os.utime(file, (1e9, 1e9))
        assert load_code_file(file).nodes == number
    assert list(tmp_path.iterdir()) == [file]
