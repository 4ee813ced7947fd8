"""Programs of unknown origin try what they may not do; each attempt reports what came of it."""

import os
import platform
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.rewards import confined
from realhf.rewards.sandbox import Limits, run_program
from tests.waiting import PATIENCE_S

LONG = Limits(time_s=PATIENCE_S)
FILTERED = pytest.mark.skipif(not confined.has_call_filter(), reason="this kernel filters no system calls")
LANDLOCKED = pytest.mark.skipif(not confined.landlock_version(), reason="this kernel has no Landlock")


def attempt(body: str, limits: Limits = LONG) -> str | None:
    """What a function of these lines returned or raised; None if the program was ended before."""
    code = f"def f():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
    code += "try:\n    result = repr(f())\nexcept BaseException as error:\n    result = type(error).__name__\n"
    code += "import os\nos.write(REPORT_FD, b'REPORT_WORD' + result.encode())\n"
    report = run_program(code, limits)
    return None if report is None else report.decode()


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("return 1", "1"),
        ("import threading\nt = threading.Thread(target=print)\nt.start()\nreturn t.join()", "None"),
        ("import asyncio\nasync def g(): return 5\nreturn asyncio.run(g())", "5"),
        ("import numpy\nreturn int(numpy.ones(3).sum())", "3"),
        ("open('x', 'w').write('a')\nreturn open('x').read()", "'a'"),
        ("import tempfile\nreturn tempfile.TemporaryFile().write(b'a')", "1"),
        ("import os\nreturn os.kill(os.getpid(), 0)", "None"),
        ("import sys\nreturn sys.stdin.read()", "''"),
    ],
)
def test_what_programs_may_do(body: str, result: str) -> None:
    assert attempt(body) == result


@FILTERED
@pytest.mark.parametrize(
    "body",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', 22))",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 53))",
        "import socket\nsocket.socket(socket.AF_UNIX)",
        "import os\nos.fork()",
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['/bin/ls'])",
        "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(-1, 9)",
        "import os\nos.pidfd_open(os.getppid())",
        "import os\nos.memfd_create('x')",
        "import os\nos.sched_setaffinity(os.getppid(), {0})",
    ],
)
def test_no_network_and_no_other_processes(body: str) -> None:
    assert attempt(body) in ("PermissionError", "BlockingIOError")


@LANDLOCKED
@pytest.mark.parametrize(
    "body",
    [
        "open('OUTSIDE/new', 'w')",
        "open('OUTSIDE/secret').read()",
        "import os\nos.unlink('OUTSIDE/secret')",
        "import os\nos.rename('OUTSIDE/secret', 'here')",
        "import os\nos.link('OUTSIDE/secret', 'here')",
        "import os\nos.symlink('OUTSIDE/secret', 'here')\nopen('here').read()",
        "import os\nos.listdir('OUTSIDE')",
        "import os\nos.listdir('/')",
        "import os\nos.truncate('OUTSIDE/secret', 0)",
        "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
        "open('/proc/self/environ').read()",
        "open('/etc/passwd').read()",
    ],
)
def test_no_files_outside_its_folder(body: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    assert attempt(body.replace("OUTSIDE", str(tmp_path))) in ("PermissionError", "OSError")
    assert (tmp_path / "secret").read_text() == "secret"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@FILTERED
def test_modes_of_files_outside_stay(tmp_path: Path) -> None:
    before = tmp_path.stat()
    assert attempt(f"import os\nos.chmod('{tmp_path}', 0o777)\nos.utime('{tmp_path}', (1, 1))") == "None"
    after = tmp_path.stat()
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)


def test_no_environment_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    names = attempt("import os\nreturn sorted(os.environ)")
    assert names == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']"


def test_memory() -> None:
    assert attempt("bytearray(2**30)", Limits(memory_mb=512, time_s=PATIENCE_S)) == "MemoryError"
    assert attempt("x = []\nwhile True: x.append(bytearray(2**20))", LONG) == "MemoryError"


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time\ntime.sleep(1e6)",
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass",
        "while True: print('x' * 10000)",
    ],
)
def test_time(body: str) -> None:
    assert attempt(body, Limits(time_s=1.0)) is None


@pytest.mark.parametrize(
    "body",
    [
        "f = open('x', 'wb')\nwhile True: f.write(bytes(2**20)), f.flush()",
        "i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(2**20))\n    i += 1",
    ],
)
def test_files(body: str) -> None:
    assert attempt(body, Limits(files_mb=4, time_s=PATIENCE_S)) in (None, "OSError")


def test_a_program_that_ends_early_reports_nothing() -> None:
    assert attempt("import os\nos._exit(0)") is None
    assert attempt("import ctypes\nctypes.string_at(0)") is None
    assert run_program("import os; os.write(REPORT_FD, b'guessed')", LONG) is None
    assert run_program("this is no Python", LONG) is None


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert attempt("open('x', 'w').write('a')") == "None"
    assert not list(tmp_path.iterdir())


def test_limits() -> None:
    for limits in ({"time_s": 0.0}, {"memory_mb": 1}, {"files_mb": -1}):
        with pytest.raises(UserError, match=next(iter(limits))):
            Limits(**limits)  # type: ignore[arg-type]


def interpret(program: bytes, call: tuple[int, int, int]) -> int:
    """What a filter answers to a system call: (machine, number, first argument)."""
    import struct

    machine, number, argument = call
    steps = list(struct.iter_unpack("HBBI", program))
    values, at, place = {0: number, 4: machine, 16: argument}, 0, 0
    while True:
        code, on_true, on_false, k = steps[place]
        place += 1
        match code:
            case confined._LOAD:
                at = values[k]
            case confined._RETURN:
                return k
            case confined._EQUAL | confined._AT_LEAST | confined._ANY_BIT:
                holds = {confined._EQUAL: at == k, confined._AT_LEAST: at >= k, confined._ANY_BIT: bool(at & k)}
                place += on_true if holds[code] else on_false


@pytest.mark.parametrize("machine", confined._MACHINES)
def test_the_filter_of_every_machine(machine: str) -> None:
    """Also of machines that the tests do not run on."""
    name, column = confined._MACHINES[machine]
    program = confined.filter_program(machine, pid=77)
    assert len(program) // 8 <= 4096  # BPF_MAXINSNS

    def answer(call: str, argument: int = 0) -> int:
        number = {**confined._NUMBERS, **confined._WITHOUT_EFFECT}[call][column]
        assert number is not None
        return interpret(program, (name, number, argument))

    assert answer("socket") == confined._REFUSE
    assert answer("clone", 17) == confined._REFUSE
    assert answer("clone", confined._CLONE_THREAD | 0x100) == confined._ALLOW
    assert answer("clone3") == confined._UNKNOWN
    assert [answer("kill", pid) for pid in (77, 0, 78)] == [confined._ALLOW, confined._ALLOW, confined._REFUSE]
    assert answer("fchmod") == confined._PASS_OVER
    assert interpret(program, (name, 9999, 0)) == confined._ALLOW
    assert interpret(program, (0x40000003, 1, 0)) == confined._KILL


@pytest.mark.parametrize(
    ("machine", "landlock", "words"),
    [
        ("x86_64", 3, []),
        ("riscv64", 3, ["may start processes"]),
        ("x86_64", 0, ["may read and write all files"]),
    ],
)
def test_what_the_kernel_lacks_is_told(
    machine: str, landlock: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[], str] = platform.machine
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(confined, "landlock_version", lambda: landlock)
    if machine == "x86_64" and (real() != machine or not confined.has_call_filter()):
        pytest.skip("not this machine")
    told = confined.what_is_lacking()
    assert len(told) == len(words)
    assert all(word in text for word, text in zip(words, told, strict=True))


def test_the_numbers_of_the_calls_are_the_kernel_s() -> None:
    """Against the headers, where they are installed."""
    headers = [
        path
        for path in (
            Path(f"/usr/include/{os.uname().machine}-linux-gnu/asm/unistd_64.h"),
            Path("/usr/include/asm/unistd_64.h"),
        )
        if path.is_file()
    ]
    if platform.machine() != "x86_64" or not headers:
        pytest.skip("no headers of the kernel for x86-64")
    words = [line.split() for line in headers[0].read_text().splitlines() if line.startswith("#define __NR_")]
    known = {name.removeprefix("__NR_"): int(number) for _, name, number in words}
    ours = {call: of[0] for call, of in {**confined._NUMBERS, **confined._WITHOUT_EFFECT}.items()}
    assert {call: number for call, number in ours.items() if call in known} == {
        call: known[call] for call in ours if call in known
    }
