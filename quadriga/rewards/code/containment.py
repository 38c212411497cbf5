# SPDX-License-Identifier: Apache-2.0
"""Containment: the rights that a process gives up, for good, before a model's program begins in it.

1. Its user, if it is root: it takes a user id of its own, so that the kernel counts its threads
   separately and no file belongs to it. If it is not root, it is counted in a new user namespace.
2. Memory, CPU time, sizes of files, open files and threads beyond its limits.
3. Every capability, except the one to read files, wherever they lie, that the rules of 4 grant.
4. Every file except its own folder, the interpreter and the system's libraries (Landlock). This
   guards only opening, making and removing: whether a path exists, its size and its times can still
   be read.
5. Every system call that is not on a list (seccomp, `system_calls`): it reaches no other process
   and no network.

This needs no rights, no container and no external program, only Linux 5.13 with Landlock, on x86-64
or arm64. The containment rests on the list alone, whoever the user is; the kernel adds to it:

    Landlock 1 (Linux 5.13)    files as in 4; cutting a file by its path is refused by 5
    Landlock 2, 3 (5.19, 6.2)  moving a file between folders, and cutting it, are guarded too
    Landlock 4, 5 (6.7, 6.10)  TCP and commands to devices are refused twice, here and by 5
    Landlock 6 (6.12)          signals to others and abstract sockets are refused twice, owners of
                               descriptors included
    root                       a separate user id besides: no call signals another user's process
    any other user             shares its user id with the run's other processes: only 5 and, from
                               6.12 on, Landlock stand between them
"""

import ctypes
import math
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

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNS = 0x20000
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_REC = 0x4000
_MS_SLAVE = 0x80000
_CAP_DAC_OVERRIDE = 1 << 1
_CAP_DAC_READ_SEARCH = 1 << 2
_CAPABILITY_VERSION = 0x20080522
# Far above any user's id. A contained process takes this plus its process id.
_FIRST_USER = 1_000_000_000
# Read by an interpreter and its libraries at their start. Nothing there is about a run or user.
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/zero", "/dev/urandom", "/dev/random")

# Landlock's flags and rights.
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REMOVE_FILE = 1 << 5
_MAKE_REG = 1 << 8
_TRUNCATE = 1 << 14
# All that is granted on files, and on folders. Folders may hold no sub-folders, links, devices and
# sockets, so that a flat listing of a folder shows everything in it.
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _READ_FILE | _READ_DIR
_OWN = _READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE


class ResourceLimits(NamedTuple):
    """The resources that one test may use."""

    time_s: float = 4.0  # CPU time
    wall_s: float = 8.0  # time by the clock, for a program that sleeps or waits
    memory_megabytes: int = 1024  # address space, stacks of threads included
    output_megabytes: int = 8  # each of its streams, and each file it writes
    # All files of its folder together. The kernel keeps to it; if no file system in memory can be
    # had, the folder is checked 20 times a second, and no file can be removed.
    folder_megabytes: int = 32
    num_files: int = 64  # files in its folder, and files open at the same time
    num_threads: int = 32  # threads; a program never gets a second process


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
    """Why programs cannot be contained on this machine; "" if they can."""
    if not sys.platform.startswith("linux"):
        return f"the system is {sys.platform}, and containment needs Linux"
    if not is_known_machine():
        machine = os.uname().machine
        return f"the machine is {machine}, and the filter of system calls knows x86-64 and arm64"
    if landlock_version() == 0:
        return (
            "this kernel has no Landlock, or it is off "
            "(Linux 5.13 with landlock in its list of security modules)"
        )
    return ""


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    make_call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        # The parent ended before the call.
        os._exit(1)


def mount_memory(folders: Sequence[os.PathLike[str]], limits: ResourceLimits) -> None:
    """Mount a small file system in memory on each folder, visible to this process and its children.

    So the kernel keeps to the limits on a folder, including files without a name, and frees
    everything with the last of these processes.

    Args:
        folders: folders to mount on.
        limits: `folder_megabytes` and `num_files` of each.

    Raises:
        OSError: the system forbids it. This process may have changed its user namespace by then, so
            it must end.
    """
    user = os.geteuid()
    group = os.getegid()
    make_call("unshare", _CLONE_NEWNS | (_CLONE_NEWUSER if user else 0))
    if user:
        # Only a user that the namespace knows can own files or make a namespace within it.
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            Path("/proc/self", name).write_text(text, encoding="ascii")
    # Mounts must not spread to the other processes of the machine.
    make_call("mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)
    # A size of 0 would mean no limit. The folder itself counts as a file.
    size = max(4096, int(limits.folder_megabytes * MEGABYTE))
    num_files = int(limits.num_files) + 1
    options = f"size={size},nr_inodes={num_files},mode=700".encode()
    for folder in folders:
        make_call(
            "mount", b"quadriga", os.fsencode(folder), b"tmpfs", _MS_NOSUID | _MS_NODEV, options
        )


def confine(
    folder: str, limits: ResourceLimits, readable: Sequence[str], *, may_remove: bool
) -> int | None:
    """Give up all rights except those to use `folder` and to read the interpreter's folders.

    Args:
        folder: folder of the program.
        limits: resources that it may use.
        readable: folders of the interpreter and its packages.
        may_remove: whether it may remove files from `folder`. If no file system in memory limits
            the folder, a removed file that is still open would be counted by nobody.

    Returns:
        The listener for refused system calls, see `filter_calls`.

    Raises:
        OSError: the kernel refuses a step. The program must not begin then.
    """
    parent_pid = os.getppid()
    are_threads_counted = _take_own_user(folder)
    _limit(limits)
    _drop_capabilities()
    die_with_parent(parent_pid)
    make_call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # No other process of the user may attach to it or read its memory.
    make_call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    rules = [(path, _READ) for path in (*_SYSTEM, *_DEVICES, *readable)]
    rules.append(("/dev/null", _OWN))
    rules.append((folder, _OWN if may_remove else _OWN & ~_REMOVE_FILE))
    confine_files(rules)
    return filter_calls(may_have_threads=are_threads_counted)


def _take_own_user(folder: str) -> bool:
    """Take a separate user id or user namespace.

    Returns whether the kernel will count this process's threads separately.
    """
    if os.geteuid() != 0:
        try:
            make_call("unshare", _CLONE_NEWUSER)
        except OSError:
            # Some systems forbid it. Then nothing limits the number of threads, so the program gets
            # none.
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
        # A container with few user ids, or a root user with few rights. The kernel never counts
        # root's threads.
        print(
            f"containment: stays user {os.getuid()}, without threads, since {error}",
            file=sys.stderr,
        )
        return False
    return True


def _limit(limits: ResourceLimits) -> None:
    sizes = {
        resource.RLIMIT_AS: limits.memory_megabytes * MEGABYTE,
        resource.RLIMIT_CPU: max(1, math.ceil(limits.time_s)),
        resource.RLIMIT_FSIZE: limits.output_megabytes * MEGABYTE,
        resource.RLIMIT_NOFILE: limits.num_files,
        resource.RLIMIT_NPROC: limits.num_threads,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        # The kernel stores signals that a process blocks, and counts those of all the user's
        # processes together.
        resource.RLIMIT_SIGPENDING: limits.num_threads,
    }
    for name, size in sizes.items():
        hard_limit = resource.getrlimit(name)[1]
        if hard_limit != resource.RLIM_INFINITY:
            size = min(size, hard_limit)
        resource.setrlimit(name, (size, size))


def _drop_capabilities() -> None:
    """Drop all capabilities, except one for a process that was root.

    It may have an interpreter in a folder that only root can read.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    make_call("capget", ctypes.byref(header), ctypes.byref(sets))
    capability = 0
    if os.getuid() >= _FIRST_USER:
        permitted = sets[1]
        capability = permitted & _CAP_DAC_READ_SEARCH or permitted & _CAP_DAC_OVERRIDE
    sets = (ctypes.c_uint32 * 6)(capability, capability, 0, 0, 0, 0)
    make_call("capset", ctypes.byref(header), ctypes.byref(sets))


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 if it has none."""
    try:
        return make_call("landlock_create_ruleset", None, 0, _VERSION_FLAG)
    except OSError:
        # The kernel is older, or its administrator has left Landlock out.
        return 0


def confine_files(rules: Sequence[tuple[str, int]]) -> None:
    """Give up all access to files except that granted by `rules`; `no_new_privs` must be set.

    A rule is a path and its rights; paths that do not exist are left out. OSError if the kernel
    refuses.
    """
    version = landlock_version()
    # All rights that this kernel can take away: 13 in version 1, one more in each of 2, 3 and 5.
    num_rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    handled = (1 << num_rights) - 1
    # In older versions the filter of system calls alone holds the network and the scopes.
    network = 0
    scopes = 0
    size = 8
    if version >= 4:
        network = 3  # to bind and connect TCP sockets
        size = 16
    if version >= 6:
        scopes = 3  # abstract sockets and signals
        size = 24
    ruleset = _Ruleset(handled, network, scopes)
    ruleset_fd = make_call("landlock_create_ruleset", ctypes.byref(ruleset), size, 0)
    for path, rights in rules:
        try:
            path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = rights & handled
        if not stat.S_ISDIR(os.fstat(path_fd).st_mode):
            allowed &= _ON_FILES
        rule = _PathRule(allowed, path_fd)
        make_call("landlock_add_rule", ruleset_fd, _PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(path_fd)
    make_call("landlock_restrict_self", ruleset_fd, 0)
    os.close(ruleset_fd)
