# SPDX-License-Identifier: Apache-2.0
"""What a process gives up before a model's program begins in it; there is no way back from any of it.

1. its user, where it is root: it becomes a user of its own number, so that the kernel counts its threads apart and no
   file is its own; where it is not root, a user namespace of its own counts them;
2. memory, CPU time, sizes of files, open files and threads beyond its limits;
3. every capability, but to read what the rules of 4 grant wherever it lies;
4. every file but its own folder, the interpreter and the system's libraries (`landlock.py`);
5. processes, network, signals to others, exec (`seccomp.py`).

It needs no rights, no container and no external program: Linux 5.13 with Landlock, on x86-64 or arm64.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quadriga.rewards.code import landlock, seccomp

MEGABYTE = 1 << 20

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 8, 38
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
        num_threads: threads; processes beside the program's own are never made.
    """

    time_s: float = 4.0
    wall_s: float = 8.0
    memory_megabytes: int = 1024
    output_megabytes: int = 8
    folder_megabytes: int = 32
    num_files: int = 64
    num_threads: int = 32


def missing() -> str:
    """Why programs cannot be contained here; "" if they can."""
    if not sys.platform.startswith("linux"):
        return f"the system is {sys.platform}, and containment needs Linux"
    if not seccomp.is_known_machine():
        return f"the machine is {os.uname().machine}, and the filter of system calls knows x86-64 and arm64"
    if landlock.abi_version() == 0:
        return "this kernel has no Landlock, or it is off (Linux 5.13 with landlock in its list of security modules)"
    return ""


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def confine(folder: str, limits: Limits, readable: Sequence[str]) -> None:
    """Give all of it up.

    Args:
        folder: stays this process's to read and write.
        limits: that it runs under.
        readable: folders that it may read besides the system's: where the interpreter and its packages lie.

    Raises:
        OSError: the kernel refuses a step. The program must not begin then.
    """
    parent = os.getppid()
    are_threads_counted = _become_nobody(folder)
    _limit(limits)
    _drop_capabilities()
    die_with_parent(parent)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    read_only = [(path, landlock.READ) for path in (*_SYSTEM, *_DEVICES, *readable)]
    landlock.confine([*read_only, ("/dev/null", landlock.OWN), (folder, landlock.OWN)])
    seccomp.confine(may_have_threads=are_threads_counted)


def _become_nobody(folder: str) -> bool:
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
    machine = os.uname().machine
    _checked(_libc.syscall(_CAPGET[machine], ctypes.byref(header), ctypes.byref(sets)), "capget")
    held = sets[1] if os.getuid() >= _FIRST_USER else 0
    kept = held & _CAP_DAC_READ_SEARCH or held & _CAP_DAC_OVERRIDE
    sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    _checked(_libc.syscall(_CAPSET[machine], ctypes.byref(header), ctypes.byref(sets)), "capset")


def _checked(result: int, call: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
