"""The filter of system calls, as the kernel would interpret it: also of machines that the tests do not run on."""

import errno
import platform
import re
import struct
from pathlib import Path

import pytest

from realhf.rewards import system_calls as calls

PID = 77
# The list is a decision: nothing comes to it by accident. Each touches the process itself, its descriptors, or files.
ALLOWED_TEXT = """
    access alarm brk chdir clock_getres clock_gettime clock_nanosleep close close_range copy_file_range creat
    dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2
    exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fdatasync fgetxattr flistxattr flock fstat
    fstatfs fsync ftruncate futex getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer
    getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage
    getsid getsockname getsockopt gettid gettimeofday getuid getxattr lgetxattr link linkat listxattr
    llistxattr lseek lstat madvise membarrier mincore mkdir mkdirat mmap mprotect mremap msync munmap
    nanosleep newfstatat open openat pause pipe pipe2 poll ppoll pread64 preadv preadv2 pselect6 pwrite64
    pwritev pwritev2 read readahead readlink readlinkat readv recvfrom rename renameat renameat2
    restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend
    rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam
    sched_getscheduler sched_yield select sendfile set_robust_list set_tid_address setitimer setrlimit
    shutdown sigaltstack stat statfs statx symlink symlinkat sysinfo time timer_create timer_delete
    timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times truncate
    umask uname unlink unlinkat wait4 waitid write writev
"""
ALLOWED = ALLOWED_TEXT.split()
WITHOUT_EFFECT_TEXT = """
    chmod chown fchmod fchmodat fchmodat2 fchown fchownat fremovexattr fsetxattr futimesat lchown lremovexattr
    lsetxattr removexattr setxattr utime utimensat utimes
"""
WITHOUT_EFFECT = WITHOUT_EFFECT_TEXT.split()
ONLY_ITSELF = ("kill", "tgkill", "prlimit64", "sched_setaffinity")
THREAD = 0x3D0F00


def interpret(program: bytes, machine: int, number: int, arguments: tuple[int, ...]) -> int:
    """What a filter answers to a system call (linux/filter.h, struct seccomp_data)."""
    data = struct.pack("<iIQ6Q", number, machine, 0, *(arguments + (0,) * 6)[:6])
    steps = list(struct.iter_unpack("HBBI", program))
    at, place = 0, 0
    while True:
        code, on_true, on_false, k = steps[place]
        place += 1
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            [at] = struct.unpack_from("<I", data, k)
        elif code == 0x06:  # BPF_RET
            return k
        else:  # BPF_JMP: JEQ, JGE, JGT, JSET
            holds = {0x15: at == k, 0x35: at >= k, 0x25: at > k, 0x45: bool(at & k)}[code]
            place += on_true if holds else on_false


class Filter:
    """Answers to calls by their names."""

    def __init__(self, machine: str):
        self.name, self.column = calls.MACHINES[machine]
        self.program = calls.filter_program(machine, PID)

    def number(self, call: str) -> int | None:
        return {**calls.ALLOWED, **calls.WITHOUT_EFFECT, **calls.CHECKED}[call][self.column]

    def answer(self, call: str | int, *arguments: int) -> str:
        number = self.number(call) if isinstance(call, str) else call
        assert number is not None
        answer = interpret(self.program, self.name, number, arguments)
        return {
            0x7FFF0000: "allow",
            0x80000000: "kill",
            0x00050000: "pass over",
            0x00050000 | errno.EPERM: "refuse",
            0x00050000 | errno.ENOSYS: "unknown",
        }[answer]


@pytest.fixture(params=["x86_64", "aarch64"], scope="module")
def of(request: pytest.FixtureRequest) -> Filter:
    return Filter(request.param)


def test_what_is_allowed_is_a_decision() -> None:
    assert sorted(calls.ALLOWED) == ALLOWED
    assert sorted(calls.WITHOUT_EFFECT) == WITHOUT_EFFECT
    assert sorted(calls.CHECKED) == sorted((*ONLY_ITSELF, "clone", "fcntl", "ioctl", "prctl", "sendto", "socketpair"))


def test_every_number_that_is_not_named_is_refused(of: Filter) -> None:
    assert len(of.program) // 8 <= 4096  # BPF_MAXINSNS
    expected = dict.fromkeys(range(453), "refuse") | dict.fromkeys((*range(453, 1200), 0x3FFFFFFF), "unknown")
    expected[435] = "unknown"  # clone3
    for names, answer in ((ALLOWED, "allow"), (WITHOUT_EFFECT, "pass over")):
        expected |= {number: answer for name in names if (number := of.number(name)) is not None}
    checked = {of.number(name) for name in calls.CHECKED}
    # A file descriptor, pid or option that nothing allows.
    wrong = (0x123456, 0x123456, 0x123456, 0x123456, 0x123456)
    assert {n: of.answer(n, *wrong) for n in expected} == expected | dict.fromkeys(checked, "refuse")


def test_calls_of_another_kind_of_program_end_the_process(of: Filter) -> None:
    assert interpret(of.program, 0x40000003, 1, ()) == 0x80000000  # i386's
    if of.name == 0xC000003E:
        assert of.answer(0x40000000) == of.answer(0x40000001) == "kill"  # x32's


@pytest.mark.parametrize("call", ONLY_ITSELF)
def test_calls_that_a_process_may_ask_of_itself(of: Filter, call: str) -> None:
    assert of.answer(call, PID) == "allow"
    assert of.answer(call, 0) == ("refuse" if "kill" in call else "allow")  # of signals: its group
    for other in (1, PID - 1, PID + 1, 2**32 - 1, 2**32 - PID):
        assert of.answer(call, other) == "refuse"


def test_threads_but_no_processes(of: Filter) -> None:
    assert of.answer("clone", 0x3D0F00) == of.answer("clone", 0x7D0F00) == "allow"  # glibc's, musl's
    for bit in range(64):
        flags = THREAD ^ 1 << bit
        assert of.answer("clone", flags) == ("allow" if flags == 0x7D0F00 else "refuse"), hex(flags)
    assert of.answer("clone", 17) == "refuse"  # SIGCHLD: fork


def test_commands_of_fcntl(of: Filter) -> None:
    """Those of fcntl.h: not F_SETOWN, F_GETOWN, F_SETSIG, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ, F_ADD_SEALS, hints."""
    allowed = {0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032}
    assert {command for command in range(2000) if of.answer("fcntl", 3, command, 0) == "allow"} == allowed
    assert {command for command in range(2000) if of.answer("fcntl", 3, command, 0x2000) == "allow"} == allowed - {4}
    assert of.answer("fcntl", 3, 4, 0x800) == "allow"  # F_SETFL, O_NONBLOCK
    assert of.answer("fcntl", 3, 4, 0x2800) == "refuse"  # with O_ASYNC


def test_requests_of_ioctl(of: Filter) -> None:
    allowed = {request for request in (*range(0x5000, 0x9000), 0x802C542A) if of.answer("ioctl", 3, request) == "allow"}
    assert allowed == {0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5451, 0x5450}


def test_options_of_prctl(of: Filter) -> None:
    assert {n for n in (*range(100), 0x53564D41, 0x59616D61) if of.answer("prctl", n) == "allow"} == {
        15,
        16,
        0x53564D41,
    }


def test_sockets_are_pairs_without_addresses(of: Filter) -> None:
    assert [domain for domain in range(64) if of.answer("socketpair", domain) == "allow"] == [1]
    assert of.answer("sendto", 3, 4096, 1, 0, 0, 0) == "allow"
    assert of.answer("sendto", 3, 4096, 1, 0, 4096, 16) == "refuse"
    assert of.answer("sendto", 3, 4096, 1, 0, 2**32, 16) == "refuse"


HEADERS = {
    "x86_64": [f"/usr/include/{platform.machine()}-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"],
    "aarch64": ["/usr/include/asm-generic/unistd.h"],
}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_the_calls_are_the_kernel_s(machine: str) -> None:
    """Against the headers, where they are installed."""
    headers = [Path(path) for path in HEADERS[machine] if Path(path).is_file()]
    if not headers or (machine == "x86_64" and platform.machine() != machine):
        pytest.skip("no headers of the kernel")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", headers[0].read_text(), re.MULTILINE)
    known = {{"fstatat": "newfstatat"}.get(name, name): int(number) for name, number in found}
    ours = {**calls.ALLOWED, **calls.WITHOUT_EFFECT, **calls.CHECKED, "clone3": (calls.CLONE3, calls.CLONE3)}
    known.setdefault("fchmodat2", 452)  # newer than the headers of some distributions; one number on all machines
    column = calls.MACHINES[machine][1]
    assert {name: of[column] for name, of in ours.items()} == {name: known.get(name) for name in ours}
