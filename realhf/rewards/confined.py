"""Confines the process to a folder, in ways that need no privileges and that nothing can take off again.

It imports nothing but Python's own modules, since a process is confined for each program:

- resource limits (setrlimit): processor time, memory, size of a file, open files;
- a filter of system calls (seccomp), which refuses all that `system_calls` does not name;
- Landlock, from Linux 5.13 on: reads from the system and from Python's folders alone, writes in the folder alone; from
  6.12 on also no signals to processes outside, and no sockets of theirs;
- a file system of its own, as large as the program's files may be, where the kernel grants user namespaces.
"""

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct

from realhf.rewards.system_calls import MACHINES, filter_program

_PR_SET_PDEATHSIG, _PR_GET_SECCOMP, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 21, 22, 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_CAPABILITIES_V3 = 0x20080522
_LAST_CAPABILITY = 63
_LIBC = ctypes.CDLL(None, use_errno=True)

# --- system calls


def has_call_filter() -> bool:
    """Whether this kernel filters system calls, on a machine whose calls are known here."""
    return platform.machine() in MACHINES and _LIBC.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


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
_ACCESS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_NETWORK_ABI, _BIND_AND_CONNECT = 4, 3
_SCOPES_ABI, _SOCKETS_AND_SIGNALS = 6, 3
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


def landlock_attributes(version: int) -> tuple[int, bytes]:
    """The rights to files that a kernel of this version restricts, and the ruleset (linux/landlock.h): files, TCP from
    version 4, sockets and signals of others from version 6."""
    files = _ACCESS_BY_ABI[max(one for one in _ACCESS_BY_ABI if one <= version)]
    fields = [files]
    if version >= _NETWORK_ABI:
        fields.append(_BIND_AND_CONNECT)
    if version >= _SCOPES_ABI:
        fields.append(_SOCKETS_AND_SIGNALS)
    return files, struct.pack(f"{len(fields)}Q", *fields)


def confine_files(folder: str, readable: list[str], *, version: int | None = None) -> None:
    """From now on: all of `folder`, reads below `readable` and the system's folders, and nothing else."""
    handled, attributes = landlock_attributes(landlock_version() if version is None else version)
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


# --- a file system of its own


class NoNamespaceError(Exception):
    """The kernel grants no file system of its own; the process cannot go on."""


def mount_own_files(folder: str, size_bytes: int, entries: int) -> None:
    """Has `folder` be an empty file system that is gone with the process, and that holds no more than this, files that
    have no name any more included. Raises NoNamespaceError."""
    user, group = os.geteuid(), os.getegid()
    try:
        _check(_LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWIPC), "unshare")
        for file, content in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as opened:
                opened.write(content)
        _check(_LIBC.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "mount")
        options = f"size={size_bytes},nr_inodes={entries},mode=700".encode()
        flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
        _check(_LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options), "mount")
    except OSError as error:
        raise NoNamespaceError(str(error)) from None


# --- all together


def missing_protections() -> list[str]:
    """The protections that this kernel grants no process without root, in words. It asks the kernel and starts
    nothing."""
    lacking = []
    if not has_call_filter():
        lacking.append(
            "programs may start processes, and reach the network unless the kernel grants a network namespace"
        )
    if landlock_version() == 0:
        lacking.append("programs may read and write all files that this user may (no Landlock in this kernel)")
    return lacking


def set_limits(limits: dict[str, int]) -> None:
    """Resource limits by their names, none above the limits of the process."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def end_with(parent: int) -> None:
    """The system kills this process when the thread that started it ends, as with its parent; at once if that has."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def confine(folder: str, readable: list[str], limits: dict[str, int], *, has_child: bool = False) -> None:
    """All of it, for this process. Raises OSError for a feature that the kernel has and refuses.

    has_child: the kernel may signal its child, which is to end with it: Landlock's scope would prevent that.
    """
    os.umask(0o077)
    _drop_capabilities()
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if not has_call_filter():
        with contextlib.suppress(OSError):  # missing_protections has said so
            leave_network()
    set_limits(limits)
    if version := landlock_version():
        confine_files(folder, readable, version=min(version, _SCOPES_ABI - 1) if has_child else version)
    if has_call_filter():
        filter_calls()


def _drop_capabilities() -> None:
    """Those of root, and those in a namespace of its own."""
    for capability in range(_LAST_CAPABILITY + 1):
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header, none = struct.pack("Ii", _CAPABILITIES_V3, 0), bytes(24)
    _check(_LIBC.capset(header, none), "capset")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
