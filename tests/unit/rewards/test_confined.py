"""What is asked of the kernel to confine a process: the numbers are those of Linux' headers."""

import ctypes
import errno
import io
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.rewards import confined
from realhf.rewards.system_calls import filter_program


class Kernel:
    """The C library's calls, noted; each returns 0 or what a test says."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[Any, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*words: Any) -> int:
            plain = tuple(getattr(word, "value", word) for word in words)
            self.calls.append((name, *plain))
            return self.results.get((name, plain[0]), self.results.get(name, 0))

        return call


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(confined, "_LIBC", found)
    return found


@pytest.mark.parametrize(
    ("machine", "result", "expected"),
    [("x86_64", 0, True), ("aarch64", 2, True), ("x86_64", -1, False), ("riscv64", 0, False)],
)
def test_whether_calls_can_be_filtered(
    machine: str, result: int, expected: bool, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    kernel.results["prctl"] = result
    assert confined.has_call_filter() == expected
    assert kernel.calls in ([], [("prctl", 21, 0, 0, 0, 0)])  # PR_GET_SECCOMP


def test_the_filter_is_given_to_the_kernel(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """struct sock_fprog: the number of instructions of eight bytes, and where they are."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    program = filter_program("x86_64", os.getpid())
    seen: list[bytes] = []

    def prctl(*words: Any) -> int:
        option, mode, pointer, *rest = words
        assert (option, mode, rest) == (22, 2, [0, 0])  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        count, address = struct.unpack("HxxxxxxP", ctypes.string_at(pointer, 16))
        seen.append(ctypes.string_at(address, 8 * count))
        return 0

    kernel.prctl = prctl  # type: ignore[attr-defined]
    confined.filter_calls()
    assert seen == [program]


def test_a_network_of_its_own(kernel: Kernel) -> None:
    confined.leave_network()
    assert kernel.calls == [("unshare", 0x50000000)]  # CLONE_NEWUSER, CLONE_NEWNET


@pytest.mark.parametrize(("result", "expected"), [(-1, 0), (0, 0), (7, 7)])
def test_the_version_of_landlock(result: int, expected: int, kernel: Kernel) -> None:
    kernel.results["syscall"] = result
    assert confined.landlock_version() == expected
    assert kernel.calls == [("syscall", 444, None, 0, 1)]  # LANDLOCK_CREATE_RULESET_VERSION


READ_FOLDER, READ_FILE = 1 | 4 | 8, 1 | 4  # execute, read files, read folders


@pytest.mark.parametrize("version", [1, 3, 6, None])
def test_rights_to_files(version: int | None, kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its folder but execution, reads elsewhere; rights to a folder's entries are of folders alone."""
    (tmp_path / "own").mkdir()
    (tmp_path / "read").mkdir()
    (tmp_path / "file").touch()
    rules: dict[str, int] = {}
    closed: list[int] = []
    ruleset = os.open(tmp_path, os.O_RDONLY)
    real_close, real_open = os.close, os.open
    flags: set[int] = set()

    def syscall(number: int, *words: Any) -> int:
        if number == 445:  # landlock_add_rule
            given, kind, rule, flags = words
            assert (given, kind, flags) == (ruleset, 1, 0)  # LANDLOCK_RULE_PATH_BENEATH
            rights, file = struct.unpack("=Qi", rule)
            rules[os.readlink(f"/proc/self/fd/{file}")] = rights
            return 0
        plain = tuple(getattr(word, "value", word) for word in words)
        kernel.calls.append((number, *plain))
        return {444: ruleset, 446: 0}[number]

    kernel.syscall = syscall  # type: ignore[attr-defined]
    monkeypatch.setattr(confined, "landlock_version", lambda: 5)
    monkeypatch.setattr(os, "open", lambda path, how: (flags.add(how), real_open(path, how))[1])
    monkeypatch.setattr(os, "close", lambda file: (closed.append(file), real_close(file))[1])
    readable = [str(tmp_path / name) for name in ("read", "file", "missing")]
    confined.confine_files(str(tmp_path / "own"), readable, version=version)
    monkeypatch.undo()
    handled, attributes = confined.landlock_attributes(5 if version is None else version)
    assert kernel.calls == [(444, attributes, len(attributes), 0), (446, ruleset, 0)]
    assert rules[str(tmp_path / "own")] == handled & ~1
    assert rules[str(tmp_path / "read")] == READ_FOLDER
    assert rules[str(tmp_path / "file")] == READ_FILE
    assert rules["/dev/null"] == 2 | 4  # read and write
    assert rules["/usr"] == READ_FOLDER
    assert rules["/dev/urandom"] == READ_FILE
    assert not any(path.endswith("missing") for path in rules)
    assert flags == {0o10000000 | os.O_CLOEXEC}  # O_PATH: what may not be read may be named
    assert closed[-1] == ruleset
    assert len(closed) >= len(rules) + 1  # each that was opened (two may be of one path), and the ruleset


@pytest.mark.parametrize("number", [444, 445, 446])
def test_landlock_that_refuses_is_an_error(number: int, kernel: Kernel, tmp_path: Path) -> None:
    kernel.results[("syscall", number)] = -1
    with pytest.raises(OSError, match="landlock"):
        confined.confine_files(str(tmp_path), [], version=1)


class Files:
    """Those of /proc/self that are written."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []

    def __call__(self, path: str, mode: str) -> Any:
        assert mode == "w"
        written = self.written

        class File(io.StringIO):
            def close(self) -> None:
                if not self.closed:
                    written.append((path, self.getvalue()))
                super().close()

        return File()


def test_a_file_system_of_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files()
    monkeypatch.setattr("builtins.open", files)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 2000)
    confined.mount_own_files("/tmp/x", 5_000_000, 77)
    monkeypatch.undo()
    assert files.written == [
        ("/proc/self/setgroups", "deny"),
        ("/proc/self/uid_map", "1000 1000 1"),
        ("/proc/self/gid_map", "2000 2000 1"),
    ]
    assert kernel.calls == [
        ("unshare", 0x18020000),  # CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWIPC
        ("mount", None, b"/", None, 0x44000, None),  # MS_REC, MS_PRIVATE: nothing goes back to the system
        ("mount", b"tmpfs", b"/tmp/x", b"tmpfs", 0x6, b"size=5000000,nr_inodes=77,mode=700"),  # MS_NOSUID, MS_NODEV
    ]


@pytest.mark.parametrize(("name", "result"), [("unshare", -1), ("mount", -1)])
def test_a_kernel_without_namespaces(name: str, result: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.results[name] = result
    monkeypatch.setattr("builtins.open", Files())
    with pytest.raises(confined.NoNamespaceError, match=name):
        confined.mount_own_files("/tmp/x", 1, 1)


def test_limits_are_not_above_what_the_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    has = {
        resource.RLIMIT_CPU: (3, resource.RLIM_INFINITY),
        resource.RLIMIT_NOFILE: (3, 50),
        resource.RLIMIT_CORE: (0, 50),
    }
    limits: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", has.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", lambda *words: limits.append(words))
    confined.set_limits({"CPU": 9, "NOFILE": 64, "CORE": 7})
    assert limits == [
        (resource.RLIMIT_CPU, (9, 9)),
        (resource.RLIMIT_NOFILE, (50, 50)),
        (resource.RLIMIT_CORE, (7, 7)),
    ]


def test_a_process_ends_with_its_parent(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    confined.end_with(os.getppid())
    assert codes == []
    confined.end_with(os.getppid() + 1)
    assert codes == [1]
    assert kernel.calls == [("prctl", 1, signal.SIGKILL, 0, 0, 0)] * 2  # PR_SET_PDEATHSIG


@pytest.mark.parametrize(
    ("has_filter", "version", "has_child", "steps"),
    [
        (True, 6, False, ["limits", ("files", 6), "filter"]),
        (True, 6, True, ["limits", ("files", 5), "filter"]),  # a scope of signals would keep the child alive
        (True, 3, True, ["limits", ("files", 3), "filter"]),
        (True, 0, False, ["limits", "filter"]),
        (False, 3, False, ["network", "limits", ("files", 3)]),
        (False, 0, True, ["network", "limits"]),
    ],
)
def test_a_process_is_confined_in_every_way_that_the_kernel_has(
    has_filter: bool,
    version: int,
    has_child: bool,
    steps: list[Any],
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []

    def files(folder: str, readable: list[str], *, version: int | None) -> None:
        assert (folder, readable) == ("/tmp/x", ["/opt"])
        done.append(("files", version))

    def network() -> None:
        done.append("network")
        raise PermissionError  # not granted: it goes on

    def limits(given: dict[str, int]) -> None:
        assert given == {"CPU": 3}
        done.append("limits")

    masks: list[int] = []
    monkeypatch.setattr(os, "umask", masks.append)
    monkeypatch.setattr(confined, "_drop_capabilities", lambda: done.append("capabilities"))
    monkeypatch.setattr(confined, "has_call_filter", lambda: has_filter)
    monkeypatch.setattr(confined, "landlock_version", lambda: version)
    monkeypatch.setattr(confined, "leave_network", network)
    monkeypatch.setattr(confined, "set_limits", limits)
    monkeypatch.setattr(confined, "confine_files", files)
    monkeypatch.setattr(confined, "filter_calls", lambda: done.append("filter"))
    if has_child:
        confined.confine("/tmp/x", ["/opt"], {"CPU": 3}, has_child=True)
    else:
        confined.confine("/tmp/x", ["/opt"], {"CPU": 3})
    assert masks == [0o077]
    assert done == ["capabilities", *steps]
    assert kernel.calls == [("prctl", 38, 1, 0, 0, 0)]  # PR_SET_NO_NEW_PRIVS


def test_all_capabilities_are_given_up(kernel: Kernel) -> None:
    """The bound of each that there may be, the ambient ones, and then all three sets of version 3."""
    confined._drop_capabilities()
    header = struct.pack("Ii", 0x20080522, 0)
    assert kernel.calls == [
        *(("prctl", 24, number, 0, 0, 0) for number in range(64)),  # PR_CAPBSET_DROP
        ("prctl", 47, 4, 0, 0, 0),  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
        ("capset", header, bytes(24)),
    ]


def test_a_refusal_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "get_errno", lambda: 13)
    assert confined._check(0, "mount") == 0
    assert confined._check(5, "mount") == 5
    with pytest.raises(PermissionError, match="mount: Permission denied"):
        confined._check(-1, "mount")


def test_the_reason_is_that_of_the_call_that_was_refused() -> None:
    with pytest.raises(OSError, match="close: Bad file descriptor") as caught:
        confined._check(confined._LIBC.close(-1), "close")
    assert caught.value.errno == errno.EBADF


def test_what_a_kernel_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = "programs may start processes, and reach the network unless the kernel grants a network namespace"
    files = "programs may read and write all files that this user may (no Landlock in this kernel)"
    for has_filter, version, lacking in (
        (True, 1, []),
        (False, 1, [calls]),
        (True, 0, [files]),
        (False, 0, [calls, files]),
    ):
        monkeypatch.setattr(confined, "has_call_filter", lambda has=has_filter: has)
        monkeypatch.setattr(confined, "landlock_version", lambda version=version: version)
        assert confined.missing_protections() == lacking
