"""Confines the process to a folder and executes a command: a script of its own, run with `python -I -S`.

It imports nothing but Python's own modules, since it starts once for each program. All confinement is of the kind that
a process may put on itself without privileges, and that nothing it executes can take off again:

- resource limits (setrlimit): processor time, memory, size of a file, open files;
- a filter of system calls (seccomp): no sockets, no processes, no signals to others, no reading of other processes;
- Landlock, from Linux 5.13 on: reads from the system and from Python's folders alone, writes in the folder alone.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys

_PR_SET_PDEATHSIG, _PR_GET_SECCOMP, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 21, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_LAST_CAPABILITY = 63
_LIBC = ctypes.CDLL(None, use_errno=True)

# --- system calls

# By machine: the kernel's name of its calls, and their numbers (asm/unistd.h). A call that a machine lacks is left out.
_MACHINES = {
    "x86_64": (0xC000003E, 0),
    "aarch64": (0xC00000B7, 1),
}
_NUMBERS = {
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
# Landlock lets a process change modes, owners and times of any file of its user. Programs are told that they have.
_WITHOUT_EFFECT = {
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
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
}
# Of these the first argument decides: a process may ask them of itself (0 or its number).
_OF_ITSELF = ("kill", "tgkill", "prlimit64", "sched_setaffinity")
_CLONE_THREAD = 0x00010000
_X32_CALLS = 0x40000000

_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _UNKNOWN, _PASS_OVER = (0x00050000 | error for error in (errno.EPERM, errno.ENOSYS, 0))
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AT_NUMBER, _AT_MACHINE, _AT_ARGUMENT = 0, 4, 16


def filter_program(machine: str, pid: int) -> bytes:
    """The filter's instructions (linux/filter.h) for a process of this number on a machine of `_MACHINES`."""
    name, column = _MACHINES[machine]
    calls = {**_NUMBERS, **_WITHOUT_EFFECT}
    numbers = {call: number for call, of in calls.items() if (number := of[column]) is not None}
    steps = [
        (_LOAD, 0, 0, _AT_MACHINE),
        (_EQUAL, 1, 0, name),
        (_RETURN, 0, 0, _KILL),  # calls of another kind of program have other numbers
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32_CALLS), (_RETURN, 0, 0, _KILL)]
    for call, number in numbers.items():
        if call == "clone3":  # its flags lie in memory, where a filter cannot look: the C library takes clone instead
            rule = [(_RETURN, 0, 0, _UNKNOWN)]
        elif call == "clone":
            rule = [
                (_LOAD, 0, 0, _AT_ARGUMENT),
                (_ANY_BIT, 1, 0, _CLONE_THREAD),
                (_RETURN, 0, 0, _REFUSE),
                (_RETURN, 0, 0, _ALLOW),
            ]
        elif call in _WITHOUT_EFFECT:
            rule = [(_RETURN, 0, 0, _PASS_OVER)]
        elif call in _OF_ITSELF:
            own = [(_EQUAL, 2, 0, pid), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
            rule = [(_LOAD, 0, 0, _AT_ARGUMENT), *own]
        else:
            rule = [(_RETURN, 0, 0, _REFUSE)]
        steps += [(_EQUAL, 0, len(rule), number), *rule]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def has_call_filter() -> bool:
    """Whether this kernel filters system calls, on a machine whose calls are known here."""
    return platform.machine() in _MACHINES and _LIBC.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def filter_calls() -> None:
    program = filter_program(platform.machine(), os.getpid())
    buffer = ctypes.create_string_buffer(program, len(program))
    of = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(of), 0, 0), "seccomp")


def leave_network() -> None:
    """For machines without a filter: a network of its own, without devices. Raises OSError where that needs root."""
    _check(_LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET), "unshare")


# --- files

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READS = _EXECUTE | _READ_FILE | _READ_DIR
_ACCESS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
_SYSTEM_FOLDERS = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/urandom",
    "/dev/random",
    "/dev/zero",
)
_NULL = "/dev/null"
_O_PATH = 0o10000000


def landlock_version() -> int:
    """0 where the kernel has no Landlock."""
    version: int = _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return max(0, version)


def confine_files(folder: str, readable: list[str]) -> None:
    """From now on: all of `folder`, reads below `readable` and the system's folders, and nothing else."""
    handled = _ACCESS_BY_ABI[min(landlock_version(), max(_ACCESS_BY_ABI))]
    attributes = struct.pack("Q", handled)
    ruleset = _check(_LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")
    writable = handled & ~_EXECUTE
    for path, access in [(folder, writable), (_NULL, _READ_FILE | _WRITE_FILE)] + [
        (path, _READS) for path in [*_SYSTEM_FOLDERS, *readable]
    ]:
        try:
            opened = os.open(path, _O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = access if os.path.isdir(path) else access & (_EXECUTE | _WRITE_FILE | _READ_FILE)
        rule = struct.pack("=Qi", allowed & handled, opened)
        _check(_LIBC.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0), f"landlock {path}")
        os.close(opened)
    _check(_LIBC.syscall(_RESTRICT_SELF, ruleset, 0), "landlock")
    os.close(ruleset)


# --- all together


def what_is_lacking() -> list[str]:
    """What this kernel grants no process without root, in words; asked of the kernel without starting anything."""
    lacking = []
    if not has_call_filter():
        lacking.append(
            "programs may start processes, and reach the network unless the kernel grants a network namespace"
        )
    if landlock_version() == 0:
        lacking.append("programs may read and write all files that this user may (no Landlock in this kernel)")
    return lacking


def set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def main(request: str) -> None:
    asked = json.loads(request)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != asked["parent"]:
        os._exit(1)
    os.chdir(asked["folder"])
    os.umask(0o077)
    for capability in range(_LAST_CAPABILITY + 1):  # those of root; what is executed then has none
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    set_limits(asked["limits"])
    if landlock_version():
        confine_files(asked["folder"], asked["readable"])
    if has_call_filter():
        filter_calls()
    else:
        with contextlib.suppress(OSError):  # what_is_lacking has said so
            leave_network()
    os.execve(asked["command"][0], asked["command"], asked["environment"])


if __name__ == "__main__":
    main(sys.argv[1])
