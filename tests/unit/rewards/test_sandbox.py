"""Programs of unknown origin try what they may not do; each attempt reports what came of it.

Many attempts share one sandbox, since each costs the start of two processes.
"""

# ruff: noqa: E501 (programs on one line)

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from realhf.base.errors import UserError
from realhf.rewards import confined, sandbox, system_calls
from realhf.rewards.sandbox import Limits, remove_tree, run_tests
from tests.waiting import PATIENCE_S, wait_until

LONG = Limits(time_s=PATIENCE_S)
FILTERED = pytest.mark.skipif(not confined.has_call_filter(), reason="this kernel filters no system calls")
LANDLOCKED = pytest.mark.skipif(not confined.landlock_version(), reason="this kernel has no Landlock")
NAMESPACED = pytest.mark.skipif(not sandbox._grants_own_files(), reason="this kernel grants no user namespaces")


def attempts(bodies: Sequence[str], limits: Limits = LONG) -> list[str] | None:
    """What functions of these lines returned or raised, in one sandbox; None if the program was ended before."""
    code = ["def said(f):", "    try:", "        return repr(f())", "    except BaseException as error:"]
    code += ["        return type(error).__name__"]
    for i, body in enumerate(bodies):
        code += [f"def f{i}():", textwrap.indent(textwrap.dedent(body), "    ")]
    found = run_tests("\n".join(code), [f"raise LookupError(said(f{i}))" for i in range(len(bodies))], limits)
    return None if found is None else [one.removeprefix("LookupError: ") for one in found]


def attempt(body: str, limits: Limits = LONG) -> str | None:
    found = attempts([body], limits)
    return None if found is None else found[0]


MAY: dict[str, str] = {
    "return 1": "1",
    "import threading\nt = threading.Thread(target=print)\nt.start()\nreturn t.join()": "None",
    "import asyncio\nasync def g(): return 5\nreturn asyncio.run(g())": "5",
    "from concurrent.futures import ThreadPoolExecutor as P\nwith P(4) as p: return list(p.map(abs, [-1, 2]))": "[1, 2]",
    "import numpy\nreturn int((numpy.ones((50, 50)) @ numpy.ones(50)).sum())": "2500",
    "open('x', 'w').write('a')\nreturn open('x').read()": "'a'",
    "import tempfile\nreturn tempfile.TemporaryFile().write(b'a')": "1",
    "import tempfile\nwith tempfile.TemporaryDirectory() as d: open(d + '/x', 'w').close()": "None",
    "import shutil\nopen('y', 'w').write('abc')\nshutil.copy2('y', 'z')\nreturn open('z').read()": "'abc'",
    "import os\nos.makedirs('p/q')\nos.rename('p/q', 'r')\nos.rmdir('r')\nreturn os.listdir('p')": "[]",
    "import sqlite3\nc = sqlite3.connect('b')\nc.execute('create table t(x)')\nc.commit()\nreturn c.total_changes": "0",
    "import mmap\nm = mmap.mmap(-1, 10)\nm[:1] = b'a'\nreturn m[:1]": "b'a'",
    "import os\nreturn os.kill(os.getpid(), 0)": "None",
    "import signal\nseen = []\nsignal.signal(signal.SIGALRM, lambda *a: seen.append(1))\n"
    "signal.raise_signal(signal.SIGALRM)\nreturn seen": "[1]",
    "import os, fcntl\nr, w = os.pipe()\nos.set_blocking(r, False)\nreturn fcntl.fcntl(r, fcntl.F_GETFL) & 0x800": "2048",
    "import os, fcntl\nwith open('l', 'w') as f: return fcntl.lockf(f, fcntl.LOCK_EX)": "None",
    "import sys\nreturn sys.stdin.read()": "''",
    "import os\nreturn os.isatty(0)": "False",
    "import os\nos.chmod('x', 0o600)\nos.utime('x', (1, 1))": "None",
    "import time, random, hashlib\ntime.sleep(0)\nreturn len(hashlib.sha256(random.randbytes(3)).digest())": "32",
    "import inspect\nreturn inspect.getsource(f0).splitlines()[0]": "'def f0():'",
    "import __main__\nreturn __main__.f0() == 1 and __name__": "'__main__'",
}


def test_what_programs_may_do() -> None:
    assert dict(zip(MAY, attempts(list(MAY)) or [], strict=False)) == MAY


ERRNO = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(number, *(ctypes.c_ulong(a) for a in args))
    return ctypes.get_errno() if result == -1 else 0
"""
# By header: all calls of the kernel; the tests need no list of dangerous ones, since none but the named is allowed.
NAMED = {**system_calls.ALLOWED, **system_calls.WITHOUT_EFFECT, **system_calls.CHECKED}


@FILTERED
def test_the_kernel_refuses_every_call_that_is_not_allowed() -> None:
    column = system_calls.MACHINES[platform.machine()][1]
    own = {335, 336} if platform.machine() == "x86_64" else set()  # the kernel's own, of probes: they end their caller
    numbers = sorted(set(range(520)) - own - {of[column] for of in NAMED.values()})
    assert len(numbers) > 250
    program = ERRNO + f"def errors(): return {{n: call(n, 0, 0, 0, 0, 0, 0) for n in {numbers}}}"
    found = run_tests(program, ["raise LookupError([n for n, e in errors().items() if e not in (1, 38)])"], LONG)
    assert found == ["LookupError: []"]


@FILTERED
def test_the_kernel_refuses_arguments_that_reach_others() -> None:
    column = system_calls.MACHINES[platform.machine()][1]
    number = {name: of[column] for name, of in system_calls.CHECKED.items()}
    parent = "__import__('os').getppid()"
    asked = {
        **{f"fcntl {n}": f"{number['fcntl']}, 0, {n}, 1" for n in (8, 10, 15, 1024, 1026, 1031, 1033, 1036)},
        "fcntl F_SETFL O_ASYNC": f"{number['fcntl']}, 0, 4, 0x2000",
        **{f"ioctl {n:x}": f"{number['ioctl']}, 0, {n}, 0" for n in (0x5452, 0x8901, 0x8902, 0x5412, 0x541D)},
        **{f"prctl {n}": f"{number['prctl']}, {n}, 0, 0, 0, 0" for n in (1, 4, 8, 22, 23, 24, 0x59616D61)},
        "fork": f"{number['clone']}, 17, 0, 0, 0, 0",
        "clone without CLONE_FILES": f"{number['clone']}, 0x3d0b00, 0, 0, 0, 0",
        "new namespace": f"{number['clone']}, 0x10000011, 0, 0, 0, 0",
        **{f"socketpair {n}": f"{number['socketpair']}, {n}, 1, 0, 0" for n in (2, 10, 16)},
        "sendto": f"{number['sendto']}, 0, 0, 0, 0, 4096, 2",
        **{f"kill {who}": f"{number['kill']}, {who}, 0" for who in (parent, "0", "2**64 - 1", "1")},
        "tgkill": f"{number['tgkill']}, {parent}, {parent}, 0",
        "prlimit64": f"{number['prlimit64']}, {parent}, 0, 0, 0",
        "sched_setaffinity": f"{number['sched_setaffinity']}, {parent}, 8, 0",
    }
    program = f"{ERRNO}def errors(): return {{{', '.join(f'{what!r}: call({how})' for what, how in asked.items())}}}"
    found = run_tests(program, ["raise LookupError([n for n, e in errors().items() if e != 1])"], LONG)
    assert found == ["LookupError: []"]


REFUSED = [
    "import socket\nsocket.create_connection(('127.0.0.1', 22))",
    "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 53))",
    "import socket\nsocket.socket(socket.AF_UNIX)",
    "import os\nos.fork()",
    "import subprocess\nsubprocess.run(['/bin/ls'])",
    "import os\nos.execv('/bin/ls', ['ls'])",
    "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
    "import os\nos.kill(os.getppid(), 9)",
    "import os\nos.killpg(0, 9)",
    "import os\nos.kill(-1, 9)",
    "import os\nos.setsid()",
    "import os\nos.setpgid(0, 0)",
    "import os\nos.pidfd_open(os.getppid())",
    "import os\nos.memfd_create('x')",
    "import os\nos.sched_setaffinity(os.getppid(), {0})",
    "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "import os\nos.nice(5)",
    "import os, fcntl\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "import os, fcntl\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETSIG, 9)",
    "import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
    "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=10)",
]


@FILTERED
def test_no_network_and_no_other_processes() -> None:
    found = attempts(REFUSED)
    assert found is not None
    assert {
        body: one for body, one in zip(REFUSED, found, strict=True) if one not in ("PermissionError", "OSError")
    } == {}


OUTSIDE = [
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
    "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')",
    "open('/proc/self/environ').read()",
    "open('/etc/passwd').read()",
    "open('/dev/shm/x', 'w')",
    "open('/usr/x', 'w')",
]


@LANDLOCKED
def test_no_files_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    found = attempts([body.replace("OUTSIDE", str(tmp_path)) for body in OUTSIDE])
    assert found is not None
    assert {
        body: one for body, one in zip(OUTSIDE, found, strict=True) if one not in ("PermissionError", "OSError")
    } == {}
    assert (tmp_path / "secret").read_text() == "secret"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@FILTERED
def test_modes_of_files_outside_stay(tmp_path: Path) -> None:
    before = tmp_path.stat()
    assert attempt(f"import os\nos.chmod('{tmp_path}', 0o777)\nos.utime('{tmp_path}', (1, 1))") == "None"
    after = tmp_path.stat()
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)


def test_no_environment_and_no_descriptors_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has its standard streams and the pipes to the tests; these end with it."""
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    alive = "def alive(n):\n    try: return bool(os.fstat(n)) \n    except OSError: return False\n"
    names, descriptors, limits = attempts(
        [
            "import os\nreturn sorted(os.environ)",
            f"import os\n{alive}return sum(map(alive, range(3, 1000)))",
            "import resource as r\nreturn [r.getrlimit(getattr(r, 'RLIMIT_' + n)) for n in "
            "('CPU', 'AS', 'FSIZE', 'NOFILE', 'CORE', 'MEMLOCK', 'MSGQUEUE')]",
        ],
        Limits(time_s=1400.2, memory_mb=512, files_mb=3),
    ) or ["", "", ""]
    assert names == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']"
    assert descriptors == "2"
    both = [(n, n) for n in (1402, 512 * 2**20, 3 * 2**20, 64, 0, 0, 0)]
    assert limits == repr(both)


def test_no_capabilities() -> None:
    code = """
    import ctypes
    libc = ctypes.CDLL(None)
    return [libc.prctl(39, 0, 0, 0, 0), libc.syscall(125, 0, 0)]
    """
    assert (attempt(code) or "").startswith("[-1, -1]")  # neither may be asked
    status = "import ctypes\nreturn open('/proc/self/status').read()"
    assert attempt(status) in ("PermissionError", "FileNotFoundError")


def test_a_confined_process_has_no_capability_left_and_can_gain_none(tmp_path: Path) -> None:
    """By what the kernel says of it, read by a descriptor from before."""
    child = os.fork()
    if child == 0:
        status = os.open("/proc/self/status", os.O_RDONLY)
        confined.confine(str(tmp_path), [], {})
        lines = dict(line.split(":\t") for line in os.read(status, 8192).decode().splitlines() if ":\t" in line)
        kept = [name for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(lines[name], 16)]
        is_bound = os.geteuid() != 0 or int(lines["CapBnd"], 16) == 0  # only root may lower the bound
        os._exit(0 if not kept and is_bound and lines["NoNewPrivs"] == "1" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_memory() -> None:
    limits = Limits(memory_mb=512, time_s=PATIENCE_S)
    bodies = ["bytearray(2**30)", "x = []\nwhile True: x.append(bytearray(2**20))", "return len(bytearray(2**26))"]
    assert attempts(bodies, limits) == ["MemoryError", "MemoryError", "67108864"]


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


def test_time_of_the_tests_and_of_the_load() -> None:
    assert run_tests("", ["while True: pass"], Limits(time_s=1.0)) is None
    assert run_tests("while True: pass", ["pass"], Limits(time_s=1.0)) is None


UNNAMED = """
    import os
    held, size = [], 0
    while {condition}:
        f = open('x', 'wb', buffering=0)
        os.unlink('x')
        held.append(f)
        size += f.write(bytes(2**19))
    {after}
"""
NAMED_FILES = """
    i = 0
    while {condition}:
        with open(str(i), 'wb', buffering=0) as f: f.write(bytes(2**19))
        i += 1
    {after}
"""
COUNTED = """
    size, held = 0, []
    try:
        for i in range(50):
            f = open(str(i), 'wb', buffering=0)
            held.append(f)
            HOW
            size += f.write(bytes(2**19))
    except OSError: pass
    return size / 2**20
"""


@NAMESPACED
def test_files_in_a_file_system_of_its_own() -> None:
    """With names or without: 4 MiB, and a quarter for what a file system needs besides."""
    for how in ("pass", "import os; os.unlink(str(i))"):
        written = float(attempt(COUNTED.replace("HOW", how), Limits(files_mb=4, time_s=PATIENCE_S)) or 0)
        assert 4 <= written <= 4.5
    many = "i = 0\ntry:\n    while True: open(str(i), 'w').close(); i += 1\nexcept OSError: return i"
    one, folders = attempts([many, "import os\nos.mkdir('d')"], Limits(files_mb=1, time_s=PATIENCE_S)) or ["", ""]
    assert 256 <= int(one) <= 256 + 64
    assert folders == "OSError"


@pytest.mark.parametrize("own_files", [False, pytest.param(True, marks=NAMESPACED)])
def test_files(own_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_grants_own_files", lambda: own_files)
    limits = Limits(files_mb=4, time_s=PATIENCE_S)
    for body in (UNNAMED, NAMED_FILES):
        # A bound of what the program tries, so that a limit that does not hold costs no disk.
        assert attempt(body.format(condition="True", after=""), limits) in (None, "OSError")
    assert attempt("open('x', 'wb', buffering=0).write(bytes(5 * 2**20))\nreturn 1", limits) in (None, "OSError", "1")
    no_files = Limits(files_mb=0, time_s=PATIENCE_S)
    assert attempts(["return 1", "open('x', 'wb', buffering=0).write(b'a')"], no_files) == ["1", "OSError"]


def test_the_size_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "with open('x', 'wb', buffering=0) as f: return [f.write(bytes(3 * 2**20)) for _ in range(2)]"
    assert attempt(body, Limits(files_mb=4, time_s=PATIENCE_S)) == "[3145728, 1048576]"


def test_what_files_take(tmp_path: Path) -> None:
    """Files with a name, by their size and a page at least; those without by their size."""
    folder = str(tmp_path)
    assert sandbox._used_bytes(folder, 10) == 0
    (tmp_path / "a").write_bytes(bytes(10_000))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "b").write_bytes(b"b")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert sandbox._used_bytes(folder, 4) == 10_000 + 3 * 4096
    assert sandbox._used_bytes(folder, 3) == float("inf")
    with open(tmp_path / "c", "wb", buffering=0) as held:
        held.write(bytes(5_000))
        assert sandbox._unnamed_bytes(os.getpid(), folder) == 0
        (tmp_path / "c").unlink()
        assert sandbox._unnamed_bytes(os.getpid(), folder) == 5_000
        with open(tmp_path / "m", "w+b", buffering=0) as file:
            file.write(bytes(4096))
            mapped = mmap.mmap(file.fileno(), 4096)
        (tmp_path / "m").unlink()
        assert sandbox._unnamed_bytes(os.getpid(), folder) == float("inf")
        mapped.close()
    assert sandbox._unnamed_bytes(os.getpid(), folder) == 0


@FILTERED
def test_no_more_threads_than_a_user_can_spare() -> None:
    body = """
    import threading
    threading.stack_size(2**15)
    for _ in range(5000): threading.Thread(target=threading.Event().wait, daemon=True).start()
    while True: pass
    """
    assert attempt(body) in (None, "RuntimeError")


NAME = "d" * 10


def deep(folder: Path, depth: int) -> None:
    """Folders within folders, deeper than a path can name."""
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(NAME, dir_fd=at)
        below = os.open(NAME, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)


def test_what_a_program_leaves_is_removed_however_deep(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = tmp_path / "tree"
    tree.mkdir()
    deep(tree, 1200)
    (tree / "link").symlink_to(outside)
    (tree / NAME / "link").symlink_to(outside)
    (tree / "closed").mkdir(mode=0)
    (tree / "closed2").mkdir()
    (tree / "closed2" / "below").mkdir(mode=0)
    os.mkfifo(tree / "fifo")
    remove_tree(str(tree))
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (outside / "kept").exists()


def test_the_removal_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox, "_MOST_ENTRIES", 3)
    (tmp_path / "tree").mkdir()
    deep(tmp_path / "tree", 10)
    remove_tree(str(tmp_path / "tree"))
    assert f"{tmp_path / 'tree'} is left" in caplog.text


@pytest.mark.parametrize("own_files", [False, pytest.param(True, marks=NAMESPACED)])
def test_nothing_is_left_behind(own_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "_grants_own_files", lambda: own_files)
    body = "import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\nopen('x', 'w').write('a')"
    assert attempt(body, Limits(time_s=PATIENCE_S, files_mb=64)) == "None"
    assert not list(tmp_path.iterdir())


def test_a_program_that_ends_early_passes_nothing() -> None:
    assert attempt("import os\nos._exit(0)") is None
    assert attempt("import ctypes\nctypes.string_at(0)") is None
    assert run_tests("this is no Python", ["pass"], LONG) is None
    assert run_tests("1 / 0", ["pass"], LONG) is None
    assert run_tests("import sys\nsys.exit(0)", ["pass"], LONG) is None


def test_outcomes_are_in_the_order_of_the_tests() -> None:
    found = run_tests("x = 1", ["assert x == 1", "assert x == 2, 'no'", "y", "def", "assert x == 1"], LONG)
    assert found is not None
    assert [one.splitlines()[-1:] for one in found] == [
        [],
        ["AssertionError: no"],
        ["NameError: name 'y' is not defined"],
        ["SyntaxError: invalid syntax"],
        [],
    ]


def test_a_sandbox_ends_with_its_worker() -> None:
    """However that ends, and though the program never reads what the tests' process says."""
    code = "from realhf.rewards.sandbox import *; run_tests('while True: pass', [''], Limits(time_s=3000))"
    worker = psutil.Popen([sys.executable, "-c", code])
    found: dict[int, psutil.Process] = {}

    def has_program() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that only looks what the kernel grants
            found.update({one.pid: one for one in worker.children(recursive=True)})
            return any(one.cpu_times().user > 0.3 and not one.children() for one in found.values())
        found.clear()
        return False

    wait_until(has_program)
    worker.kill()
    worker.wait()
    wait_until(lambda: not any(one.is_running() and one.status() != "zombie" for one in found.values()))


def test_limits() -> None:
    for limits in ({"time_s": 0.0}, {"memory_mb": 1}, {"files_mb": -1}):
        with pytest.raises(UserError, match=next(iter(limits))):
            Limits(**limits)  # type: ignore[arg-type]


def test_no_folder_for_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(UserError, match="set TMPDIR"):
        run_tests("", ["pass"], LONG)


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
    told = confined.missing_protections()
    assert len(told) == len(words)
    assert all(word in text for word, text in zip(words, told, strict=True))


def test_programs_get_files_of_their_own_wherever_this_kernel_grants_them() -> None:
    words = ["unshare", "--user", "--mount", "--ipc", "--map-current-user", "true"]
    if not shutil.which(words[0]):
        pytest.skip("no unshare")
    granted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    assert sandbox._grants_own_files() == granted


def test_the_ruleset_of_every_version_of_landlock() -> None:
    """linux/landlock.h: rights to files, since 4 bind and connect of TCP, since 6 abstract sockets and signals."""
    files = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF, 6: 0xFFFF, 9: 0xFFFF}
    fields = {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 9: 3}
    for version, rights in files.items():
        handled, attributes = confined.landlock_attributes(version)
        assert handled == rights
        expected = [rights, 3, 3][: fields[version]]
        assert attributes == b"".join(number.to_bytes(8, "little") for number in expected)


@pytest.mark.skipif(confined.landlock_version() < 6, reason="this kernel's Landlock has no scopes")
def test_signals_and_sockets_of_others_are_out_of_scope_even_without_the_filter() -> None:
    """In a forked process that Landlock alone confines."""
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0realhf-" + os.urandom(8))
        listener.listen()
        address, parent = listener.getsockname(), os.getpid()
        child = os.fork()
        if child == 0:
            results = []
            ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
            confined.confine_files("/tmp", [])
            for trial in (lambda: os.kill(parent, 0), lambda: socket.socket(socket.AF_UNIX).connect(address)):
                try:
                    trial()
                    results.append(0)
                except OSError as error:
                    results.append(error.errno or 0)
            os._exit(0 if results == [errno.EPERM, errno.EPERM] else 1)
        assert os.waitpid(child, 0)[1] == 0
