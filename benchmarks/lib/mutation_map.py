"""Which tests execute a statement, and how long each takes: measured once in instrumented copies, kept in a folder.

A test file is measured again where it has changed, or a file of the package that it executes (not where what it
imports from other tests has).
"""

import difflib
import gzip
import hashlib
import json
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lib.mutants import Mutant
from lib.mutation_copies import python_of

_PRELOADED = ("torch", "transformers", "xdist", "hypothesis", "numpy.testing")
LEAST_LIMIT_S, LIMIT_FACTOR = 60.0, 20.0  # a test that takes longer hangs


@dataclass(frozen=True, kw_only=True)
class MappedTest:
    """seconds: its own; fixtures: those of its file or session, with theirs. hits: lines by file, as bits."""

    name: str
    seconds: float
    fixtures: Mapping[str, float]
    hits: Mapping[str, int]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def limit_s(self) -> float:
        return LEAST_LIMIT_S + LIMIT_FACTOR * (self.seconds + sum(self.fixtures.values()))


class TestMap:
    """The tests that pass without a mutation; `files` is the code that they were measured with."""

    __test__ = False

    def __init__(self, tests: Sequence[MappedTest], files: Mapping[str, bytes]) -> None:
        self.tests, self._files = tests, files
        self._words: dict[str, frozenset[str]] = {}

    def of(self, mutant: Mutant, budget_s: float) -> tuple[list[MappedTest], int]:
        """The tests that execute it, file by file, in all about `budget_s` long; and the number of all that do.

        First the files of the same room, and of these and of others the quick ones.
        """
        found = self._executing({mutant.path: _bits(mutant.runs)}) if mutant.runs else self._of_import(mutant)
        # A process that may not write to the map's memory, as in a sandbox, is in none.
        found = found or [test for test in self.tests if _distance(mutant.path, test.file) == 0]
        by_file: dict[str, list[MappedTest]] = {}
        for test in found:
            by_file.setdefault(test.file, []).append(test)
        chosen: list[MappedTest] = []
        left_s, fixtures = budget_s, set[str]()
        for _, tests in sorted(by_file.items(), key=lambda item: (_distance(mutant.path, item[0]), _mean_s(item[1]))):
            for test in sorted(tests, key=lambda test: test.seconds):
                cost_s = test.seconds + sum(s for name, s in test.fixtures.items() if name not in fixtures)
                if chosen and cost_s > left_s:
                    continue
                chosen.append(test)
                fixtures.update(test.fixtures)
                left_s -= cost_s
        return chosen, len(found)

    def _executing(self, lines: Mapping[str, int]) -> list[MappedTest]:
        return [test for test in self.tests if any(test.hits.get(path, 0) & bits for path, bits in lines.items())]

    def _of_import(self, mutant: Mutant) -> list[MappedTest]:
        """Those that run a statement or are in a file that has one of the mutant's names; else those that run the
        file."""
        lines, test_files = {mutant.path: _bits(mutant.runs)}, set()
        names = set(mutant.names)
        for path, content in self._files.items():
            if path.endswith(".py") and names & self._words_of(path):
                if path.startswith("tests/"):
                    test_files.add(path)
                else:
                    numbers = [
                        number
                        for number, line in enumerate(content.decode().splitlines(), 1)
                        if any(re.search(rf"\b{name}\b", line) for name in names)
                    ]
                    lines[path] = lines.get(path, 0) | _bits(numbers)
        ran = self._executing(lines)
        found = ran + [test for test in self.tests if test.file in test_files and test not in ran]
        return found or self._executing({mutant.path: -1})

    def _words_of(self, path: str) -> frozenset[str]:
        if path not in self._words:
            self._words[path] = frozenset(re.findall(r"\w+", self._files[path].decode()))
        return self._words[path]


def _distance(path: str, test_file: str) -> int:
    """How many folders of realhf/ROOM/FILE are not those of tests/unit/ROOM/test_FILE."""
    rooms, others = path.split("/")[1:-1], test_file.split("/")[2:-1]
    common = next((n for n, pair in enumerate(zip(rooms, others, strict=False)) if pair[0] != pair[1]), len(others))
    return len(rooms) - min(common, len(rooms))


def _mean_s(tests: Sequence[MappedTest]) -> float:
    return sum(test.seconds + sum(test.fixtures.values()) for test in tests) / len(tests)


def _bits(lines: Sequence[int]) -> int:
    return sum(1 << line for line in set(lines))


# --- processes


@cache
def _apart() -> list[str]:
    """Words before a command that has its own numbers of processes, where this user may have that: a mutant that
    signals another process than it should, all of them perhaps, ends none but its own."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    try:
        done = subprocess.run([*words, "true"], capture_output=True, check=False)
    except OSError:
        return []
    return words if done.returncode == 0 else []


class Worker:
    """A warm process in a copy; see mutation_process.py."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        program = Path(__file__).with_name("mutation_process.py")
        words = [*_apart(), str(python_of(copy)), "-P", str(program), *_PRELOADED]
        self._process = subprocess.Popen(words, cwd=copy, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            sys.exit(f"the process in {self.copy} ended with {self._process.wait()}")
        return dict(json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def for_each(items: Sequence[Any], copies: Sequence[Path], function: Callable[[Worker, Any], None]) -> None:
    """Calls the function with each item and a worker that is free; one worker a copy."""
    left: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for item in items:
        left.put(item)
    failures: list[BaseException] = []

    def work(copy: Path) -> None:
        worker = Worker(copy)
        try:
            while not left.empty() and not failures:
                function(worker, left.get_nowait())
        except queue.Empty:
            pass
        except BaseException as failure:
            failures.append(failure)
        finally:
            worker.close()

    threads = [threading.Thread(target=work, args=(copy,)) for copy in copies[: len(items)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# --- measuring


def hits_of(copy: Path) -> Path:
    """The folder of what an instrumented copy notes."""
    return copy.with_name(f"{copy.name}.hits")


def test_files(files: Mapping[str, bytes], chosen: Sequence[str]) -> list[str]:
    """The files of tests below the chosen folders."""
    return [
        path for path in files
        if Path(path).name.startswith("test_") and path.endswith(".py")
        and any(path == part or path.startswith(f"{part.rstrip('/')}/") for part in chosen)
    ]  # fmt: skip


def read_map(folder: Path, files: Mapping[str, bytes], chosen: Sequence[str]) -> TestMap:
    """What has been measured of the test files below `chosen`. Where the code has changed since, its lines are found
    again; those that are new count as run where the line before them was."""
    tests = []
    for path in test_files(files, chosen):
        if (record := _record(folder, path)) is not None:
            tests += [
                MappedTest(
                    name=name,
                    seconds=test["seconds"],
                    fixtures=test["fixtures"],
                    hits={
                        file: _moved(int(bits, 16), folder, record["executes"][file], files[file])
                        for file, bits in test["hits"].items()
                        if file in files
                    },
                )
                for name, test in record["tests"].items()
                if test["outcome"] == "passed"
            ]
    return TestMap(tests, files)


def stale(folder: Path, files: Mapping[str, bytes], chosen: Sequence[str]) -> list[str]:
    """The test files that have to be measured."""
    return [path for path in test_files(files, chosen) if not _holds(_record(folder, path), path, files)]


def measure(
    folder: Path, files: Mapping[str, bytes], paths: Sequence[str], copies: Sequence[Path], say: Callable[[str], None]
) -> None:
    """Runs these test files in instrumented copies and keeps what ran."""

    def run(worker: Worker, path: str) -> None:
        answer = worker.run(files=[path], tests=None, hits=str(hits_of(worker.copy)), first=False)
        executed = sorted({file for test in answer["tests"].values() for file in test["hits"]})
        record = {
            "digest": _digest(files[path]),
            "executes": {file: _digest(files[file]) for file in executed},
            "tests": answer["tests"],
        }
        _write_record(folder, path, record)
        for file, digest in record["executes"].items():
            _source_of(folder, digest).write_bytes(files[file])
        bad = [test for test, about in answer["tests"].items() if about["outcome"] == "failed"]
        seconds = sum(test["seconds"] for test in answer["tests"].values())
        say(f"map: {path}: {len(answer['tests'])} tests, {seconds:.0f} s" + "".join(f"\n  fails: {b}" for b in bad))

    for_each(paths, copies, run)


def _moved(bits: int, folder: Path, measured: str, now: bytes) -> int:
    """Lines of the file that was measured, as bits, as lines of the file of today."""
    if measured == _digest(now):
        return bits
    return sum(1 << new for new, old in enumerate(_lines_before(_source_of(folder, measured).read_bytes(), now), 1)
               if bits >> old & 1)  # fmt: skip


@cache
def _lines_before(old: bytes, new: bytes) -> list[int]:
    """For each line of `new`, the line of `old` that it was; for a new one, the last line before it that was there."""
    lines = [0] * len(new.splitlines())
    matcher = difflib.SequenceMatcher(a=old.splitlines(), b=new.splitlines(), autojunk=False)
    for tag, old_first, old_end, first, end in matcher.get_opcodes():
        for index in range(first, end):
            same = old_first + index - first
            lines[index] = same + 1 if tag == "equal" or (tag == "replace" and same < old_end) else old_first
    return lines


def _source_of(folder: Path, digest: str) -> Path:
    (folder / "sources").mkdir(parents=True, exist_ok=True)
    return folder / "sources" / digest


def _holds(record: Mapping[str, Any] | None, path: str, files: Mapping[str, bytes]) -> bool:
    if record is None or record["digest"] != _digest(files[path]):
        return False
    return all(file in files and _digest(files[file]) == digest for file, digest in record["executes"].items())


def _record(folder: Path, path: str) -> Any:
    file = _file_of(folder, path)
    return json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else None


def _write_record(folder: Path, path: str, record: Mapping[str, Any]) -> None:
    file = _file_of(folder, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(json.dumps(record).encode()))


def _file_of(folder: Path, path: str) -> Path:
    return folder / "tests" / (path.replace("/", "-") + ".json.gz")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
