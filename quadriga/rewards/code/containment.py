# SPDX-License-Identifier: Apache-2.0
"""What a process gives up before a model's program begins in it; there is no way back from any of it.

1. its user, where it is root: it becomes a user of its own number, so that the kernel counts its threads apart and no
   file is its own; where it is not root, a user namespace of its own counts them;
2. memory, CPU time, sizes of files, open files and threads beyond its limits;
3. every capability, but to read what the rules of 4 grant wherever it lies;
4. every file but its own folder, the interpreter and the system's libraries (Landlock). It only guards opening, making
   and removing: whether a path exists, and its size and times, can still be read;
5. every system call but those of a list (seccomp, `system_calls`): no other process, no network, no hand on others.

It needs no rights, no container and no external program: Linux 5.13 with Landlock, on x86-64 or arm64. What holds rests
on the list alone, whoever the user is; the kernel adds to it:

    Landlock 1 (Linux 5.13)   files as in 4; cutting a file by its path is refused by 5
    Landlock 2, 3 (5.19, 6.2) moving a file between folders, and cutting it, are Landlock's too
    Landlock 4, 5 (6.7, 6.10) TCP and commands to devices are refused twice, here and by 5
    Landlock 6 (6.12)         signals to others and abstract sockets are refused twice, owners of descriptors included
    root                      a user of its own besides: no signal passes between users, whatever the call
    any other user            the user of the run's other processes: between them stand 5 and, from 6.12, Landlock
"""

import ctypes
import os
import resource
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quadriga.rewards.code.system_calls import filter_calls, is_known_machine, make_call

MEGABYTE = 1 << 20
NETWORK_SIGNAL = signal.SIGSYS

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_SLAVE = 2, 4, 0x4000, 0x80000
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1 << 1, 1 << 2
_CAPABILITY_VERSION = 0x20080522
_FIRST_USER = 1_000_000_000  # far above any user's number: each contained process takes this plus its process id
# What an interpreter and its libraries read on their way up. None of it tells about a run or its user.
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/zero", "/dev/urandom", "/dev/random")

# Landlock's rights.
_VERSION_FLAG = _PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (
    1 << bit for bit in range(6)
)
_MAKE_REG, _TRUNCATE = 1 << 8, 1 << 14
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _READ_FILE | _READ_DIR
# Sub-folders, links, devices and sockets are not granted: so a flat listing of the folder tells all that it holds.
_OWN = _READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE


class Limits(NamedTuple):
    """What one test may use."""

    time_s: float = 4.0  # CPU time
    wall_s: float = 8.0  # time by the clock, for a program that sleeps or waits
    memory_megabytes: int = 1024  # address space, stacks of threads included
    output_megabytes: int = 8  # each of its streams, and each file it writes
    # Everything in its folder together, held by the kernel; where no file system in memory can be had, looked at 20
    # times a second, and no file can be removed.
    folder_megabytes: int = 32
    num_files: int = 64  # files in its folder, and files open at the same time
    num_threads: int = 32  # threads; no other process than the program's own is ever made


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def missing() -> str:
    """Why programs cannot be contained here; "" if they can."""
    if not sys.platform.startswith("linux"):
        return f"the system is {sys.platform}, and containment needs Linux"
    if not is_known_machine():
        return f"the machine is {os.uname().machine}, and the filter of system calls knows x86-64 and arm64"
    if landlock_version() == 0:
        return "this kernel has no Landlock, or it is off (Linux 5.13 with landlock in its list of security modules)"
    return ""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    make_call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def mount_memory(folders: Sequence[os.PathLike[str]], limits: Limits) -> None:
    """Put a small file system in memory on each folder, which only this process and its children see.

    The kernel then holds the limits on a folder, files without a name included, and frees it all with the last of them.
    Raises OSError: the system forbids it. This process may have changed its user namespace, and is of no more use."""
    user, group = os.geteuid(), os.getegid()
    make_call("unshare", _CLONE_NEWNS | (_CLONE_NEWUSER if user else 0))
    if user:
        # Only a user that the namespace knows can own files, or take a namespace in it.
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path("/proc/self", name).write_text(text, encoding="ascii")
    make_call("mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)
    # 0 would be no limit. The folder itself is one of its files.
    size, num_files = max(4096, int(limits.folder_megabytes * MEGABYTE)), int(limits.num_files) + 1
    options = f"size={size},nr_inodes={num_files},mode=700".encode()
    for folder in folders:
        make_call(
            "mount", b"quadriga", os.fsencode(folder), b"tmpfs", _MS_NOSUID | _MS_NODEV, options
        )


def confine(
    folder: str, limits: Limits, readable: Sequence[str], *, may_remove: bool
) -> int | None:
    """Give all of it up, but to read and write `folder`, and to read the folders of interpreter and packages.
    `may_remove`: whether it may remove files from `folder`: those that it keeps open would be counted by nobody.
    Returns what `filter_calls` returns: the listener for refused system calls. Raises OSError: the kernel refuses a
    step. The program must not begin then."""
    parent = os.getppid()
    are_threads_counted = _take_own_user(folder)
    _limit(limits)
    _drop_capabilities()
    die_with_parent(parent)
    make_call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # No other process of its user may attach to it or read its memory.
    make_call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    read_only = [(path, _READ) for path in (*_SYSTEM, *_DEVICES, *readable)]
    confine_files(
        [*read_only, ("/dev/null", _OWN), (folder, _OWN if may_remove else _OWN & ~_REMOVE_FILE)]
    )
    return filter_calls(may_have_threads=are_threads_counted)


def _take_own_user(folder: str) -> bool:
    """Take a user, or a user namespace, of its own; whether the kernel will count this process's threads apart."""
    if os.geteuid() != 0:
        try:
            make_call("unshare", _CLONE_NEWUSER)
        except OSError:
            # Some systems forbid it: then nothing bounds the number of threads, and the program gets none.
            return False
        return True
    user = _FIRST_USER + os.getpid()
    try:
        os.chown(folder, user, user)
        make_call("prctl", _PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        # A container that maps few users, or a root without the rights of one. Root's threads are never counted.
        print(
            f"containment: stays user {os.getuid()}, without threads, since {error}",
            file=sys.stderr,
        )
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
        # Signals that a process blocks are kept, and counted against the whole user.
        resource.RLIMIT_SIGPENDING: limits.num_threads,
    }
    for name, size in sizes.items():
        hard = resource.getrlimit(name)[1]
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(name, (size, size))


def _drop_capabilities() -> None:
    """Drop all but one for the user that root has become: it reads an interpreter that lies where only root may."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    make_call("capget", ctypes.byref(header), ctypes.byref(sets))
    held = sets[1] if os.getuid() >= _FIRST_USER else 0
    kept = held & _CAP_DAC_READ_SEARCH or held & _CAP_DAC_OVERRIDE
    sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    make_call("capset", ctypes.byref(header), ctypes.byref(sets))


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 where there is none."""
    try:
        return make_call("landlock_create_ruleset", None, 0, _VERSION_FLAG)
    except OSError:
        # The kernel is older, or its administrator has left Landlock out.
        return 0


def confine_files(rules: Sequence[tuple[str, int]]) -> None:
    """Give up every access to files but that which the rules (path, rights) grant; `no_new_privs` must be set. A path
    that does not exist is left out. OSError: the kernel refuses."""
    version = landlock_version()
    # Every right that this kernel can take away is taken away: 13 in version 1, then one in each of 2, 3 and 5.
    handled = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    # TCP, then abstract sockets and signals to others; the filter of system calls holds these where Landlock is older.
    ruleset = _Ruleset(handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    fd = make_call("landlock_create_ruleset", ctypes.byref(ruleset), size, 0)
    for path, rights in rules:
        try:
            path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        is_folder = stat.S_ISDIR(os.fstat(path_fd).st_mode)
        rule = _PathRule(rights & handled & (-1 if is_folder else _ON_FILES), path_fd)
        make_call("landlock_add_rule", fd, _PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(path_fd)
    make_call("landlock_restrict_self", fd, 0)
    os.close(fd)
