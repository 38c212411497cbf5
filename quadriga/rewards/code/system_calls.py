# SPDX-License-Identifier: Apache-2.0
"""Filter (seccomp) of the system calls that a model's program may make.

The table `system_calls.tsv` has the name of each call, its number on each machine, and the filter's
answer. For a call in `_ALLOWED_IF`, that is the answer unless its arguments meet the conditions
there.

    allowed calls                        the call is made
    any other call in the table          EPERM; the listener, if there is one, learns which call
    fork, vfork, clone except of threads EAGAIN, as at a limit of processes
    socket, except AF_UNIX               SIGSYS kills the process: the only attempt that ends a
                                         program
    clone3, openat2, io_uring, others    ENOSYS: libraries then use older calls, whose arguments a
                                         filter can read

Allowed calls act on the caller alone, on files (which Landlock guards) or on descriptors that the
caller opened itself. No allowed call reaches another process or has effects after the caller's end.

    sockets         Stream pairs only, since none is inherited and no other can be made. `sendmsg`
                    has its address behind a pointer, where no filter looks; but the kernel refuses
                    addresses on a stream pair (EISCONN). Descriptors that are sent come out at the
                    other end of the pair, which is the caller's too.
    fcntl, ioctl    Some commands only: none that names an owner to be signalled (F_SETOWN,
                    F_SETOWN_EX, F_SETSIG, F_NOTIFY, F_SETLEASE, FIOSETOWN, SIOCSPGRP, FIOASYNC).
                    O_ASYNC without an owner signals nobody.
    open, openat    Not for files without a name (O_TMPFILE), which listing a folder does not show.
    xattrs, flock   Refused, even for reading: Landlock guards neither attributes nor locks of the
                    user's files.
"""

import ctypes
import errno
import fcntl
import os
import select
import struct
from functools import cache
from pathlib import Path

# Placeholders in the filter, which `make_filter` replaces for one process.
_OWN_PID = 0x7FFFFFF5  # id of the process
_THREAD = 0x7FFFFFF6  # flags of `clone` that are allowed
_REFUSED = 0x7FFFFFF7  # answer to refused calls

_ALL = 0xFFFFFFFF
_STREAM = 1
_AF_UNIX = 1
_CLONE_THREAD = 0x10000
_NEW_NAMESPACES = 0x7E020080

# Conditions on arguments: (number of a word, mask, values). The filter sees an argument as two
# words of 32 bits, the low one first: argument 1 has the words 2 and 3. A call is allowed if each
# of these words, masked, is one of the values beside it.
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
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
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
    """The kernel's `sock_fprog`: a filter, with its number of instructions."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def is_known_machine() -> bool:
    """Whether the table has the system calls of this machine's architecture."""
    return os.uname().machine in _AUDIT_ARCHITECTURES


@cache
def call_names() -> dict[int, str]:
    """Names of this machine's system calls, by number."""
    machine = os.uname().machine
    return {int(row[machine]): name for name, row in _table().items() if row[machine]}


@cache
def _table() -> dict[str, dict[str, str]]:
    """Read the table of system calls: for each name of a call, the cells of the row by column."""
    head, *lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    columns = head.split("\t")
    rows = {}
    for line in lines:
        cells = line.split("\t")
        rows[cells[0]] = dict(zip(columns, cells, strict=True))
    return rows


def make_call(name: str, *arguments: object) -> int:
    """Make a system call.

    Args:
        name: name of the call in the table.
        *arguments: integers, and anything that ctypes takes.

    Returns:
        Result of the call.

    Raises:
        OSError: the kernel refuses the call.
    """
    number = int(_table()[name][os.uname().machine])
    # By default ctypes passes an integer as 32 bits, which leaves the rest of a register undefined.
    registers = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = _libc.syscall(ctypes.c_long(number), *registers)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def filter_calls(*, may_have_threads: bool) -> int | None:
    """Put this process under the filter of system calls; `no_new_privs` must be set.

    Args:
        may_have_threads: whether `clone` may create threads.

    Returns:
        The listener, a descriptor for `refuse_call` in another process. Each refused call waits
        until the other process answers. None: the process has a listener already, set by a
        container around it, so the kernel refuses calls itself.

    Raises:
        OSError: the kernel refuses the filter.
    """
    for has_listener in (True, False):
        code = make_filter(
            os.getpid(), may_have_threads=may_have_threads, has_listener=has_listener
        )
        flags = _NEW_LISTENER if has_listener else 0
        filter_ = _Filter(len(code) // 8, code)
        try:
            listener = make_call("seccomp", _SET_MODE_FILTER, flags, ctypes.byref(filter_))
        except OSError as error:
            # EBUSY: the process has a listener already. Try again without.
            if not has_listener or error.errno != errno.EBUSY:
                raise
        else:
            return listener if has_listener else None
    return None


def make_filter(pid: int, *, may_have_threads: bool, has_listener: bool) -> bytes:
    """Make the filter of one process, as the kernel takes it.

    Args:
        pid: id of the process.
        may_have_threads: whether it may have threads.
        has_listener: whether a listener answers refused calls. Otherwise the kernel refuses them.

    Returns:
        BPF instructions of 8 bytes each.
    """
    values = {
        _OWN_PID: pid,
        # Flags of `clone` under the mask are never equal to _ALL, so _ALL forbids threads.
        _THREAD: _CLONE_THREAD if may_have_threads else _ALL,
        _REFUSED: _NOTIFY if has_listener else _ERRNO | errno.EPERM,
    }
    code = _FILTER_TEMPLATE
    for placeholder, value in values.items():
        code = code.replace(struct.pack("=I", placeholder), struct.pack("=I", value))
    return code


def refuse_call(listener: int) -> str | None:
    """Refuse the system call in which a filtered process waits.

    Args:
        listener: the process's listener, from `filter_calls`.

    Returns:
        The name of the call; None if the process does not wait any more.
    """
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    # The listener of a process that has ended is ready too, but without POLLIN: reading may block.
    if not any(events & select.POLLIN for _, events in poll.poll(0)):
        return None
    call = bytearray(_CALL_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE, call)
        # Of `struct seccomp_notif`, take the id of the notification and the number of the system
        # call.
        ((notification, number),) = struct.iter_unpack("=Q8xi60x", call)
        fcntl.ioctl(listener, _RESPOND, struct.pack("=QqiI", notification, 0, -errno.EPERM, 0))
    except FileNotFoundError:
        # The process was killed in the meantime.
        return None
    return call_names()[number]


def _make_filter_template() -> bytes:
    """Make the filter, with placeholders: BPF instructions of 8 bytes each."""
    names = call_names()
    # For each range of consecutive call numbers with the same answer, the first number and the
    # instructions that answer. The last range has all numbers beyond the table.
    ranges: list[tuple[int, list[bytes]]] = []
    for number in range(max(names) + 2):
        instructions = _answer_call(names.get(number, ""))
        if not ranges or ranges[-1][1] != instructions:
            ranges.append((number, instructions))
    # Calls by the numbers of another architecture (such as 32-bit calls) kill the process.
    code = [
        _instruction(_LOAD, _MACHINE_AT),
        _instruction(_EQUAL, _AUDIT_ARCHITECTURES[os.uname().machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        *_search_range(ranges),
    ]
    return b"".join(code)


def _search_range(ranges: list[tuple[int, list[bytes]]]) -> list[bytes]:
    """Make the instructions that find the range of a call's number by binary search, and answer.

    The number has been loaded before.

    Args:
        ranges: the first number of each range, ascending, and the instructions that answer.
    """
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    first_of_high = ranges[middle][0]
    low = _search_range(ranges[:middle])
    high = _search_range(ranges[middle:])
    # For a number in the high half, the jump over the low half is taken; otherwise it is skipped.
    # Only an unconditional jump can go over more than 255 instructions.
    return [
        _instruction(_AT_LEAST, first_of_high, 0, 1),
        _instruction(_JUMP, len(low)),
        *low,
        *high,
    ]


def _answer_call(name: str) -> list[bytes]:
    """Make the instructions that answer a call.

    Args:
        name: name of the call; "" for a number that is not in the table.
    """
    answer = _ANSWERS[_table()[name]["answer"] if name else "ENOSYS"]
    if name == "socket":
        return _check_arguments([(0, _ALL, [_AF_UNIX])], answer, _KILL)
    if name in _ALLOWED_IF:
        return _check_arguments(_ALLOWED_IF[name], _ALLOW, answer)
    return [_instruction(_RETURN, answer)]


def _check_arguments(
    words: list[tuple[int, int, list[int]]], if_all: int, otherwise: int
) -> list[bytes]:
    """Make the instructions that check words of a call's arguments, and answer.

    Args:
        words: for each word, its number, the mask of its bits that count, and its permitted values.
        if_all: answer if every word has a permitted value.
        otherwise: answer if a word has another value.
    """
    code = []
    for word, mask, values in words:
        code.append(_instruction(_LOAD, _ARGUMENTS_AT + 4 * word))
        code.append(_instruction(_AND, mask))
        for index, value in enumerate(values):
            # If equal, skip the remaining comparisons and the return, to go on with the next word.
            num_skipped = len(values) - index
            code.append(_instruction(_EQUAL, value, num_skipped, 0))
        code.append(_instruction(_RETURN, otherwise))
    code.append(_instruction(_RETURN, if_all))
    return code


def _instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode a BPF instruction in 8 bytes.

    Args:
        operation: code of the operation, such as `_LOAD`.
        value: operand of the operation.
        if_true: for a conditional jump, the number of instructions to skip if the condition holds.
        if_false: the number of instructions to skip if it does not hold.
    """
    return struct.pack("=HBBI", operation, if_true, if_false, value)


# Made at import, so that the processes that a supervisor forks inherit it.
_FILTER_TEMPLATE = _make_filter_template() if is_known_machine() else b""
