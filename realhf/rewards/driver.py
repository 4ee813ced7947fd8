"""One reward process, and the thread of the worker that starts it, feeds it, watches it, and replaces it."""

import contextlib
import logging
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

import msgspec

from realhf.base.code_files import python_command
from realhf.rewards.jobs import Open, Part, RewardError, after_end, halves
from realhf.rewards.messages import (
    Begin,
    Failed,
    Frames,
    FromProcess,
    Function,
    Loaded,
    NotLoaded,
    ToProcess,
    Value,
    Work,
    frame,
)

logger = logging.getLogger("realhf.rewards")

START_TIMEOUT_S = 300.0  # a function's file may import much
# A process watches its calls itself. If it says nothing for this long behind a call's deadline, it cannot.
_GRACE_S = 5.0
_READ_BYTES = 1 << 20
_MAX_OUTPUT_BYTES = 16 * 2**20
_POLL_S = 0.5


Parts = Sequence[Part]


class Driver(threading.Thread):
    """Scores parts from a queue in a process of its own until it gets None.

    Parts of async functions that came together are worked on together; others one after the other, their samples in
    order unless the function takes batches.

    Args:
        begin: names the functions.
        log: takes the output of functions.
    """

    def __init__(self, name: str, begin: Begin, parts: "queue.SimpleQueue[Parts | None]", log: IO[bytes]):
        super().__init__(name=name, daemon=True)
        self._begin, self._parts, self._log = begin, parts, log
        self._process: _Process | None = None
        self._is_ending = False
        self._has_started = threading.Event()
        self._error: Exception | None = None
        self._functions: list[Function] = []

    def functions(self) -> list[Function]:
        """Those that the process has loaded. Raises RewardError if it could not."""
        self._has_started.wait()  # the start has a deadline
        if self._error is not None:
            raise self._error
        return self._functions

    def end(self) -> None:
        """Ends thread and process, in the middle of a call too."""
        self._is_ending = True
        self._parts.put(None)
        if (process := self._process) is not None:
            process.kill()

    def run(self) -> None:
        try:
            self._start()
        except Exception as error:  # raised where the functions are awaited, or at the next part
            self._error = error
            self._stop()
        self._has_started.set()
        while (parts := self._parts.get()) is not None:
            todo = list(parts)
            while (todo := [part for part in todo if not part.job.is_done]) and not self._is_ending:
                # Parts that may have ended a process go one by one.
                is_first = not any(part.ends for part in todo)
                now = todo if is_first and self._is_async(todo) else todo[:1]
                todo = self._settle(now) + todo[len(now) :]
        self._stop()

    def _is_async(self, parts: Parts) -> bool:
        return bool(self._functions) and all(self._functions[part.reward].is_async for part in parts)

    def _settle(self, parts: Parts) -> list[Part]:
        """As `_score`; an error that is not a sample's ends the jobs: of starting a process, or of this code."""
        try:
            return self._score(parts)
        except Exception as error:
            self._stop()
            for part in parts:
                part.job.fail(error)
            return []

    def _start(self) -> "_Process":
        if self._process is None:
            self._process = _Process(self.name, self._begin, self._log)
        if self._is_ending:  # `end` may not have seen it
            self._process.kill()
        self._functions = self._process.functions()
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _score(self, parts: Parts) -> list[Part]:
        """Scores the parts; returns those, or halves of those, that are left when the process ends."""
        process = self._start()
        opened = [Open(part) for part in parts]
        for number, one in enumerate(opened):
            samples = [one.part.job.samples[index] for index in one.part.indices]
            process.send(Work(number, one.part.reward, samples))
        first, *_ = parts  # several are of async functions
        function = self._functions[first.reward]
        in_order = not (function.is_async or function.is_batch)
        limit_s = self._begin.timeout_s * 1.25 + _GRACE_S
        deadline = time.monotonic() + limit_s
        again: list[Part] = []
        while any(one.places for one in opened):
            try:
                messages = process.receive(deadline)
            except _EndError as end:
                self._stop()
                if self._is_ending:
                    return []
                logger.warning("%s: %s; another one takes its place", self.name, end)
                return again + after_end(opened, str(end), end.kind, in_order=in_order)
            if messages:
                deadline = time.monotonic() + limit_s
            for message in messages:
                again += self._take(message, opened)
                if isinstance(message, Failed) and message.is_stuck:
                    self._stop()
                    return again + [one.rest for one in opened if one.places]
            if all(part.job.is_done for part in parts):  # with an error: the rest is not needed
                if any(one.places for one in opened):
                    self._stop()
                return []
        return again

    def _take(self, message: FromProcess, opened: Sequence[Open]) -> list[Part]:
        """Notes an answer; returns the parts to do again."""
        match message:
            case Value(work=work, place=place):
                part = opened[work].part
                [index] = opened[work].answer([place])
                part.job.put(part.reward, index, message)
            case Failed(work=work, places=places):
                part, indices = opened[work].part, opened[work].answer(places)
                if message.kind == "time" and len(indices) > 1:  # a batch: which of its samples is it?
                    logger.warning("%s: %s (a batch of %d)", self.name, message.text, len(indices))
                    return halves(replace(part, indices=tuple(indices), ends=part.ends + 1))
                for index in indices:
                    part.job.put(part.reward, index, part.job.failure(part.reward, index, message.kind, message.text))
            case _:
                raise RewardError(f"{self.name} sent {type(message).__name__}, which answers nothing")
        return []


class _EndError(Exception):
    """A process has ended, or says nothing any more."""

    def __init__(self, text: str, kind: Any):
        super().__init__(text)
        self.kind = kind


class _Process:
    """A started reward process, and its pipes, which never block."""

    def __init__(self, name: str, begin: Begin, log: IO[bytes]):
        self._frames = Frames(FromProcess)
        self._unsent = bytearray()
        self._name = name
        self._functions: list[Function] | None = None
        # It is to use processors: a function that found the GPU would take memory that the plan has given away.
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        env.setdefault("OMP_NUM_THREADS", "1")
        self._child = subprocess.Popen(
            python_command("realhf.rewards.process", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            start_new_session=True,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._input, self._output = self._child.stdin.fileno(), self._child.stdout.fileno()
        for pipe in (self._input, self._output):
            os.set_blocking(pipe, False)
        self._start_deadline = time.monotonic() + START_TIMEOUT_S
        threading.Thread(target=_copy_output, args=(self._child.stderr, log, name), daemon=True).start()
        self.send(begin)

    def functions(self) -> list[Function]:
        """The functions that it has loaded. Raises RewardError if they cannot be loaded."""
        while self._functions is None:
            try:
                messages = self.receive(self._start_deadline)
            except _EndError as end:
                raise RewardError(f"{self._name} did not start: {end}; its output is in the worker's log") from None
            for message in messages:
                match message:
                    case Loaded():
                        self._functions = message.functions
                    case NotLoaded(text=text):
                        raise RewardError(text)
        return self._functions

    def send(self, message: ToProcess) -> None:
        self._unsent += frame(message)

    def receive(self, deadline: float) -> list[Any]:
        """Messages that are there; [] after a short time without any. Raises _EndError: there will be no more."""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        if self._unsent:
            poll.register(self._input, select.POLLOUT)
        # Its end is looked for before the pipe is read, so all of its output is read before the end counts.
        has_ended = self._child.poll() is not None
        ready = dict(poll.poll(1000 * _POLL_S))
        if self._input in ready:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):  # its end shows below
                del self._unsent[: os.write(self._input, self._unsent)]
        if self._output in ready:
            if content := os.read(self._output, _READ_BYTES):
                try:
                    return self._frames.add(content)
                except msgspec.MsgspecError as error:
                    raise _EndError(f"the process wrote something else than a message ({error})", "end") from None
            has_ended = True
        if has_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_GRACE_S)
            raise _EndError(f"the process ended during the call ({_how(self._child.poll())})", "end")
        if time.monotonic() > deadline:
            raise _EndError("the call took too long, and the process did not react", "time")
        return []

    def kill(self) -> None:
        """Kills it and its descendants, unless these have left its process group."""
        # Only while its leader is not reaped is a group's number certain to be its own.
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kills it and takes back its pipes."""
        self.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()


def _how(returncode: int | None) -> str:
    if returncode is None:
        return "it closed its output"
    if returncode >= 0:
        return f"exit code {returncode}"
    name = signal.Signals(-returncode).name
    return f"{name}, perhaps for want of memory" if name == "SIGKILL" else name


def _copy_output(source: IO[bytes], log: IO[bytes], name: str) -> None:
    """Copies the output of a process, line by line and up to a limit; the rest is read and left out."""
    written = 0
    with (
        source,
        contextlib.suppress(ValueError),  # the log is closed
        open(source.fileno(), "rb", _READ_BYTES, closefd=False) as lines,  # with a buffer, which the pipe lacks
    ):
        while line := lines.readline(_READ_BYTES):
            if written > _MAX_OUTPUT_BYTES:
                continue
            written += len(line)
            text = b"[%s] %s" % (name.encode(), line if line.endswith(b"\n") else line + b"\n")
            if written > _MAX_OUTPUT_BYTES:
                limit = _MAX_OUTPUT_BYTES >> 20
                text += b"[%s] more than %d MiB were printed; the rest is left out\n" % (name.encode(), limit)
            log.write(text)
            log.flush()
