# SPDX-License-Identifier: Apache-2.0
"""Containment: a process gives up its rights for good, before a model's program begins in it.

It gives up

1. its user, if that is root: it takes a user id of its own, so that the kernel counts its threads
   separately and no file belongs to it. A process of another user enters a new user namespace
   instead, so that its threads are counted separately too.
2. memory, CPU time, sizes of files, open files and threads beyond its limits.
3. every capability. Only a process that was root keeps the one to read files whoever owns them, for
   the files that 4 grants.
4. every file except its own folder, the interpreter and the system's libraries (Landlock). This
   covers opening, creating and removing files. Whether a path exists, and its size and times, can
   still be read.
5. every system call that is not on a list (seccomp, `system_calls`): the program reaches no other
   process and no network.

This needs no rights, no container and no external program, only Linux 5.13 with Landlock, on x86-64
or arm64. The list of 5 alone suffices for every user; depending on its version the kernel adds:

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
# Far above any user's id. A contained process that was root takes this plus its process id.
_FIRST_USER = 1_000_000_000
# Paths that interpreters and libraries read. They hold nothing about a run or a user.
_SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/zero", "/dev/urandom", "/dev/random")

# Landlock's flags and rights, by the names of the kernel (LANDLOCK_ACCESS_FS_*).
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REMOVE_FILE = 1 << 5
_MAKE_REG = 1 << 8
_TRUNCATE = 1 << 14
# Rights that a file may have (the others are for folders), rights to read, and rights on the
# program's own folder. The program may not create sub-folders, links, devices or sockets, so a flat
# listing of its folder shows everything in it.
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_RIGHTS_TO_READ = _READ_FILE | _READ_DIR
_RIGHTS_ON_OWN = _RIGHTS_TO_READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE


class ResourceLimits(NamedTuple):
    """The resources that one test may use.

    Attributes:
        time_s: CPU time.
        wall_s: time by the clock, which also ends a program that sleeps or waits.
        memory_megabytes: address space, which includes the stacks of threads.
        output_megabytes: size of each of the program's streams, and of each file.
        folder_megabytes: size of all files in the program's folder together. If no file system in
            memory can be mounted for the folder, it is checked 20 times a second, and the program
            cannot remove files.
        num_files: number of files in the folder, and of files open at the same time.
        num_threads: number of threads. A program never gets a second process.
    """

    time_s: float = 4.0
    wall_s: float = 8.0
    memory_megabytes: int = 1024
    output_megabytes: int = 8
    folder_megabytes: int = 32
    num_files: int = 64
    num_threads: int = 32


class _Ruleset(ctypes.Structure):
    """The kernel's `landlock_ruleset_attr`: rights that a process loses unless a rule grants them."""

    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathRule(ctypes.Structure):
    """The kernel's `landlock_path_beneath_attr`: rights on a path and all below it."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def why_unavailable() -> str:
    """Say why programs cannot be contained on this machine; "" if they can."""
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
    """Make the kernel kill this process when its parent ends.

    Args:
        parent_pid: id of the parent when this process was started.
    """
    make_call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        # The parent had ended before the call, so no signal would come.
        os._exit(1)


def mount_memory_file_systems(folders: Sequence[os.PathLike[str]], limits: ResourceLimits) -> None:
    """Mount a small file system in memory on each folder, for this process and its children only.

    The kernel then enforces the limits on each folder, and frees the memory when the last of these
    processes ends.

    Args:
        folders: folders to mount on.
        limits: `folder_megabytes` and `num_files` apply to each folder.

    Raises:
        OSError: the system forbids it. This process may be in a new user namespace by then, so it
            must end.
    """
    user = os.geteuid()
    group = os.getegid()
    make_call("unshare", _CLONE_NEWNS | (_CLONE_NEWUSER if user else 0))
    if user:
        # Only a user that is mapped into the namespace can own files, or create another namespace.
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            Path("/proc/self", name).write_text(text, encoding="ascii")
    # Separate the mounts: otherwise new ones would appear in the parent's mount namespace too.
    make_call("mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)
    # For tmpfs, a size of 0 means no limit, and the folder itself counts as a file.
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
        limits: resources that the program may use.
        readable: folders of the interpreter and its packages.
        may_remove: whether the program may remove files from `folder`. It may not if the supervisor
            enforces the limits on the folder: the supervisor does not see removed files that are
            still open.

    Returns:
        The listener for refused system calls, or None (see `filter_calls`).

    Raises:
        OSError: the kernel refuses a step. The program must not begin then.
    """
    # The order is that of the list at the top of this file.
    parent_pid = os.getppid()
    are_threads_counted = _take_own_user(folder)
    _set_resource_limits(limits)
    _drop_capabilities()
    # A change of the user has reset this setting.
    die_with_parent(parent_pid)
    # Without this, Landlock and the filter of system calls need more rights.
    make_call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Other processes of the same user, such as other programs, must not read this one's memory.
    make_call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    rules = [(path, _RIGHTS_TO_READ) for path in (*_SYSTEM_PATHS, *_DEVICES, *readable)]
    rules.append(("/dev/null", _RIGHTS_ON_OWN))
    rules.append((folder, _RIGHTS_ON_OWN if may_remove else _RIGHTS_ON_OWN & ~_REMOVE_FILE))
    confine_files(rules)
    return filter_calls(may_have_threads=are_threads_counted)


def _take_own_user(folder: str) -> bool:
    """Take a user id of its own if this process is root, else a new user namespace.

    Args:
        folder: folder of the program, whose owner becomes the new user.

    Returns:
        Whether the kernel counts this process's threads separately from others.
    """
    if os.geteuid() != 0:
        try:
            make_call("unshare", _CLONE_NEWUSER)
        except OSError:
            # Some systems forbid it. The caller then refuses threads, which could not be limited.
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
        # It fails in a container with few user ids or rights. The process stays root, whose threads
        # the kernel does not limit.
        print(
            f"containment: stays user {os.getuid()}, without threads, since {error}",
            file=sys.stderr,
        )
        return False
    return True


def _set_resource_limits(limits: ResourceLimits) -> None:
    """Set the resource limits of this process."""
    sizes = {
        resource.RLIMIT_AS: limits.memory_megabytes * MEGABYTE,
        resource.RLIMIT_CPU: max(1, math.ceil(limits.time_s)),
        resource.RLIMIT_FSIZE: limits.output_megabytes * MEGABYTE,
        resource.RLIMIT_NOFILE: limits.num_files,
        resource.RLIMIT_NPROC: limits.num_threads,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        # Pending signals take the kernel's memory, and count for all processes of a user together.
        # They have no limit of their own: one for each thread is enough for a program.
        resource.RLIMIT_SIGPENDING: limits.num_threads,
    }
    # Each limit is at most the hard limit that the process has already.
    for name, size in sizes.items():
        hard_limit = resource.getrlimit(name)[1]
        if hard_limit != resource.RLIM_INFINITY:
            size = min(size, hard_limit)
        resource.setrlimit(name, (size, size))


def _drop_capabilities() -> None:
    """Drop all capabilities.

    A process that was root keeps the capability to read any file: its interpreter may be in a
    folder that only root can read.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    # Two sets of words: effective, permitted and inheritable capabilities 0 to 31, then 32 to 63.
    sets = (ctypes.c_uint32 * 6)()
    make_call("capget", ctypes.byref(header), ctypes.byref(sets))
    capability = 0
    # The process was root before `_take_own_user`.
    if os.getuid() >= _FIRST_USER:
        permitted = sets[1]
        # The second capability includes the first, and is kept only if the first is missing.
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

    Args:
        rules: pairs of a path and the rights on it. Paths that do not exist are ignored.

    Raises:
        OSError: the kernel refuses a rule.
    """
    version = landlock_version()
    # All rights that this kernel can take away: 13 in version 1, one more in each of 2, 3 and 5.
    num_rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    handled = (1 << num_rights) - 1
    # With older versions only the filter of system calls guards the network and other processes.
    network = 0
    scopes = 0
    size = 8  # bytes of `_Ruleset` that this version knows
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
            # The kernel refuses a rule that gives a file rights which only folders have.
            allowed &= _FILE_RIGHTS
        rule = _PathRule(allowed, path_fd)
        make_call("landlock_add_rule", ruleset_fd, _PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(path_fd)
    make_call("landlock_restrict_self", ruleset_fd, 0)
    os.close(ruleset_fd)
