"""A sandbox from inside: the process of the program and that of the tests."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.rewards import confined, program, sandbox_process, tests_of_program
from realhf.rewards.wire import WireError

# --- its two processes


class LeftError(BaseException):
    """Instead of the end of a process."""


class Stage:
    """What the entry of a sandbox does, in one process: `is_child` says which of the two it becomes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, is_child: bool, own_files: bool = False):
        self.calls: list[Any] = []
        self.has_namespaces, self.outcomes = True, ["", "x"]
        calls = self.calls
        request = {
            "parent": 33,
            "folder": str(folder),
            "program": "p = '\ud800'",
            "own_files": own_files,
            "files_bytes": 1000,
            "entries": 5,
            "readable": ["/opt"],
            "limits": {"CPU": 3},
        }
        (folder.parent / "request").write_text(json.dumps(request))
        (folder.parent / "tests").write_text(json.dumps(["a", "b"]))
        self.files = [
            os.open(folder.parent / "request", os.O_RDONLY),
            os.open(folder.parent / "tests", os.O_RDONLY),
            os.open(folder.parent / "outcomes", os.O_RDWR | os.O_CREAT),
        ]
        pipes = [(1000, 1001), (1002, 1003)]

        def mount(*words: Any) -> None:
            calls.append(("mount", *words))
            if not self.has_namespaces:
                raise confined.NoNamespaceError

        def leave(code: int) -> None:
            calls.append(("exit", code))
            raise LeftError

        def serve(*words: Any) -> None:
            calls.append(("serve", *words))
            raise WireError("ended")

        def outcomes(tests: list[str], *pipes: int) -> Any:
            calls.append(("tests", tests, *pipes))
            if self.outcomes == ["broken"]:
                raise WireError("broken")
            return self.outcomes

        def note(what: str) -> Callable[..., None]:
            return lambda *words, **more: calls.append((what, *words, *more.items()))

        monkeypatch.setattr(confined, "end_with", note("end with"))
        monkeypatch.setattr(confined, "mount_own_files", mount)
        monkeypatch.setattr(confined, "confine", note("confine"))
        monkeypatch.setattr(program, "serve_program", serve)
        monkeypatch.setattr(tests_of_program, "outcomes", outcomes)
        monkeypatch.setattr(sandbox_process, "_close_all_but", note("close all but"))
        monkeypatch.setattr(os, "pipe", lambda: pipes.pop(0))
        monkeypatch.setattr(os, "fork", lambda: 0 if is_child else 5)
        monkeypatch.setattr(os, "chdir", note("chdir"))
        monkeypatch.setattr(os, "close", note("close"))
        monkeypatch.setattr(os, "_exit", leave)
        monkeypatch.setattr(sandbox_process, "_FILE", str(folder / "program.py"))

    def run(self) -> list[Any]:
        with pytest.raises(LeftError):
            sandbox_process.main(*self.files)
        return self.calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


def test_the_process_of_a_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has closed everything but its pipes, and is confined, before it reads the program."""
    calls = Stage(monkeypatch, folder, is_child=True).run()
    file = str(folder / "program.py")
    assert calls == [
        ("end with", 33),
        ("chdir", str(folder)),
        ("close all but", 1000, 1003),
        ("end with", os.getpid()),
        ("confine", str(folder), ["/opt"], {"CPU": 3}),
        ("serve", 1000, 1003, file),
        ("exit", 0),
    ]
    assert Path(file).read_bytes() == b"p = '\xed\xa0\x80'"


@pytest.mark.parametrize("outcomes", [["", "x"], None])
def test_the_process_of_the_tests(outcomes: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, folder, is_child=False)
    stage.outcomes = outcomes
    assert stage.run() == [
        ("end with", 33),
        ("chdir", str(folder)),
        ("close", 1000),
        ("close", 1003),
        ("confine", str(folder), ["/opt"], {"CPU": 3}, ("has_child", True)),
        ("tests", ["a", "b"], 1002, 1001),
        ("exit", 0),
    ]
    assert json.loads((folder.parent / "outcomes").read_text()) == outcomes


def test_a_program_that_ends_in_its_tests_has_no_outcomes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, folder, is_child=False)
    stage.outcomes = ["broken"]
    assert stage.run()[-1] == ("exit", 1)
    assert (folder.parent / "outcomes").read_text() == ""


def test_a_sandbox_in_a_file_system_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Stage(monkeypatch, folder, is_child=False, own_files=True).run()
    assert calls[:4] == [
        ("end with", 33),
        ("mount", str(folder), 1000, 5),
        ("end with", 33),  # a new namespace has undone it
        ("chdir", str(folder)),
    ]


def test_a_sandbox_that_is_not_granted_its_file_system_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, folder, is_child=False, own_files=True)
    stage.has_namespaces = False
    assert stage.run() == [("end with", 33), ("mount", str(folder), 1000, 5), ("exit", 65)]


def test_all_descriptors_are_closed_but_those_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "closerange", lambda *words: ranges.append(words))
    monkeypatch.setattr(os, "sysconf", lambda name: 1024 if name == "SC_OPEN_MAX" else None)
    sandbox_process._close_all_but(9, 5)
    assert ranges == [(3, 5), (6, 9), (10, 1024)]
