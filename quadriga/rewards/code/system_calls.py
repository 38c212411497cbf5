# SPDX-License-Identifier: Apache-2.0
"""The system calls that a model's program may make: a list of allowed ones; every other is refused by the kernel.

The list is `system_calls.tsv`: each call's name, its number by machine, and the answer where no argument decides.

    on the list, or with arguments on it        the call is made
    every other call that has a name here       EPERM, and the listener, if there is one, is told which
    fork, vfork, clone but of a thread          EAGAIN, as at a limit of processes
    socket, but for AF_UNIX                     the process is killed by SIGSYS: the one attempt that ends a program
    clone3, openat2, io_uring, others           ENOSYS: libraries then use older calls, which a filter can read

What is on the list acts on the caller alone, on files (which Landlock guards) or on descriptors that it opened itself.
Nothing on it reaches another process or outlives the caller.

    sockets         stream pairs only, as none is inherited and no other can be made. `sendmsg` has its address behind a
                    pointer, where no filter looks; but the kernel refuses addresses on a stream pair (EISCONN), and
                    descriptors that it passes come out at the other end, which is the caller's too.
    fcntl, ioctl    by command: none that names an owner to be signalled (F_SETOWN, F_SETOWN_EX, F_SETSIG, F_NOTIFY,
                    F_SETLEASE, FIOSETOWN, SIOCSPGRP, FIOASYNC). O_ASYNC without an owner signals nobody.
    open, openat    but of a file without a name (O_TMPFILE), which no listing of a folder counts.
    xattrs, flock   not even to read: Landlock guards neither attributes nor locks of the user's files.
"""

import ctypes
import errno
import fcntl
import os
import select
import struct
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path

_ALL, _STREAM, _AF_UNIX, _CLONE_THREAD, _NEW_NAMESPACES = 0xFFFFFFFF, 1, 1, 0x10000, 0x7E020080
# Stand in the filter until a process knows its number, whether it may have threads, and whether somebody listens.
_OWN_PID, _THREAD, _REFUSED = 0x7FFFFFF5, 0x7FFFFFF6, 0x7FFFFFF7
# Words of 32 bits (two an argument, the low one first) that decide, under a mask: a call is allowed if each of them is
# one of the values.
_ALLOWED_IF = {
    "clone": [(0, _CLONE_THREAD | _NEW_NAMESPACES, [_THREAD])],
    "kill": [(0, _ALL, [_OWN_PID])],
    "tgkill": [(0, _ALL, [_OWN_PID])],
    "getpgid": [(0, _ALL, [0, _OWN_PID])],
    "prlimit64": [(0, _ALL, [0, _OWN_PID])],
    "sched_setaffinity": [(0, _ALL, [0, _OWN_PID])],
    # But with O_TMPFILE.
    "open": [(2, 0x400000, [0])],
    "openat": [(4, 0x400000, [0])],
    # But with RENAME_WHITEOUT, which makes a device node.
    "renameat2": [(8, 4, [0])],
    # Names of threads and of memory.
    "prctl": [(0, _ALL, [15, 16, 0x53564D41])],
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, locks of files, F_DUPFD_CLOEXEC.
    "fcntl": [(2, _ALL, [0, 1, 2, 3, 4, 5, 6, 7, 1030])],
    # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
    "ioctl": [(2, _ALL, [0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])],
    "socketpair": [(0, _ALL, [_AF_UNIX]), (2, 0xF, [_STREAM])],
    # Without an address.
    "sendto": [(8, _ALL, [0]), (9, _ALL, [0])],
}

# What a filter returns, its operations, and where it finds the facts of a call.
_ALLOW, _KILL, _ERRNO, _TELL = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_LOAD, _JUMP, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x54, 0x06
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
# What a listener reads of a call (its own number first, the call's at 16), and what it answers.
_RECEIVE, _RESPOND, _CALL_BYTES = 0xC0502100, 0xC0182101, 80

_ANSWERS = {
    "allowed": _ALLOW,
    "EPERM": _REFUSED,
    "EAGAIN": _ERRNO | errno.EAGAIN,
    "ENOSYS": _ERRNO | errno.ENOSYS,
}

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def is_known_machine() -> bool:
    """Whether the system calls of this machine have their names here."""
    return os.uname().machine in _MACHINES


@cache
def call_names() -> dict[int, str]:
    """The system calls of this machine, by their numbers."""
    return {
        int(row[os.uname().machine]): name
        for name, row in _table().items()
        if row[os.uname().machine]
    }


@cache
def _table() -> dict[str, dict[str, str]]:
    head, *lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    return {
        line.partition("\t")[0]: dict(zip(head.split("\t"), line.split("\t"), strict=True))
        for line in lines
    }


def make_call(name: str, *arguments: object) -> int:
    """Make a system call, with integers and what ctypes takes. OSError: the kernel refuses."""
    # As wide as a register: a narrower number would leave bits of it undefined.
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = _libc.syscall(ctypes.c_long(int(_table()[name][os.uname().machine])), *wide)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def filter_calls(*, may_have_threads: bool) -> int | None:
    """Put this process under the filter of system calls; `no_new_privs` must be set.
    Returns a descriptor for another process's `refuse_call`, without which refused calls wait for ever. None where such
    a listener stands already, a container's own: the kernel then refuses by itself. Raises OSError: the kernel refuses.
    """
    for has_listener in (True, False):
        code = program(os.getpid(), may_have_threads=may_have_threads, has_listener=has_listener)
        flags = _NEW_LISTENER if has_listener else 0
        try:
            listener = make_call(
                "seccomp", _SET_MODE_FILTER, flags, ctypes.byref(_Filter(len(code) // 8, code))
            )
        except OSError as error:
            if not has_listener or error.errno != errno.EBUSY:
                raise
        else:
            return listener if has_listener else None
    return None


def program(pid: int, *, may_have_threads: bool, has_listener: bool) -> bytes:
    """The filter of the process of that number, as the kernel takes it."""
    known = {
        _OWN_PID: pid,
        # Masked as they are, the flags of no clone are equal to _ALL.
        _THREAD: _CLONE_THREAD if may_have_threads else _ALL,
        _REFUSED: _TELL if has_listener else _ERRNO | errno.EPERM,
    }
    code = _FILTER
    for mark, value in known.items():
        code = code.replace(struct.pack("=I", mark), struct.pack("=I", value))
    return code


def refuse_call(listener: int) -> str | None:
    """Refuse the call in which a filtered process waits, and return the call's name; None if it waits no more."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    # Where the process is at its end the descriptor is ready too, and reading it may block.
    if not any(events & select.POLLIN for _, events in poll.poll(0)):
        return None
    call = bytearray(_CALL_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE, call)
        ((own_number, number),) = struct.iter_unpack("=Q8xi60x", call)
        fcntl.ioctl(listener, _RESPOND, struct.pack("=QqiI", own_number, 0, -errno.EPERM, 0))
    except FileNotFoundError:
        # It has been killed in between.
        return None
    return call_names()[number]


def _filter() -> bytes:
    names = call_names()
    rules = [(number, _rule(names.get(number, ""))) for number in range(max(names) + 2)]
    # The tree asks for the first number of each stretch with the same rule.
    stretches = [(next(group)[0], rule) for rule, group in groupby(rules, key=itemgetter(1))]
    begin = [
        _step(_LOAD, _MACHINE_AT),
        _step(_EQUAL, _MACHINES[os.uname().machine], 1, 0),
        _step(_RETURN, _KILL),
    ]
    return b"".join([*begin, _step(_LOAD, _NUMBER_AT), *_tree(stretches)])


def _tree(stretches: list[tuple[int, list[bytes]]]) -> list[bytes]:
    if len(stretches) == 1:
        return stretches[0][1]
    middle = len(stretches) // 2
    low, high = _tree(stretches[:middle]), _tree(stretches[middle:])
    return [_step(_AT_LEAST, stretches[middle][0], 0, 1), _step(_JUMP, len(low)), *low, *high]


def _rule(name: str) -> list[bytes]:
    answer = _ANSWERS[_table()[name]["answer"] if name else "ENOSYS"]
    if name == "socket":
        return _tests([(0, _ALL, [_AF_UNIX])], answer, _KILL)
    return (
        _tests(_ALLOWED_IF[name], _ALLOW, answer)
        if name in _ALLOWED_IF
        else [_step(_RETURN, answer)]
    )


def _tests(words: list[tuple[int, int, list[int]]], if_all: int, otherwise: int) -> list[bytes]:
    steps = []
    for word, mask, values in words:
        steps += [_step(_LOAD, _ARGUMENTS_AT + 4 * word), _step(_AND, mask)]
        steps += [
            _step(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)
        ]
        steps.append(_step(_RETURN, otherwise))
    return [*steps, _step(_RETURN, if_all)]


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


_FILTER = _filter() if is_known_machine() else b""  # once a process, not in each that it forks
