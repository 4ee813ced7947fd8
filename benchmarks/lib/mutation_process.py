"""A warm process that runs chosen tests in a child forked for each job: a program, fed with one JSON line a job.

It has imported what takes long (the modules that its words name) and nothing of realhf, so that a child imports the
code as it is at that moment, with a mutation or without. A job's child and whatever that started is gone before the
answer.
"""

import contextlib
import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

_PR_SET_CHILD_SUBREAPER = 36
_LIMIT_S = 1800.0  # of importing the tests, and of each where the job says nothing


def main() -> None:
    """Jobs from the standard input, answers to the standard output, until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """`files`: what pytest collects. `tests`: the limit in seconds of each that shall run, in this order (all of the
    files without limit, if None). `hits`: the file of the lines that are run, or None. `first`: ends with the first
    failure.

    Returns `tests` (of each that ran: outcome, seconds, seconds of fixtures, hits) and `killed_by`: the first failure.
    """
    folder = tempfile.mkdtemp(prefix="m-")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _child(job, folder, writer)
    os.close(writer)
    tests, hung = {}, None
    try:
        for message in _messages(reader, job["tests"] or {}):
            if "hung" in message:
                hung = message["hung"]
            else:
                tests[message.pop("test")] = message
    finally:
        _end(child)
        os.close(reader)
        shutil.rmtree(folder, ignore_errors=True)
    killed_by = next((name for name, test in tests.items() if test["outcome"] == "failed"), hung)
    return {"tests": tests, "killed_by": killed_by}


def _messages(reader: int, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """What the child says of each test; at last `hung`, if a test does not end, or the process before it."""
    rest, current, deadline = b"", "importing the tests", time.monotonic() + _LIMIT_S
    while True:
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            yield {"hung": f"{current} (time limit)"}
            return
        data = os.read(reader, 1 << 20)
        if not data:
            yield {"hung": f"{current} (the process ended)"}
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ends" in message:
                if message["ends"] not in (0, 1, 5):
                    yield {"hung": f"pytest (exit code {message['ends']})"}
                return
            if "begins" in message:
                current = message["begins"]
                deadline = time.monotonic() + limits.get(current, _LIMIT_S)
            else:
                current, deadline = "after a test", time.monotonic() + _LIMIT_S
                yield message


def _end(child: int) -> None:
    """Ends the child and all that it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)


def _child(job: dict[str, Any], folder: str, writer: int) -> None:
    os.setsid()
    code = 1
    try:
        plugin = _Plugin(job, os.fdopen(writer, "w"))
        words = ["-p", "no:cacheprovider", "--tb=no", "--basetemp", f"{folder}/t", *(["-x"] if job["first"] else [])]
        os.dup2(1, 2)
        code = pytest.main([*words, *job["files"]], plugins=[plugin])
        plugin.say(ends=int(code))
    finally:
        os._exit(code)


class _Plugin:
    """Chooses and orders the tests, and says of each what came out and which lines ran."""

    def __init__(self, job: dict[str, Any], answers: Any) -> None:
        self._job, self._answers = job, answers
        self._hits = _Hits(job["hits"]) if job["hits"] else None
        self._fixtures: dict[str, tuple[float, dict[str, str]]] = {}  # of files and sessions: seconds, lines
        self._failed, self._skipped, self._inner_s = False, False, 0.0

    def say(self, **message: Any) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.reuse, Phase.generate)  # nobody reads the smallest example
        settings.register_profile("mutations", settings.get_profile("suite"), phases=phases)
        settings.load_profile("mutations")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if (tests := self._job["tests"]) is not None:
            order = {name: index for index, name in enumerate(tests)}
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._hits.taken() if self._hits else {}
        began, inner_s = time.monotonic(), self._inner_s
        try:
            return (yield)
        finally:
            whole_s = time.monotonic() - began
            hits = self._hits.taken() if self._hits else {}
            if self._hits:
                self._hits.put(before)
            self._inner_s = inner_s + whole_s
            self._fixtures[_key(fixturedef)] = (whole_s, hits)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
        self._failed, self._skipped, self._inner_s = False, False, 0.0
        if self._hits:
            self._hits.taken()
        self.say(begins=item.nodeid)
        began = time.monotonic()
        result = yield
        seconds = time.monotonic() - began - self._inner_s
        hits = self._hits.taken() if self._hits else {}
        fixtures = {}
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            for definition in definitions:
                if (key := _key(definition)) in self._fixtures:
                    fixtures[key], ran = self._fixtures[key]
                    hits = united(hits, ran)
        outcome = "failed" if self._failed else "skipped" if self._skipped else "passed"
        self.say(test=item.nodeid, outcome=outcome, seconds=seconds, fixtures=fixtures, hits=hits)
        return result

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # what it imports fails, most likely; pytest's exit code would be that of failed tests
            self.say(test=f"importing {report.nodeid}", outcome="failed", seconds=0.0, fixtures={}, hits={})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        self._skipped |= report.skipped


def _key(fixture: Any) -> str:
    return f"{fixture.baseid}:{fixture.argname}"


def united(one: dict[str, str], other: dict[str, str]) -> dict[str, str]:
    """Lines by file (a number in hexadecimal whose bit n is line n) that ran in one or the other."""
    return {path: f"{int(one.get(path, '0'), 16) | int(other.get(path, '0'), 16):x}" for path in {*one, *other}}


class _Hits:
    """The memory that all instrumented processes write to: one byte for each statement."""

    def __init__(self, folder: str) -> None:
        import mmap

        with open(Path(folder, "hits"), "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._statements = [tuple(entry) for entry in json.loads(Path(folder, "statements.json").read_text())]
        self._index = {entry: index for index, entry in enumerate(self._statements)}

    def taken(self) -> dict[str, str]:
        """What ran since; from now on nothing has run."""
        ran = bytes(self._memory)
        self._memory[:] = bytes(len(ran))
        lines: dict[str, int] = {}
        index = ran.find(1)
        while index >= 0:
            path, line = self._statements[index]
            lines[path] = lines.get(path, 0) | 1 << line
            index = ran.find(1, index + 1)
        return {path: f"{bits:x}" for path, bits in lines.items()}

    def put(self, ran: dict[str, str]) -> None:
        """Has these lines have run, too."""
        for path, text in ran.items():
            bits = int(text, 16)
            while bits:
                lowest = bits & -bits
                self._memory[self._index[path, lowest.bit_length() - 1]] = 1
                bits ^= lowest


if __name__ == "__main__":
    main()
