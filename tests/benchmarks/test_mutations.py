"""What `benchmarks/mutations.py` draws, where it looks for tests, and its small form."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
mutants = importlib.import_module("lib.mutants")
copies = importlib.import_module("lib.mutation_copies")
maps = importlib.import_module("lib.mutation_map")
equal = importlib.import_module("lib.equal_mutants")

SOURCE = b'''"""Text with 1 + 1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

__all__ = ["LIMIT"]
LIMIT = 3.0


class Box:
    size: int = 4

    def fits(self, width: int, most: int = 0, *, strict: bool) -> "bool | None":
        """Whether width < size."""
        if width < self.size and not strict:
            raise ValueError(f"{width + 1} is too much")
        elif most == 2:
            self.size += most
        print(width - 1)
        return max(width - 1, sum(range(width)[most:width], start=most)) > 0
'''


def changes(line: int) -> set[str]:
    """The lines that come of one line of SOURCE."""
    found = [mutant for mutant in mutants.mutants_of("a.py", SOURCE) if mutant.line == line]
    return {mutant.after for mutant in found if mutants.changes(mutant, SOURCE)}


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(SOURCE.decode().splitlines(), 1) if text in line)


def test_every_change_of_a_line() -> None:
    assert changes(line_of("LIMIT =")) == {"LIMIT = 6.0", "LIMIT = 1.5"}
    assert changes(line_of("size: int")) == {"size: int = 5", "size: int = 3"}
    assert changes(line_of("self.size and")) == {
        "if width <= self.size and not strict:",
        "if width > self.size and not strict:",
        "if width < self.size or not strict:",
        "if width < self.size and (strict):",
        "if width < self.size:",
        "if not strict:",
        "if not (width < self.size and not strict):",
        "if True:",
        "if False:",
    }
    assert changes(line_of("elif")) == {
        "elif most != 2:",
        "elif most == 3:",
        "elif most == 1:",
        "elif not (most == 2):",
        "elif True:",
        "elif False:",
    }
    assert changes(line_of("+= most")) == {"self.size -= most", "pass"}
    head, tail = "return max(width - 1, sum(range(width)[most:width], start=most))", " > 0"
    assert {head + end for end in (" >= 0", " < 0", " > 1", " > -1")} <= changes(line_of("return"))
    assert {
        head.replace("max", "min") + tail,
        head.replace("sum", "mean") + tail,
        head.replace("- 1", "+ 1") + tail,
        head.replace("- 1", "- 0") + tail,
        head.replace(", start=most", "") + tail,
        head.replace("most:", "most + 1:") + tail,
        head.replace(":width", ":width - 1") + tail,
    } <= changes(line_of("return"))
    assert "return max(sum(range(width)[most:width], start=most), width - 1)" + tail not in changes(line_of("return"))
    pair = b"def f(a, b):\n    return g(a, b), a\n"
    found = {mutant.after for mutant in mutants.mutants_of("a.py", pair)}
    assert {"return g(b, a), a", "return a, g(a, b)"} <= found


@pytest.mark.parametrize("text", ["Text with", "import", "TYPE_CHECKING:", "__all__", "class", "Whether", "print"])
def test_text_and_imports_are_left_alone(text: str) -> None:
    assert not changes(line_of(text))


def test_a_guard_is_dropped_and_its_words_stay() -> None:
    assert changes(line_of("raise")) == {"pass"}


def test_the_seed_decides_what_is_drawn() -> None:
    sources = {"a.py": SOURCE, "b.py": SOURCE.replace(b"Box", b"Crate")}
    drawn = mutants.draw(sources, 1, 9)
    assert drawn == mutants.draw(sources, 1, 9)
    assert drawn != mutants.draw(sources, 2, 9)
    assert len({(mutant.path, mutant.line) for mutant in drawn}) == len(drawn) == 9
    every = mutants.draw(sources, 1, 1000)  # one a line
    assert {mutant.path for mutant in every} == {"a.py", "b.py"}
    for mutant in every:
        source = sources[mutant.path]
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))


def test_what_runs_is_noted_by_line(tmp_path: Path) -> None:
    made = copies.instrumented({"realhf/a.py": SOURCE, "other.py": SOURCE}, tmp_path)
    assert made["other.py"] == SOURCE
    hits, statements = tmp_path / "hits", json.loads((tmp_path / "statements.json").read_text())
    (tmp_path / "a.py").write_bytes(made["realhf/a.py"])

    def ran(call: str) -> set[str]:
        hits.write_bytes(bytes(len(statements)))
        program = f"import sys; sys.path[:0] = ['.']; from a import Box; {call}"
        subprocess.run([sys.executable, "-P", "-S", "-c", program], cwd=tmp_path, check=False, capture_output=True)
        lines = SOURCE.decode().splitlines()
        return {lines[line - 1].split()[0] for (_, line), hit in zip(statements, hits.read_bytes(), strict=True) if hit}

    assert ran("") == set()
    assert ran("Box().fits(9, strict=True)") == {"if", "print(width", "return"}
    assert ran("Box().fits(9, 2, strict=True)") == {"if", "self.size", "print(width", "return"}
    assert ran("Box().fits(1, strict=False)") == {"if", "raise"}


FILES = {
    "test_good.py": "def test_a(): pass\ndef test_b(): pass\n",
    "test_bad.py": "def test_a(): assert False\ndef test_b(): pass\n",
    "test_broken.py": "import no_such_module\ndef test_a(): pass\n",
    "test_hangs.py": "import time\ndef test_a(): time.sleep(10_000)\n",
    "test_dies.py": "import os\ndef test_a(): os._exit(0)\n",
}
ENDS = {
    "test_good.py": None,
    "test_bad.py": "test_bad.py::test_a",
    "test_broken.py": "importing test_broken.py",
    "test_hangs.py": "test_hangs.py::test_a (time limit)",
    "test_dies.py": "test_dies.py::test_a (the process ended)",
}


def test_whatever_keeps_a_test_from_passing_kills_a_mutant(tmp_path: Path) -> None:
    """A failure, an import that fails, a hang, the end of the process."""
    jobs = []
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
        limit_s = 0.5 if "hangs" in name else 600.0
        tests = {f"{name}::test_a": limit_s, f"{name}::test_b": limit_s}
        jobs.append(json.dumps({"files": [name], "tests": tests, "hits": None, "first": True}))
    (tmp_path / "conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('suite', settings.get_profile('default'))\n"
    )
    command = [sys.executable, "-P", str(ROOT / "benchmarks/lib/mutation_process.py"), "hypothesis", "xdist"]
    text = "\n".join(jobs)
    done = subprocess.run(command, cwd=tmp_path, input=text, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["killed_by"] for answer in answers] == list(ENDS.values())
    assert list(answers[0]["tests"]) == ["test_good.py::test_a", "test_good.py::test_b"]
    assert list(answers[1]["tests"]) == ["test_bad.py::test_a"]  # nothing after the first failure


def a_test(name: str, seconds: float, lines: list[int], **fixtures: float) -> Any:
    bits = sum(1 << line for line in lines)
    return maps.MappedTest(name=name, seconds=seconds, fixtures=fixtures, hits={"realhf/a.py": bits})


def mutant_at(text: str) -> Any:
    return next(one for one in mutants.mutants_of("realhf/a.py", SOURCE) if one.line == line_of(text))


def test_tests_of_a_line_quick_files_first_within_the_budget() -> None:
    line = line_of("self.size +=")
    tests = [
        a_test("tests/slow.py::a", 50.0, [line]),
        a_test("tests/quick.py::b", 2.0, [line, 1]),
        a_test("tests/quick.py::c", 1.0, [line]),
        a_test("tests/quick.py::d", 0.1, [line + 1]),
        a_test("tests/fixture.py::e", 0.0, [line], once=9.0),
        a_test("tests/fixture.py::f", 0.0, [line], once=9.0),
    ]
    found = maps.TestMap(tests, {})

    def names(budget_s: float) -> str:
        return "".join(test.name[-1] for test in found.of(mutant_at("self.size +="), budget_s)[0])

    assert names(100.0) == "cbefa"
    assert names(13.0) == "cbef"  # the fixture of a file counts once
    assert names(2.0) == "c"
    assert names(0.0) == "c"  # one at least
    assert found.of(mutant_at("self.size +="), 2.0)[1] == 5
    assert found.of(mutant_at("return"), 100.0)[1] == len(tests), "no map has it: all tests of its room"
    assert maps.TestMap([], {}).of(mutant_at("return"), 9.0) == ([], 0)


def test_tests_of_the_same_room_come_first() -> None:
    files = [
        "tests/unit/engine/train/test_a.py",
        "tests/unit/engine/test_b.py",
        "tests/unit/data/test_c.py",
        "tests/e2e/test_d.py",
    ]
    distances = [maps._distance("realhf/engine/train/a.py", file) for file in files]
    assert distances == [0, 1, 2, 2]
    assert maps._distance("realhf/data/a.py", "tests/unit/data/script/test_e.py") == 0


def test_tests_of_a_constant_run_a_line_that_has_its_name_or_are_in_a_file_that_has() -> None:
    files = {
        "realhf/a.py": SOURCE,
        "realhf/b.py": b"def f():\n    return LIMIT\n",
        "tests/test_c.py": b"assert LIMIT == 3",
        "tests/test_d.py": b"",
    }
    by_line = maps.MappedTest(name="tests/test_d.py::b", seconds=1, fixtures={}, hits={"realhf/b.py": 1 << 2})
    by_file = maps.MappedTest(name="tests/test_c.py::c", seconds=1, fixtures={}, hits={})
    other = maps.MappedTest(name="tests/test_d.py::d", seconds=1, fixtures={}, hits={"realhf/b.py": 1 << 1})
    found = maps.TestMap([by_line, by_file, other], files)
    assert {test.name for test in found.of(mutant_at("LIMIT ="), 9.0)[0]} == {by_line.name, by_file.name}


def test_a_map_is_measured_again_where_code_that_it_runs_has_changed(tmp_path: Path) -> None:
    files = {"realhf/a.py": b"1", "realhf/b.py": b"2", "tests/test_a.py": b"3", "tests/e2e/test_b.py": b"4"}
    record = {"digest": maps._digest(b"3"), "executes": {"realhf/a.py": maps._digest(b"1")}, "tests": {}}
    maps._write_record(tmp_path, "tests/test_a.py", record)
    assert maps.stale(tmp_path, files, ["tests"]) == ["tests/e2e/test_b.py"]
    assert maps.stale(tmp_path, files, ["tests/test_a.py"]) == []
    assert maps.stale(tmp_path, {**files, "realhf/b.py": b""}, ["tests/test_a.py"]) == []
    assert maps.stale(tmp_path, {**files, "realhf/a.py": b""}, ["tests/test_a.py"]) == ["tests/test_a.py"]
    assert maps.stale(tmp_path, {**files, "tests/test_a.py": b""}, ["tests/test_a.py"]) == ["tests/test_a.py"]


def test_lines_of_changed_code_are_found_again() -> None:
    old = b"a\nb\nc\nd\ne\n"
    assert maps._lines_before(old, old) == [1, 2, 3, 4, 5]
    assert maps._lines_before(old, b"new\na\nb\nd\ne\n") == [0, 1, 2, 4, 5]
    assert maps._lines_before(old, b"a\nb\nC\nd\nnew\nnew\ne\n") == [1, 2, 3, 4, 4, 4, 5]


ENTRIES = """# A line to the reader.

realhf/a.py
- self.size += most
+ self.size -= most
+ pass
  A reason
  on two lines.
"""


def test_entries_of_equal_mutants(tmp_path: Path) -> None:
    file = tmp_path / "equal.txt"
    file.write_text(ENTRIES)
    [entry] = equal.read_equal(file)
    assert entry.reason == "A reason on two lines."
    keys = {mutant.key for mutant in mutants.mutants_of("realhf/a.py", SOURCE)}
    assert set(entry.keys) <= keys
    assert entry.matches(SOURCE.decode())
    assert not entry.matches(SOURCE.decode().replace("+= most", "+= 1"))
    file.write_text(ENTRIES.replace("  A reason\n  on two lines.\n", ""))
    with pytest.raises(SystemExit, match=r"equal.txt:3: an entry is a path, .* and a reason"):
        equal.read_equal(file)


def test_every_entry_of_the_list_is_of_a_line_that_is_there() -> None:
    for entry in equal.read_equal(ROOT / "benchmarks/mutations_equal.txt"):
        source = (ROOT / entry.path).read_bytes()
        made = {mutant.key for mutant in mutants.mutants_of(entry.path, source)}
        assert set(entry.keys) <= made, f"mutations_equal.txt:{entry.line}: no mutation of {entry.path} any more"


@pytest.mark.slow
def test_the_small_form_makes_a_map_and_runs_mutants(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/mutations.py", "--quick", "--map", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])["results"]
    assert "of 6 mutants" in rows[0]["case"]
    assert rows[0]["value"] < 100
    assert "killed by tests/unit/geometry/test_" in done.stderr
