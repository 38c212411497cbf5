# SPDX-License-Identifier: Apache-2.0
"""What a process gives up before a model's program begins in it; there is no way back from any of it.

1. its user, where it is root: it becomes a user of its own number, so that the kernel counts its threads apart and no
   file is its own; where it is not root, a user namespace of its own counts them;
2. memory, CPU time, sizes of files, open files and threads beyond its limits;
3. every capability, but to read what the rules of 4 grant wherever it lies;
4. every file but its own folder, the interpreter and the system's libraries (Landlock). It only guards opening, making
   and removing: whether a path exists, and its size and times, can still be read;
5. by a filter of system calls (seccomp), processes, network, and a hand on others:

    call                                    what follows
    socket(), but for AF_UNIX               the process is killed by SIGSYS: the one attempt that ends a program
    fork, vfork, clone of a process         EAGAIN, as at a limit of processes; threads may be made
    clone3                                  ENOSYS: the C library then uses clone, whose flags a filter can read
    io_uring                                ENOSYS: it would pass by this filter
    signals to others, exec, ptrace, ...    EPERM

It needs no rights, no container and no external program: Linux 5.13 with Landlock, on x86-64 or arm64.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import stat
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MEGABYTE = 1 << 20
NETWORK_SIGNAL = signal.SIGSYS

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 8, 22, 38
_CLONE_NEWUSER = 0x10000000
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1 << 1, 1 << 2
_CAPABILITY_VERSION = 0x20080522
# Far above any user's number: each contained process takes this plus its process id.
_FIRST_USER = 1_000_000_000
_CAPGET = {"x86_64": 125, "aarch64": 90}
_CAPSET = {"x86_64": 126, "aarch64": 91}

# What an interpreter and its libraries read on their way up. None of it tells about a run or its user.
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/zero", "/dev/urandom", "/dev/random")

# Landlock: numbers of its calls, and rights.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = _PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_REG, _TRUNCATE = 1 << 8, 1 << 14
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _READ_FILE | _READ_DIR
# Sub-folders, links, devices and sockets are not granted: so a flat listing of the folder tells all that it holds.
_OWN = _READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE

# seccomp: what a filter returns, its operations, and where it finds the facts of a call.
_ALLOW, _KILL, _ERRNO, _FILTER_MODE = 0x7FFF0000, 0x80000000, 0x00050000, 2
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_CLONE_THREAD, _AF_UNIX, _X32 = 0x10000, 1, 0x40000000
_CLONE3, _IO_URING = 435, (425, 426, 427)

# Calls that are refused outright. A machine that lacks one of them has no number for it.
_REFUSED = {
    "x86_64": {
        "exec": (59, 322),
        "signals and other processes": (200, 129, 297, 434, 424, 438, 101, 310, 311, 440, 312),
        "sessions and process groups": (112, 109),
        "priorities": (141, 251, 144, 142, 314),
        "namespaces and mounts": (272, 308, 165, 166, 155, 161, 428, 429, 430, 431, 432, 433, 442),
        "keys, bpf, perf, userfaultfd, personality, syslog": (250, 248, 249, 321, 298, 323, 135, 103),
        "files by handle, notification": (303, 304, 253, 294, 300),
        "memory and disk that outlive a limit": (319, 447, 29, 30, 31, 68, 64, 240, 285),
        "mode, owner, times, attributes, truncate": (
            *(90, 91, 268, 452, 92, 93, 94, 260, 188, 189, 190, 197, 198, 199, 463, 466, 132, 235, 280, 261, 76),
        ),
    },
    "aarch64": {
        "exec": (221, 281),
        "signals and other processes": (130, 138, 240, 434, 424, 438, 117, 270, 271, 440, 272),
        "sessions and process groups": (157, 154),
        "priorities": (140, 30, 119, 118, 274),
        "namespaces and mounts": (97, 268, 40, 39, 41, 51, 428, 429, 430, 431, 432, 433, 442),
        "keys, bpf, perf, userfaultfd, personality, syslog": (219, 217, 218, 280, 241, 282, 92, 116),
        "files by handle, notification": (264, 265, 26, 262),
        "memory and disk that outlive a limit": (279, 447, 194, 195, 196, 186, 190, 180, 47),
        "mode, owner, times, attributes, truncate": (52, 53, 452, 55, 54, 5, 6, 7, 14, 15, 16, 463, 466, 88, 45),
    },
}


class _Machine(NamedTuple):
    audit: int
    forks: tuple[int, ...]
    clone: int
    kill: int
    tgkill: int
    prlimit: int
    prctl: int
    socket: int


_MACHINES = {
    "x86_64": _Machine(0xC000003E, (57, 58), 56, 62, 234, 302, 157, 41),
    "aarch64": _Machine(0xC00000B7, (), 220, 129, 131, 261, 167, 198),
}

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """What one test may use.

    Attributes:
        time_s: CPU time.
        wall_s: time by the clock, for a program that sleeps or waits.
        memory_megabytes: address space, stacks of threads included.
        output_megabytes: each of its streams, and each file it writes.
        folder_megabytes: everything in its folder together; looked at 20 times a second.
        num_files: files in its folder, and files open at the same time.
        num_threads: threads; no other process than the program's own is ever made.
    """

    time_s: float = 4.0
    wall_s: float = 8.0
    memory_megabytes: int = 1024
    output_megabytes: int = 8
    folder_megabytes: int = 32
    num_files: int = 64
    num_threads: int = 32


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def missing() -> str:
    """Why programs cannot be contained here; "" if they can."""
    if not sys.platform.startswith("linux"):
        return f"the system is {sys.platform}, and containment needs Linux"
    if platform.machine() not in _MACHINES:
        return f"the machine is {platform.machine()}, and the filter of system calls knows x86-64 and arm64"
    if landlock_version() == 0:
        return "this kernel has no Landlock, or it is off (Linux 5.13 with landlock in its list of security modules)"
    return ""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def confine(folder: str, limits: Limits, readable: Sequence[str]) -> None:
    """Give all of it up, but to read and write `folder`, and to read the folders of interpreter and packages.

    Raises:
        OSError: the kernel refuses a step. The program must not begin then.
    """
    parent = os.getppid()
    are_threads_counted = _take_own_user(folder)
    _limit(limits)
    _drop_capabilities()
    die_with_parent(parent)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    read_only = [(path, _READ) for path in (*_SYSTEM, *_DEVICES, *readable)]
    confine_files([*read_only, ("/dev/null", _OWN), (folder, _OWN)])
    filter_calls(may_have_threads=are_threads_counted)


def _take_own_user(folder: str) -> bool:
    """Take a user, or a user namespace, of its own; whether the kernel will count this process's threads apart."""
    if os.geteuid() != 0:
        # Some systems forbid it: then nothing bounds the number of threads, and the program gets none.
        return _libc.unshare(_CLONE_NEWUSER) == 0
    user = _FIRST_USER + os.getpid()
    try:
        os.chown(folder, user, user)
        _checked(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl(PR_SET_KEEPCAPS)")
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        # A container that maps few users, or a root without the rights of one. Root's threads are never counted.
        print(f"containment: stays user {os.getuid()}, without threads, since {error}", file=sys.stderr)
        return False
    return True


def _limit(limits: Limits) -> None:
    sizes = {
        resource.RLIMIT_AS: limits.memory_megabytes * MEGABYTE,
        resource.RLIMIT_CPU: max(1, -int(-limits.time_s // 1)),
        resource.RLIMIT_FSIZE: limits.output_megabytes * MEGABYTE,
        resource.RLIMIT_NOFILE: limits.num_files,
        resource.RLIMIT_NPROC: limits.num_threads,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for name, size in sizes.items():
        hard = resource.getrlimit(name)[1]
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(name, (size, size))


def _drop_capabilities() -> None:
    """Drop all of them but one with which an interpreter can be read that lies where only root may.

    It is for the user that root has become; Landlock decides where it counts.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    machine = platform.machine()
    _checked(_libc.syscall(_CAPGET[machine], ctypes.byref(header), ctypes.byref(sets)), "capget")
    held = sets[1] if os.getuid() >= _FIRST_USER else 0
    kept = held & _CAP_DAC_READ_SEARCH or held & _CAP_DAC_OVERRIDE
    sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    _checked(_libc.syscall(_CAPSET[machine], ctypes.byref(header), ctypes.byref(sets)), "capset")


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 where there is none."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)))


def confine_files(rules: Sequence[tuple[str, int]]) -> None:
    """Give up every access to files but that which the rules (path, rights) grant; `no_new_privs` must be set.

    A path that does not exist is left out. OSError: the kernel refuses.
    """
    version = landlock_version()
    # Every right that this kernel can take away is taken away: 13 in version 1, then one in each of 2, 3 and 5.
    handled = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    # TCP, then abstract sockets and signals to others; the filter of system calls holds these where Landlock is older.
    ruleset = _Ruleset(handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = ctypes.c_size_t(24 if version >= 6 else 16 if version >= 4 else 8)
    fd = _checked(_libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), size, ctypes.c_uint32(0)), "Landlock")
    for path, rights in rules:
        try:
            path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        is_folder = stat.S_ISDIR(os.fstat(path_fd).st_mode)
        rule = _PathRule(rights & handled & (-1 if is_folder else _ON_FILES), path_fd)
        number = ctypes.c_long(_ADD_RULE)
        added = _libc.syscall(number, ctypes.c_int(fd), _PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0))
        _checked(added, "Landlock")
        os.close(path_fd)
    _checked(_libc.syscall(_RESTRICT_SELF, ctypes.c_int(fd), ctypes.c_uint32(0)), "Landlock")
    os.close(fd)


def filter_calls(*, may_have_threads: bool) -> None:
    """Put this process under the filter of system calls; `no_new_privs` must be set. OSError: the kernel refuses."""
    name, own_pid = platform.machine(), os.getpid()
    machine = _MACHINES[name]
    steps = [
        _step(_LOAD, _MACHINE_AT),
        _step(_EQUAL, machine.audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
    ]
    steps += [_step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    refused = _ERRNO | errno.EPERM
    for numbers in _REFUSED[name].values():
        steps += [step for number in numbers for step in _rule(number, refused)]
    for number in (_CLONE3, *_IO_URING):
        steps += _rule(number, _ERRNO | errno.ENOSYS)
    at_limit = _ERRNO | errno.EAGAIN
    for number in machine.forks:
        steps += _rule(number, at_limit)
    # The first argument decides: its value (or bits), what is returned for it, and for all others.
    threads = [(_HAS_BITS, _CLONE_THREAD, _ALLOW)] if may_have_threads else []
    itself = [(_EQUAL, own_pid, _ALLOW)]
    steps += _rule(machine.clone, at_limit, *threads)
    steps += _rule(machine.kill, refused, *itself)
    steps += _rule(machine.tgkill, refused, *itself)
    steps += _rule(machine.prlimit, refused, *itself, (_EQUAL, 0, _ALLOW))
    steps += _rule(machine.prctl, _ALLOW, (_EQUAL, _PR_SET_PDEATHSIG, refused))
    steps += _rule(machine.socket, _KILL, (_EQUAL, _AF_UNIX, refused))
    code = b"".join([*steps, _step(_RETURN, _ALLOW)])
    program = _Filter(len(steps) + 1, code)
    _checked(_libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0), "seccomp")


def _rule(number: int, otherwise: int, *cases: tuple[int, int, int]) -> list[bytes]:
    """Steps that decide about the call `number` and go on after it for every other call."""
    block = [_step(_LOAD, _FIRST_ARGUMENT_AT)] if cases else []
    for test, value, verdict in cases:
        block += [_step(test, value, 0, 1), _step(_RETURN, verdict)]
    block.append(_step(_RETURN, otherwise))
    return [_step(_EQUAL, number, 0, len(block)), *block]


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _checked(result: int, call: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
    return result
