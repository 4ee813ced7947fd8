"""The master's process: what it begins with, how it ends, and how it is told to. Its parts are stand-ins here."""

import asyncio
import contextlib
import errno
import logging
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.base.errors import RunError, UserError
from realhf.master import __main__ as process
from realhf.rundir.paths import RunDirectory
from realhf.rundir.starts import StaleStartError, begin_start
from realhf.transport.messages import Hello, Shutdown
from realhf.transport.rendezvous import MasterAddress

HELLO, SHUTDOWN = Hello(worker=1, pid=2, host="h"), Shutdown()
HOST = "127.0.0.1"
ADDRESS = MasterAddress(address="tcp://127.0.0.1:5", public_key="public")
RUN: Any = SimpleNamespace(spec=SimpleNamespace(num_workers=3, master_address=None, network_interface="eth7"))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done, in its order."""
    done: list[Any] = []

    class Server:
        address = ADDRESS.address

        def __init__(self, host: str, keys: Any, *, incoming: Any, outgoing: Any):
            done.append(("server", host, keys.own.public))
            assert incoming.decode(incoming.encode(HELLO)) == HELLO
            assert outgoing.decode(outgoing.encode(SHUTDOWN)) == SHUTDOWN

        def close(self) -> None:
            done.append("closed")

    class Master:
        def __init__(self, run: Any, directory: RunDirectory, server: Any, start_id: str, program: Any):
            assert run is RUN
            assert program is None
            assert isinstance(server, Server)
            done.append(("master", directory.path.name, start_id))

        async def run(self) -> None:
            done.append("begins")
            await asyncio.sleep(0)
            done.append("ends")

        def interrupted(self) -> None:
            done.append("interrupted")

    def keys(folder: Path, *, num_workers: int) -> Any:
        done.append(("keys", folder.name, num_workers))
        return SimpleNamespace(own=SimpleNamespace(public=b"public"))

    monkeypatch.setattr(process, "Server", Server)
    monkeypatch.setattr(process, "Master", Master)
    monkeypatch.setattr(process, "load_master_keys", keys)
    monkeypatch.setattr(process, "own_start", lambda: "12345678")
    monkeypatch.setattr(process, "publish_master", lambda folder, at: done.append(("published", folder.name, at)))
    monkeypatch.setattr(process, "withdraw_master", lambda folder, at: done.append(("withdrawn", folder.name, at)))
    return done


def names(directory: RunDirectory) -> tuple[str, str, str]:
    return directory.path.name, directory.keys.name, directory.rendezvous.name


def test_a_master_is_published_while_it_runs(directory: RunDirectory, done: list[Any]) -> None:
    run, keys, rendezvous = names(directory)
    tasks: list[asyncio.Task[None]] = []
    asyncio.run(process.serve(directory, RUN, HOST, tasks.append))
    assert done == [
        ("keys", keys, 3),
        ("server", HOST, b"public"),
        ("published", rendezvous, ADDRESS),
        ("master", run, "12345678"),
        "begins",
        "ends",
        ("withdrawn", rendezvous, ADDRESS),
        "closed",
    ]
    assert len(tasks) == 1


def test_whoever_cancels_the_task_interrupts_the_run(directory: RunDirectory, done: list[Any]) -> None:
    def cancel_soon(task: asyncio.Task[None]) -> None:
        asyncio.get_running_loop().call_soon(task.cancel)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(process.serve(directory, RUN, HOST, cancel_soon))
    assert done[4:] == ["begins", "interrupted", ("withdrawn", directory.rendezvous.name, ADDRESS), "closed"]


def test_a_master_of_an_earlier_start_opens_nothing(directory: RunDirectory, done: list[Any]) -> None:
    begin_start(directory)
    with pytest.raises(StaleStartError):
        asyncio.run(process.serve(directory, RUN, HOST, lambda _: None))
    assert done == [("keys", directory.keys.name, 3)]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 0, []),
        (RunError("worker 1 failed"), 1, ["worker 1 failed"]),
        (UserError("no such file"), 1, ["no such file"]),
        (asyncio.CancelledError(), 143, ["terminated"]),
        (
            OSError(errno.ENOSPC, "No space left on device", "status.json"),
            1,
            ["status.json cannot be written (No space left on device): make room there, then go on with --resume"],
        ),
    ],
)
def test_how_a_run_ends_is_its_exit_code(
    error: BaseException | None,
    code: int,
    said: list[str],
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Meanwhile no other master of the run can begin."""
    given: list[Any] = []

    async def serve(*arguments: Any) -> None:
        given.append(arguments)
        with pytest.raises(UserError, match="still goes on: its master is"), directory.lock("master"):
            pass
        if error is not None:
            raise error

    monkeypatch.setattr(process, "serve", serve)
    begun = print
    with caplog.at_level(logging.ERROR):
        assert process.carry_out(directory, RUN, HOST, begun) == code
    assert given == [(directory, RUN, HOST, begun)]
    assert [record.getMessage() for record in caplog.records] == said
    with directory.lock("master"):
        pass


def test_a_master_waits_for_the_end_of_one_before_it(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def lock(_: RunDirectory, holder: str, wait_s: float = 0.0) -> Iterator[None]:
        waited.append((holder, wait_s))
        yield

    async def serve(*_: object) -> None: ...

    monkeypatch.setattr(RunDirectory, "lock", lock)
    monkeypatch.setattr(process, "serve", serve)
    assert process.carry_out(directory, RUN, HOST, lambda _: None) == 0
    ((holder, wait_s),) = waited
    assert holder == "master"
    assert wait_s >= 60.0, "a shared file system takes a while to notice that a node is gone"


@pytest.mark.parametrize(
    ("arguments", "address", "expected"),
    [
        ([], None, "own address on eth7"),
        ([], "10.0.0.1", "10.0.0.1"),
        (["10.0.0.2"], "10.0.0.1", "10.0.0.2"),
    ],
)
def test_the_host_is_the_command_line_s_or_the_run_s_or_its_own(
    arguments: list[str],
    address: str | None,
    expected: str,
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = SimpleNamespace(spec=SimpleNamespace(master_address=address, network_interface="eth7"))
    loaded, logs, carried_out = list[Any](), list[str](), list[Any]()
    monkeypatch.setattr(sys, "argv", ["realhf.master", str(directory.path), *arguments])
    monkeypatch.setattr(process, "start_logging", logs.append)
    monkeypatch.setattr(process, "load_run", lambda one: (loaded.append(one), run)[1])
    monkeypatch.setattr(process, "own_address", lambda interface: f"own address on {interface}")
    monkeypatch.setattr(process, "carry_out", lambda *given: (carried_out.append(given), 7)[1])
    assert process.main() == 7
    assert [one.path for one in loaded] == [directory.path]
    assert logs == ["master"]
    ((of, which, host, begun),) = carried_out
    assert (of.path, which, host, begun) == (directory.path, run, expected, process._ends_at_signals)


@pytest.mark.parametrize("part", ["load_run", "own_address"])
def test_a_run_or_an_address_that_is_not_there_is_told(
    part: str, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacks(*_: object) -> None:
        raise UserError(f"no {part}")

    monkeypatch.setattr(sys, "argv", ["realhf.master", str(directory.path)])
    monkeypatch.setattr(process, "start_logging", lambda _: None)
    monkeypatch.setattr(process, "load_run", lambda *_: RUN)
    monkeypatch.setattr(process, part, lacks)
    with caplog.at_level(logging.ERROR):
        assert process.main() == 1
    assert [record.getMessage() for record in caplog.records] == [f"no {part}"]


def test_the_program_exits_with_its_code(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["realhf.master", str(directory.path)])
    monkeypatch.setattr("realhf.rundir.logs.start_logging", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(process.__file__, run_name="__main__")  # its experiment is not there
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("handler", "signals"),
    [(signal.SIG_DFL, [signal.SIGUSR2, signal.SIGTERM]), (signal.SIG_IGN, [signal.SIGUSR2])],
)
def test_signals_that_end_a_run(
    handler: signal.Handlers, signals: list[signal.Signals], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where SIGTERM is ignored, as in a job of SLURM, it ends nothing."""
    asked: list[int] = []
    added: list[tuple[int, Callable[[], object]]] = []

    async def begin() -> None:
        task: Any = SimpleNamespace(cancel=lambda: None)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(process.signal, "getsignal", lambda number: (asked.append(number), handler)[1])
        monkeypatch.setattr(loop, "add_signal_handler", lambda *handler: added.append(handler), raising=False)
        process._ends_at_signals(task)
        monkeypatch.undo()
        assert added == [(number, task.cancel) for number in signals]

    asyncio.run(begin())
    assert asked == [signal.SIGTERM]


@contextlib.contextmanager
def beside(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, carry_out: Callable[..., int]) -> Iterator[Any]:
    """The steps of a master on a thread of this process."""
    endless = SimpleNamespace(name="the run without deadlines")
    run = SimpleNamespace(without_deadlines=lambda: endless)
    monkeypatch.setattr(process, "load_run", lambda given: run if given.path == directory.path else None)

    def carried_out(of: RunDirectory, which: Any, host: str, begun: Any) -> int:
        assert (of.path, which, host) == (directory.path, endless, HOST)
        assert (threading.current_thread().name, threading.current_thread().daemon) == ("master", True)
        logging.getLogger("realhf.master").error("on its way")
        return carry_out(begun)

    monkeypatch.setattr(process, "carry_out", carried_out)
    steps = process.in_process(str(directory.path), HOST)
    yield steps
    assert "master on its way" in directory.log("master").read_text()


def code_of(steps: Any) -> int:
    """Takes all steps, and returns what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return int(end.value)


def test_a_master_beside_a_worker_ends_with_its_code(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def carry_out(_: Any) -> int:
        go_on.wait()
        return 5

    with beside(directory, monkeypatch, carry_out) as steps:
        assert [next(steps), next(steps)] == [None, None], "it runs"
        go_on.set()
        assert code_of(steps) == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_master_beside_a_worker_that_ends_without_a_code_has_failed(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def carry_out(_: Any) -> int:
        sys.exit()

    with beside(directory, monkeypatch, carry_out) as steps:
        assert code_of(steps) == 1


def test_a_master_beside_a_worker_is_cancelled_where_the_worker_ends(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own loop; one that has ended already is left alone."""
    ended = []

    def carry_out(begun: Any) -> int:
        async def forever() -> None:
            begun(asyncio.current_task())
            has_begun.set()
            await asyncio.Event().wait()

        asyncio.run(nothing(begun))
        try:
            asyncio.run(forever())
        except asyncio.CancelledError:
            ended.append("cancelled")
        return 1

    async def nothing(begun: Any) -> None:
        begun(asyncio.current_task())

    has_begun = threading.Event()
    with beside(directory, monkeypatch, carry_out) as steps:
        next(steps)
        has_begun.wait()
        steps.close()
    assert ended == ["cancelled"]
