"""Few levels lie between the command line and the C++ solver."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import realhf
from realhf.cli import main
from realhf.planning import search
from realhf.planning.problem.native import native_problem

MOST_FRAMES = 8
PACKAGE = str(Path(realhf.__file__).parent)


def own_functions(frame: FrameType | None) -> list[str]:
    """The package's functions on a stack, the innermost first."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return found


class Watched:
    """A problem of the C++ solver that notes who calls its `solve`, with the functions that wait for its thread."""

    def __init__(self, tables: Any):
        self._native = native_problem(tables)
        self.callers: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def solve(self, **options: Any) -> Any:
        self.callers = own_functions(sys._getframe(1))
        if threading.current_thread() is not threading.main_thread():
            ident = threading.main_thread().ident
            assert ident is not None
            self.callers += own_functions(sys._current_frames()[ident])
        return self._native.solve(**options)


def test_from_the_command_to_the_solver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems: list[Watched] = []

    def watched(tables: Any) -> Watched:
        problems.append(Watched(tables))
        return problems[-1]

    monkeypatch.setattr(search, "native_problem", watched)
    words = ("run", "experiments/sft.py", "--num-workers", "2", "--evaluations", "50", "--dry-run")
    assert main([*words, "--run-dir", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("master: ")
    [problem] = problems
    assert problem.callers[-1] == "main"
    assert "new_run" in problem.callers
    assert len(problem.callers) <= MOST_FRAMES, problem.callers
