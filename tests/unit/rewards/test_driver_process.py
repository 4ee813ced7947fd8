"""The process of a driver: its pipes, its start, its end and its output."""

import io
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from realhf.rewards import driver as module
from realhf.rewards.driver import _copy_output, _EndError, _how, _Process
from realhf.rewards.jobs import RewardError
from realhf.rewards.messages import (
    Frames,
    Loaded,
    NotLoaded,
    ToProcess,
    Work,
    frame,
)
from tests.unit.rewards.samples import of
from tests.unit.rewards.test_driver import ASYNC, BEGIN, ONE, value

# --- a process and its pipes


class Child:
    """A started process that is none: its pipes, and what is done with it."""

    def __init__(self, words: Any, **options: Any):
        self.words, self.options = words, options
        self.pid, self.returncode, self.waits = 2**31 - 7, None, []  # type: ignore[var-annotated]
        inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
        self.requests, self.stdin = io.FileIO(inputs[0]), io.FileIO(inputs[1], "w")
        self.stdout, self.replies = io.FileIO(outputs[0]), io.FileIO(outputs[1], "w")
        self.stderr, self.errors = io.FileIO(errors[0]), io.FileIO(errors[1], "w")

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        self.waits.append(timeout)
        if timeout is not None and self.returncode is None:
            raise subprocess.TimeoutExpired("child", timeout)

    def close(self) -> None:
        for file in (self.requests, self.stdin, self.stdout, self.replies, self.errors):
            file.close()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Child]]:
    children: list[Child] = []

    def start(*words: Any, **options: Any) -> Child:
        children.append(Child(*words, **options))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    yield lambda: children[-1]
    for one in children:
        one.close()


FAR = float("inf")


def test_how_a_process_is_started(child: Callable[[], Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("OTHER", "kept")
    for given, expected in ((None, "1"), ("7", "7")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        _Process("p", BEGIN, io.BytesIO())
        options = child().options
        environment = options.pop("env")
        assert environment == {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": expected,
        }
        pipe = subprocess.PIPE
        # In a group of its own, by which it is ended with all that it has started.
        assert options == {"stdin": pipe, "stdout": pipe, "stderr": pipe, "bufsize": 0, "start_new_session": True}
        assert child().words[-2:] == ("realhf.rewards.process", str(os.getpid()))


def test_what_is_sent_goes_out_while_answers_are_waited_for(child: Callable[[], Child]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    work = Work(0, 0, of("x" * 20_000))  # more than a pipe holds
    process.send(work)
    frames, found = Frames(ToProcess), []
    while len(found) < 2:
        assert process.receive(FAR) == []
        found += frames.add(os.read(child().requests.fileno(), 2**20))
    assert found == [BEGIN, work]
    assert not process._unsent


def test_answers_are_put_together(child: Callable[[], Child]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    content = frame(value(0, 1))
    child().replies.write(content[:3])
    assert process.receive(FAR) == []
    child().replies.write(content[3:] + content)
    assert process.receive(FAR) == [value(0, 1)] * 2


def ended(process: _Process, deadline: float = FAR) -> tuple[str, str]:
    """What is said of an end, which may show a look later than what was said before."""
    for _ in range(3):
        try:
            process.receive(deadline)
        except _EndError as end:
            return str(end), end.kind
    pytest.fail("it has not ended")


def test_what_an_ended_process_has_said_is_still_heard(child: Callable[[], Child]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    child().replies.write(frame(value(0, 1)))
    child().replies.close()
    child().returncode = 3
    child().requests.close()  # what is sent to it goes nowhere
    process.send(Work(0, 0, []))
    assert process.receive(FAR) == [value(0, 1)]
    assert ended(process) == ("the process ended during the call (exit code 3)", "end")


def test_a_process_ends_though_another_one_holds_its_output(child: Callable[[], Child]) -> None:
    """One that a function has started, and that outlives it."""
    process = _Process("p", BEGIN, io.BytesIO())
    assert process.receive(FAR) == []
    child().returncode = -11
    assert ended(process) == ("the process ended during the call (SIGSEGV)", "end")
    assert child().waits == [5]


def test_a_process_that_closes_its_output_is_given_a_while_to_end(child: Callable[[], Child]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    child().replies.close()
    assert ended(process) == ("the process ended during the call (it closed its output)", "end")
    assert child().waits == [5]


class Poll:
    """Finds nothing ready, whatever is."""

    def __init__(self, then: Callable[[], Any] = lambda: None):
        self.registered, self.limits_ms, self.then = [], [], then  # type: ignore[var-annotated]

    def register(self, *words: int) -> None:
        self.registered.append(words)

    def poll(self, limit_ms: float) -> list[Any]:
        self.limits_ms.append(limit_ms)
        self.then()
        return []


def test_a_process_is_waited_for_without_haste(child: Callable[[], Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input is looked at while there is something to send, and written to once it takes something."""
    process, poll = _Process("p", BEGIN, io.BytesIO()), Poll()
    monkeypatch.setattr(module, "_POLL_S", 0.25)
    with monkeypatch.context() as patched:
        patched.setattr(module.select, "poll", lambda: poll)
        assert process.receive(FAR) == []
        assert poll.registered == [(child().stdout.fileno(), 1), (child().stdin.fileno(), 4)]  # POLLIN, POLLOUT
        os.set_blocking(child().requests.fileno(), False)
        assert child().requests.read(10) is None
        process._unsent.clear()
        poll.registered = []
        assert process.receive(FAR) == []
    assert poll.registered == [(child().stdout.fileno(), 1)]
    assert poll.limits_ms == [250.0, 250.0]


def test_the_last_words_of_a_process_that_ends_at_this_moment_are_heard(
    child: Callable[[], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _Process("p", BEGIN, io.BytesIO())

    def end() -> None:
        child().replies.write(frame(value(0, 1)))
        child().returncode = 0

    with monkeypatch.context() as patched:
        patched.setattr(module.select, "poll", lambda: Poll(end))
        assert process.receive(FAR) == []
    assert process.receive(FAR) == [value(0, 1)]
    assert ended(process) == ("the process ended during the call (exit code 0)", "end")


def test_what_is_no_message_ends_the_call(child: Callable[[], Child]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    child().replies.write(b"\0\0\0\1\xc1")
    text, kind = ended(process)
    assert (text.partition(" (")[0], kind) == ("the process wrote something else than a message", "end")


def test_silence_beyond_the_deadline_ends_the_call(child: Callable[[], Child], clock: list[float]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    clock[0] = 100.0
    assert process.receive(101.0) == []  # at the deadline, and not behind it
    child().replies.write(frame(value(0, 0)))
    assert process.receive(101.0) == [value(0, 0)]  # late, but there
    assert ended(process, 101.0) == ("the call took too long, and the process did not react", "time")


def test_a_process_says_once_what_it_has_loaded(child: Callable[[], Child], clock: list[float]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    child().replies.write(frame(Loaded([ONE, ASYNC])))
    deadlines = []
    receive = process.receive

    def noted(deadline: float) -> list[Any]:
        deadlines.append(deadline)
        return receive(deadline)

    process.receive = noted  # type: ignore[method-assign]
    assert process.functions() == [ONE, ASYNC]
    assert process.functions() == [ONE, ASYNC]
    assert deadlines == [1 + 300.0]  # from the start


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (NotLoaded("there is no file"), "^there is no file$"),
        (
            None,
            r"^p did not start: the process ended during the call \(exit code 1\); its output is in the worker's log$",
        ),
    ],
)
def test_a_process_that_loads_nothing(child: Callable[[], Child], message: Any, words: str) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    if message is None:
        child().returncode = 1
    else:
        child().replies.write(frame(message))
    with pytest.raises(RewardError, match=words):
        process.functions()


def test_a_process_is_killed_with_its_group_while_the_group_is_its_own(
    child: Callable[[], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []

    def killpg(group: int, number: int) -> None:
        killed.append((group, number))
        raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", killpg)
    process = _Process("p", BEGIN, io.BytesIO())
    process.kill()
    assert killed == [(child().pid, signal.SIGKILL)]
    child().returncode = 0
    process.kill()
    assert len(killed) == 1
    process.stop()
    assert child().waits == [None]
    assert child().stdin.closed
    assert child().stdout.closed
    child().returncode = None
    process.stop()
    assert len(killed) == 2


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (None, "it closed its output"),
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "SIGKILL, perhaps for want of memory"),
        (-1, "SIGHUP"),
    ],
)
def test_how_a_process_ended(returncode: int | None, words: str) -> None:
    assert _how(returncode) == words


class Log(io.BytesIO):
    flushes = 0

    def flush(self) -> None:
        self.flushes += 1


def copied(content: bytes, tmp_path: Path, log: Any) -> None:
    (tmp_path / "printed").write_bytes(content)
    source = io.FileIO(tmp_path / "printed")
    _copy_output(source, log, "p 0")
    assert source.closed


def test_lines_of_a_process_are_copied_with_its_name(tmp_path: Path) -> None:
    log = Log()
    copied(b"one\n\ntwo\nno end", tmp_path, log)
    assert log.getvalue() == b"[p 0] one\n[p 0] \n[p 0] two\n[p 0] no end\n"
    assert log.flushes == 4
    log = Log()
    copied(b"much\n" * 2**16, tmp_path, log)
    assert log.getvalue() == b"[p 0] much\n" * 2**16


def test_so_much_of_the_output_is_copied_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_OUTPUT_BYTES", 2**20)
    log, line = Log(), b"x" * (2**19 - 1) + b"\n"
    copied(2 * line, tmp_path, log)
    assert log.getvalue() == 2 * (b"[p 0] " + line)
    log = Log()
    copied(2 * line + b"\nb\nc\n", tmp_path, log)
    note = b"[p 0] more than 1 MiB were printed; the rest is left out\n"
    assert log.getvalue() == 2 * (b"[p 0] " + line) + b"[p 0] \n" + note


def test_output_goes_nowhere_once_the_log_is_closed(tmp_path: Path) -> None:
    log = Log()
    log.close()
    copied(b"one\n", tmp_path, log)


def test_a_process_s_output_is_copied_by_a_thread(child: Callable[[], Child]) -> None:
    log = Log()
    before = set(threading.enumerate())
    _Process("p 0", BEGIN, log)
    [thread] = set(threading.enumerate()) - before
    assert thread.daemon
    child().errors.write(b"one\n")
    child().errors.close()
    thread.join()
    assert log.getvalue() == b"[p 0] one\n"
