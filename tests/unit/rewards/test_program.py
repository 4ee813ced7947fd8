"""The side of a program: it is loaded as a main module, its objects are used, and what it prints and reads."""

import builtins
import io
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realhf.rewards import program as module
from realhf.rewards.program import _Asked, _Printed, _ProgramPeer, serve_program
from realhf.rewards.wire import WireError
from tests.unit.rewards.sides import Side, values

PROGRAM = """
from sys import modules
size = 3
name, file, own = __name__, __file__, modules["__main__"]
class Box:
    size = 4
    def __len__(self): return self.size
    def __call__(self, *args, **kwargs): return [*args, kwargs]
class Small(Box): pass
class Text(str): pass
box = Small()
text = Text("abc")
async def later(): return 7
"""


@pytest.fixture
def side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    made = Side(lambda reader, writer: _ProgramPeer(reader, writer, str(file)))
    yield made
    made.close()


def test_a_program_is_the_main_module(side: Side, tmp_path: Path) -> None:
    assert side.peer.perform("load", None, (), {}) is None
    names = {name: side.peer.perform("name", name, (), {}) for name in ("name", "file", "own", "size")}
    main = sys.modules["__main__"]
    assert isinstance(main, types.ModuleType)
    assert names == {"name": "__main__", "file": str(tmp_path / "program.py"), "own": main, "size": 3}
    with pytest.raises(KeyError):
        side.peer.perform("name", "nothing", (), {})
    del main.size  # type: ignore[attr-defined]
    with pytest.raises(KeyError):  # the names are the module's
        side.peer.perform("name", "size", (), {})


def test_an_error_of_a_program_names_its_file(side: Side, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("\n1 / 0")
    with pytest.raises(ZeroDivisionError) as caught:
        side.peer.perform("load", None, (), {})
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno) == (tmp_path / "program.py", 1)


def test_what_tests_may_do_with_a_program_s_objects(side: Side) -> None:
    perform = side.peer.perform
    perform("load", None, (), {})

    def number(name: str) -> int:
        return int(side.peer.export(perform("name", name, (), {}))[1])

    box = perform("name", "box", (), {})
    assert perform("special", number("box"), ("__len__",), {}) == 4
    assert perform("special", number("box"), ("__call__", 1, 2), {"a": 3}) == [1, 2, {"a": 3}]
    assert perform("get", number("box"), ("size",), {}) == 4
    perform("set", number("box"), ("size", 5), {})
    assert box.size == 5
    perform("delete", number("box"), ("size",), {})
    assert box.size == 4
    data = perform("data", number("text"), ("str",), {})
    assert (type(data), data) == (str, "abc")
    assert perform("isinstance", number("Box"), (box,), {}) is True
    assert perform("isinstance", number("Box"), (3,), {}) is False
    assert perform("issubclass", number("Box"), (type(box),), {}) is True
    assert perform("issubclass", number("Box"), (int,), {}) is False
    later = perform("name", "later", (), {})()
    assert perform("await", side.peer.export(later)[1], (), {}) == 7
    with pytest.raises(LookupError, match=r"^erase$"):
        perform("erase", number("box"), (), {})


def test_what_a_program_has_printed_goes_with_its_answers(side: Side) -> None:
    side.peer.printed.write(b"one\n")
    side.give(["value", [1, []]], ["value", [2, []]])
    assert side.peer.ask("readline", None) == 1
    assert side.peer.ask("readline", None) == 2
    question = ["ask", "readline", None, values()]
    assert side.said() == [[*question, "one\n"], [*question, ""]]


def test_so_much_is_printed_and_no_more() -> None:
    printed = _Printed()
    assert printed.writable()
    assert printed.write(b"a\xff") == 2
    assert printed.take() == "a\ufffd"
    assert printed.take() == ""
    most = 2**20
    assert printed.write(b"b" * (most - 3)) == most - 3
    assert printed.write(b"12345") == 5
    assert printed.write(b"67") == 2
    assert printed.take() == "b" * (most - 3) + "123"
    assert printed.write(b"c") == 1
    assert printed.take() == "c"


class Asking:
    """Has lines to be asked for."""

    def __init__(self, *lines: str):
        self.lines = list(lines)

    def ask(self, what: str, subject: Any, *args: Any) -> Any:
        if what == "input":
            return f"{args[0]}answered"
        assert (what, subject, args) == ("readline", None, ())
        return self.lines.pop(0) if self.lines else ""


def test_the_input_is_asked_for_line_by_line() -> None:
    asking = Asking("one\n", "", "not read")
    asked = _Asked(asking)  # type: ignore[arg-type]
    assert asked.readable()
    buffer = bytearray(b"......")
    assert asked.readinto(memoryview(buffer)[:3]) == 3
    assert buffer == b"one..."
    assert asking.lines == ["", "not read"]
    assert asked.readinto(buffer) == 1  # the rest of the line
    assert buffer == b"\nne..."
    assert asked.readinto(buffer) == 0
    text = io.TextIOWrapper(io.BufferedReader(_Asked(Asking("ä\n", "b"))), "utf-8")  # type: ignore[arg-type]
    assert text.read() == "ä\nb"
    assert _Asked(Asking("\ud800")).readinto(buffer) == 1  # type: ignore[arg-type]
    assert buffer[:1] == b"?"


def test_a_program_s_streams_are_those_of_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Served(Asking):
        def __init__(self, *words: Any):
            super().__init__("one\n")
            self.words, self.printed = words, _Printed()
            made.append(self)

        def serve(self) -> None:
            assert sys.argv == ["program.py"]
            print("to the output \udcff")
            print("to the errors", file=sys.stderr)
            made.append(self.printed.take())
            made.append([input("n? "), input(), sys.stdin.readline()])
            raise WireError("ended")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_ProgramPeer", Served)
        for name in ("argv", "stdin", "stdout", "stderr"):
            patched.setattr(sys, name, getattr(sys, name))
        patched.setattr(builtins, "input", input)
        with pytest.raises(WireError):
            serve_program(8, 9, "program.py")
    peer, printed, read = made
    assert peer.words == (8, 9, "program.py")
    assert printed == "to the output ?\nto the errors\n"
    assert read == ["n? answered", "answered", "one\n"]
