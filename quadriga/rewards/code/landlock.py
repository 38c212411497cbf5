# SPDX-License-Identifier: Apache-2.0
"""Landlock, by which a Linux process confines itself to some files for good; it needs no rights to do so.

What Landlock does not cover, because it only guards opening, making and removing: whether a path exists, and its
size and times (`stat`). Changes of mode, owner, times and attributes are refused by the filter of `seccomp.py`.
"""

import ctypes
import os
import stat
from collections.abc import Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_REG = 1 << 8
_TRUNCATE = 1 << 14
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

READ = _READ_FILE | _READ_DIR
# Sub-folders, links, devices and sockets are not granted: so a flat listing of the folder tells all that it holds.
OWN = READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi_version() -> int:
    """Version of the kernel's Landlock; 0 where there is none."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)))


def confine(rules: Sequence[tuple[str, int]]) -> None:
    """Give up every access to files but that which the rules grant; `no_new_privs` must be set.

    Args:
        rules: paths, each with `READ` or `OWN`; one that does not exist is left out.

    Raises:
        OSError: the kernel refuses.
    """
    version = abi_version()
    # Every right that this kernel can take away is taken away: 13 in version 1, then one in each of 2, 3 and 5.
    handled = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    # TCP, then abstract sockets and signals to others; the filter of system calls holds these where Landlock is older.
    ruleset = _Ruleset(handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    fd = _checked(_libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0)))
    for path, rights in rules:
        _grant(fd, path, rights & handled)
    _checked(_libc.syscall(_RESTRICT_SELF, ctypes.c_int(fd), ctypes.c_uint32(0)))
    os.close(fd)


def _grant(ruleset_fd: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        rights &= _ON_FILES
    rule = _PathRule(rights, fd)
    number = ctypes.c_long(_ADD_RULE)
    _checked(_libc.syscall(number, ctypes.c_int(ruleset_fd), _PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0)))
    os.close(fd)


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result
