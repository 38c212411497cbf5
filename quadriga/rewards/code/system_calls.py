# SPDX-License-Identifier: Apache-2.0
"""The filter of the system calls that a model's program may make: the kernel refuses all others.

The list is `system_calls.tsv`: name of a call, its number on each machine, and the answer where no
argument decides.

    on the list, or with such arguments  the call is made
    any other call in the table          EPERM; the listener, if there is one, learns which
    fork, vfork, clone except of threads EAGAIN, as at a limit of processes
    socket, except AF_UNIX               SIGSYS kills the process: the one attempt that ends a
                                         program
    clone3, openat2, io_uring, others    ENOSYS: libraries then use older calls, which a filter can
                                         read

The calls on the list act on the caller alone, on files (which Landlock guards) or on descriptors
that it opened itself. None of them reaches another process or outlives the caller.

    sockets         Stream pairs only, since none is inherited and no other can be made. `sendmsg`
                    has its address behind a pointer, where no filter looks; but the kernel refuses
                    addresses on a stream pair (EISCONN), and the descriptors that it passes come
                    out at the other end, which is the caller's too.
    fcntl, ioctl    By command: none that names an owner to be signalled (F_SETOWN, F_SETOWN_EX,
                    F_SETSIG, F_NOTIFY, F_SETLEASE, FIOSETOWN, SIOCSPGRP, FIOASYNC). O_ASYNC without
                    an owner signals nobody.
    open, openat    Not for a file without a name (O_TMPFILE), which no listing of a folder counts.
    xattrs, flock   Not even to read: Landlock guards neither attributes nor locks of the user's
                    files.
"""

import ctypes
import errno
import fcntl
import os
import select
import struct
from functools import cache
from pathlib import Path

# Placeholders in the filter, which `program` replaces for one process.
_OWN_PID = 0x7FFFFFF5  # its number
_THREAD = 0x7FFFFFF6  # flags of a `clone` that it may make
_REFUSED = 0x7FFFFFF7  # how a call is refused

_ALL = 0xFFFFFFFF
_STREAM = 1
_AF_UNIX = 1
_CLONE_THREAD = 0x10000
_NEW_NAMESPACES = 0x7E020080

# Conditions on arguments: (word, mask, values). An argument is two words of 32 bits, the low one
# first. A call is allowed if each word, under its mask, is one of the values.
_ON_ITSELF = [(0, _ALL, [_OWN_PID])]
_ON_ITSELF_OR_0 = [(0, _ALL, [0, _OWN_PID])]
_ALLOWED_IF = {
    "clone": [(0, _CLONE_THREAD | _NEW_NAMESPACES, [_THREAD])],
    "kill": _ON_ITSELF,
    "tgkill": _ON_ITSELF,
    "getpgid": _ON_ITSELF_OR_0,
    "prlimit64": _ON_ITSELF_OR_0,
    "sched_setaffinity": _ON_ITSELF_OR_0,
    # Without O_TMPFILE.
    "open": [(2, 0x400000, [0])],
    "openat": [(4, 0x400000, [0])],
    # Without RENAME_WHITEOUT, which makes a device node.
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

# Results of a filter (SECCOMP_RET_*).
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_NOTIFY = 0x7FC00000
# Operations of the filter's language, classic BPF.
_LOAD = 0x20
_JUMP = 0x05
_EQUAL = 0x15
_AT_LEAST = 0x35
_AND = 0x54
_RETURN = 0x06
# Offsets in `struct seccomp_data`, which describes a call to the filter.
_NUMBER_AT = 0
_MACHINE_AT = 4
_ARGUMENTS_AT = 16
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SET_MODE_FILTER = 1
_NEW_LISTENER = 8
# Commands to a listener, and the size of the call that it reads (`struct seccomp_notif`).
_RECEIVE = 0xC0502100
_RESPOND = 0xC0182101
_CALL_BYTES = 80

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
    """Whether the table has the system calls of this machine."""
    return os.uname().machine in _MACHINES


@cache
def call_names() -> dict[int, str]:
    """Names of this machine's system calls, by number."""
    machine = os.uname().machine
    names = {}
    for name, row in _table().items():
        if row[machine]:
            names[int(row[machine])] = name
    return names


@cache
def _table() -> dict[str, dict[str, str]]:
    """Rows of the table, by the name of the system call."""
    head, *lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    columns = head.split("\t")
    rows = {}
    for line in lines:
        cells = line.split("\t")
        rows[cells[0]] = dict(zip(columns, cells, strict=True))
    return rows


def make_call(name: str, *arguments: object) -> int:
    """Make a system call; OSError if the kernel refuses it.

    Args:
        name: name of the call in the table.
        *arguments: integers, and anything that ctypes takes.

    Returns:
        Result of the call.
    """
    number = int(_table()[name][os.uname().machine])
    # As wide as a register: a narrower number would leave bits of it undefined.
    registers = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = _libc.syscall(ctypes.c_long(number), *registers)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def filter_calls(*, may_have_threads: bool) -> int | None:
    """Put this process under the filter of system calls; `no_new_privs` must be set.

    OSError if the kernel refuses.

    Args:
        may_have_threads: whether `clone` may make threads.

    Returns:
        The listener, a descriptor for `refuse_call` in another process; without it, refused calls
        wait for ever. None if the process has a listener already, its container's: then the kernel
        refuses calls by itself.
    """
    for has_listener in (True, False):
        code = program(os.getpid(), may_have_threads=may_have_threads, has_listener=has_listener)
        flags = _NEW_LISTENER if has_listener else 0
        filter_ = _Filter(len(code) // 8, code)
        try:
            listener = make_call("seccomp", _SET_MODE_FILTER, flags, ctypes.byref(filter_))
        except OSError as error:
            # EBUSY: a process has at most one listener.
            if not has_listener or error.errno != errno.EBUSY:
                raise
        else:
            return listener if has_listener else None
    return None


def program(pid: int, *, may_have_threads: bool, has_listener: bool) -> bytes:
    """The filter of one process, in the kernel's form.

    Args:
        pid: number of the process.
        may_have_threads: whether it may have threads.
        has_listener: whether a listener answers calls that are refused; else the kernel does.

    Returns:
        BPF instructions of 8 bytes each.
    """
    values = {
        _OWN_PID: pid,
        # No flags of `clone` are equal to _ALL under their mask.
        _THREAD: _CLONE_THREAD if may_have_threads else _ALL,
        _REFUSED: _NOTIFY if has_listener else _ERRNO | errno.EPERM,
    }
    code = _FILTER
    for mark, value in values.items():
        code = code.replace(struct.pack("=I", mark), struct.pack("=I", value))
    return code


def refuse_call(listener: int) -> str | None:
    """Refuse the call in which a filtered process waits.

    Returns the name of the call; None if the process does not wait any more.
    """
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    # The descriptor of a process that has ended is ready too, but reading it may block.
    if not any(events & select.POLLIN for _, events in poll.poll(0)):
        return None
    call = bytearray(_CALL_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE, call)
        # The first number identifies the notification, the second is the number of the system call.
        ((notification, number),) = struct.iter_unpack("=Q8xi60x", call)
        fcntl.ioctl(listener, _RESPOND, struct.pack("=QqiI", notification, 0, -errno.EPERM, 0))
    except FileNotFoundError:
        # It has been killed in the meantime.
        return None
    return call_names()[number]


def _filter() -> bytes:
    names = call_names()
    # First number and rule of each stretch of numbers that have the same rule. The last stretch has
    # all numbers behind the table.
    stretches: list[tuple[int, list[bytes]]] = []
    for number in range(max(names) + 2):
        rule = _rule(names.get(number, ""))
        if not stretches or stretches[-1][1] != rule:
            stretches.append((number, rule))
    steps = [
        _step(_LOAD, _MACHINE_AT),
        _step(_EQUAL, _MACHINES[os.uname().machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        *_tree(stretches),
    ]
    return b"".join(steps)


def _tree(stretches: list[tuple[int, list[bytes]]]) -> list[bytes]:
    """Instructions that find the stretch of a call's number by binary search."""
    if len(stretches) == 1:
        return stretches[0][1]
    middle = len(stretches) // 2
    first_of_high = stretches[middle][0]
    low = _tree(stretches[:middle])
    high = _tree(stretches[middle:])
    # A conditional jump reaches 255 instructions at most, the unconditional one any number.
    return [_step(_AT_LEAST, first_of_high, 0, 1), _step(_JUMP, len(low)), *low, *high]


def _rule(name: str) -> list[bytes]:
    """Instructions that decide about a call by its name; "" is a number without a call."""
    answer = _ANSWERS[_table()[name]["answer"] if name else "ENOSYS"]
    if name == "socket":
        return _tests([(0, _ALL, [_AF_UNIX])], answer, _KILL)
    if name in _ALLOWED_IF:
        return _tests(_ALLOWED_IF[name], _ALLOW, answer)
    return [_step(_RETURN, answer)]


def _tests(words: list[tuple[int, int, list[int]]], if_all: int, otherwise: int) -> list[bytes]:
    """Instructions that check words of a call's arguments.

    Args:
        words: for each word, its number, the mask of its bits that count, and its permitted values.
        if_all: what to return if every word has a permitted value.
        otherwise: what to return if a word has another value.
    """
    steps = []
    for word, mask, values in words:
        steps.append(_step(_LOAD, _ARGUMENTS_AT + 4 * word))
        steps.append(_step(_AND, mask))
        for index, value in enumerate(values):
            # If equal, jump over the remaining comparisons and the return, to the next word.
            num_skipped = len(values) - index
            steps.append(_step(_EQUAL, value, num_skipped, 0))
        steps.append(_step(_RETURN, otherwise))
    steps.append(_step(_RETURN, if_all))
    return steps


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """An instruction; `if_true` and `if_false` say how many instructions to skip."""
    return struct.pack("=HBBI", operation, if_true, if_false, value)


# Made once per process, not again in each that it forks.
_FILTER = _filter() if is_known_machine() else b""
