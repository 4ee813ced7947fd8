"""The system calls that a confined process may make, and the filter (seccomp) that refuses all others.

A call is refused unless it is named here: what reaches other processes, the network, kernel objects that outlive the
process (queues, shared memory, keys) or new parts of the kernel is refused without being known by name.
"""

import errno
import struct
from collections.abc import Callable, Mapping

# By machine: the kernel's name of its calls, and the column of their numbers (asm/unistd.h).
MACHINES: Mapping[str, tuple[int, int]] = {
    "x86_64": (0xC000003E, 0),
    "aarch64": (0xC00000B7, 1),
}
Numbers = Mapping[str, tuple[int | None, int | None]]
"""By call its number on each machine; None where a machine lacks it."""

# Calls that touch the process itself, its own descriptors, and files (which Landlock confines). The first ones are
# those that programs make most: the filter looks in this order.
ALLOWED: Numbers = {
    "futex": (202, 98),
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "lseek": (8, 62),
    "openat": (257, 56),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "brk": (12, 214),
    "mremap": (25, 216),
    "rt_sigprocmask": (14, 135),
    "rt_sigaction": (13, 134),
    "rt_sigreturn": (15, 139),
    "clock_gettime": (228, 113),
    "gettid": (186, 178),
    "getpid": (39, 172),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "getdents64": (217, 61),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "epoll_ctl": (233, 21),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "eventfd": (284, None),
    "eventfd2": (290, 19),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "close_range": (436, 436),
    "shutdown": (48, 210),
    "recvfrom": (45, 207),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
    "open": (2, None),
    "creat": (85, None),
    "stat": (4, None),
    "lstat": (6, None),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents": (78, None),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "umask": (95, 166),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "msync": (26, 227),
    "flock": (73, 32),
    "fadvise64": (221, 223),
    "readahead": (187, 213),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "fgetxattr": (193, 10),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    "mincore": (27, 232),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "getrandom": (318, 278),
    "getcpu": (309, 168),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "getpriority": (140, 141),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, None),
    "timer_create": (222, 107),
    "timer_settime": (223, 110),
    "timer_gettime": (224, 108),
    "timer_getoverrun": (225, 109),
    "timer_delete": (226, 111),
    "pause": (34, None),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "getppid": (110, 173),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),  # the hard limits are as low as the others
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "wait4": (61, 260),  # it has no children to wait for
    "waitid": (247, 95),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
# Landlock lets a process change modes, owners and times of any file of its user. Programs are told that they have.
WITHOUT_EFFECT: Numbers = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
# Allowed with some arguments alone, see `_checked`.
CHECKED: Numbers = {
    "clone": (56, 220),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "socketpair": (53, 199),
    "sendto": (44, 206),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
}
# Its flags lie in memory, where a filter cannot look. The C library takes clone where this call is unknown.
CLONE3 = 435
# A call above is newer than this table: unknown, so that libraries take an older one.
NEWEST = 452

# The flags of a new thread, as glibc and musl have them: it shares memory, descriptors and all else with its process.
THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
O_ASYNC = 0x2000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_GETLK, F_SETLK, F_SETLKW, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW,
# F_DUPFD_CLOEXEC, F_GETPIPE_SZ. F_SETFL is allowed without O_ASYNC. Others send signals, or outlive a descriptor.
FCNTL_COMMANDS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1032)
F_SETFL = 4
# TCGETS, TCGETS2 (isatty), TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX, FIONCLEX
IOCTL_REQUESTS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5451, 0x5450)
# PR_SET_NAME, PR_GET_NAME, PR_SET_VMA (names of memory). Not PR_SET_PDEATHSIG: the process ends with its parent.
PRCTL_OPTIONS = (15, 16, 0x53564D41)
AF_UNIX = 1

ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN, PASS_OVER = (0x00050000 | error for error in (errno.EPERM, errno.ENOSYS, 0))
LOAD, EQUAL, AT_LEAST, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
AT_NUMBER, AT_MACHINE, AT_ARGUMENTS = 0, 4, 16
_X32_CALLS = 0x40000000

Step = tuple[int, int, int, int]
"""An instruction (linux/filter.h): code, steps to pass over if true, if false, operand."""


def filter_program(machine: str, pid: int) -> bytes:
    """The filter's instructions for a process of this number on a machine of `MACHINES`."""
    name, column = MACHINES[machine]
    steps: list[Step] = [
        (LOAD, 0, 0, AT_MACHINE),
        (EQUAL, 1, 0, name),
        (RETURN, 0, 0, KILL),  # calls of another kind of program have other numbers
        (LOAD, 0, 0, AT_NUMBER),
    ]
    if machine == "x86_64":
        steps += [(AT_LEAST, 0, 1, _X32_CALLS), (RETURN, 0, 0, KILL)]
    rules: list[tuple[Numbers, Callable[[str], list[Step]]]] = [
        (ALLOWED, lambda _: [(RETURN, 0, 0, ALLOW)]),
        (CHECKED, lambda call: _checked(call, pid)),
        (WITHOUT_EFFECT, lambda _: [(RETURN, 0, 0, PASS_OVER)]),
        ({"clone3": (CLONE3, CLONE3)}, lambda _: [(RETURN, 0, 0, UNKNOWN)]),
    ]
    for calls, rule_of in rules:
        for call, numbers in calls.items():
            if (number := numbers[column]) is not None:
                rule = rule_of(call)
                steps += [(EQUAL, 0, len(rule), number), *rule]
    steps += [(ABOVE, 0, 1, NEWEST), (RETURN, 0, 0, UNKNOWN), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _checked(call: str, pid: int) -> list[Step]:
    match call:
        case "clone":
            return _high_is_zero(0) + _one_of(0, THREAD_FLAGS)
        case "fcntl":
            without_async: list[Step] = [
                *_load(2),
                (ANY_BIT, 0, 1, O_ASYNC),
                (RETURN, 0, 0, REFUSE),
                (RETURN, 0, 0, ALLOW),
            ]
            is_set_flags: Step = (EQUAL, 0, len(without_async), F_SETFL)
            return [*_load(1), is_set_flags, *without_async, *_one_of(1, FCNTL_COMMANDS)]
        case "ioctl":
            return _one_of(1, IOCTL_REQUESTS)
        case "prctl":
            return _one_of(0, PRCTL_OPTIONS)
        case "socketpair":
            return _one_of(0, (AF_UNIX,))
        case "sendto":  # without an address: sockets of files are not Landlock's matter
            return [*_load(4, high=True), (EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE), *_one_of(4, (0,))]
        case "kill" | "tgkill":
            return _one_of(0, (pid,))
        case _:  # 0 means the process itself
            return _one_of(0, (pid, 0))


def _load(argument: int, *, high: bool = False) -> list[Step]:
    """Half of an argument: its low 32 bits, or the high ones. All machines are little-endian."""
    return [(LOAD, 0, 0, AT_ARGUMENTS + 8 * argument + 4 * high)]


def _high_is_zero(argument: int) -> list[Step]:
    return [*_load(argument, high=True), (EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE)]


def _one_of(argument: int, values: tuple[int, ...]) -> list[Step]:
    """Allows the call if the argument's low half, which is all that the kernel reads of an int, is one of these."""
    tests: list[Step] = [(EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*_load(argument), *tests, (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
