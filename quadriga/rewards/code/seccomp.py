# SPDX-License-Identifier: Apache-2.0
"""The filter of system calls under which a model's program runs: one process, no network, no hand on other processes.

    call                                    answer
    socket(), but for AF_UNIX               the process is killed by SIGSYS: the one attempt that ends a program
    fork, vfork, clone of a process         EAGAIN, as at a limit of processes; threads may be made
    clone3                                  ENOSYS: the C library then uses clone, whose flags a filter can read
    io_uring                                ENOSYS: it would pass by this filter
    signals to others, exec, ptrace, ...    EPERM

A filter, once set, holds for the process for good. Numbers of calls differ by machine: the table has x86-64 and arm64.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
from typing import NamedTuple

NETWORK_SIGNAL = signal.SIGSYS

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_CLONE_THREAD = 0x10000
_AF_UNIX = 1
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _FILTER_MODE = 1, 22, 2
_X32 = 0x40000000

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
        "memory that outlives a limit": (319, 447, 29, 30, 31, 68, 64, 240),
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
        "memory that outlives a limit": (279, 447, 194, 195, 196, 186, 190, 180),
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
_CLONE3, _IO_URING = 435, (425, 426, 427)

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def is_known_machine() -> bool:
    """Whether this machine's numbers of system calls are in the table."""
    return platform.machine() in _MACHINES


def confine(*, may_have_threads: bool) -> None:
    """Put the calling process under the filter; `no_new_privs` must be set.

    Raises:
        OSError: the kernel refuses.
    """
    code = _filter(platform.machine(), os.getpid(), may_have_threads)
    program = _Program(len(code) // 8, code)
    if _libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")


def _filter(name: str, own_pid: int, may_have_threads: bool) -> bytes:
    machine = _MACHINES[name]
    steps = [_step(_LOAD, _MACHINE_AT), _step(_EQUAL, machine.audit, 1, 0), _return(_KILL), _step(_LOAD, _NUMBER_AT)]
    steps += [_step(_AT_LEAST, _X32, 0, 1), _return(_KILL)]
    refused = _ERRNO | errno.EPERM
    for numbers in _REFUSED[name].values():
        steps += [step for number in numbers for step in _rule(number, refused)]
    for number in (_CLONE3, *_IO_URING):
        steps += _rule(number, _ERRNO | errno.ENOSYS)
    at_limit = _ERRNO | errno.EAGAIN
    for number in machine.forks:
        steps += _rule(number, at_limit)
    # The first argument decides: its value (or bits), the answer for it, and the answer for all others.
    threads = [(_HAS_BITS, _CLONE_THREAD, _ALLOW)] if may_have_threads else []
    itself = [(_EQUAL, own_pid, _ALLOW)]
    steps += _rule(machine.clone, at_limit, *threads)
    steps += _rule(machine.kill, refused, *itself)
    steps += _rule(machine.tgkill, refused, *itself)
    steps += _rule(machine.prlimit, refused, *itself, (_EQUAL, 0, _ALLOW))
    steps += _rule(machine.prctl, _ALLOW, (_EQUAL, _PR_SET_PDEATHSIG, refused))
    steps += _rule(machine.socket, _KILL, (_EQUAL, _AF_UNIX, refused))
    return b"".join([*steps, _return(_ALLOW)])


def _rule(number: int, otherwise: int, *cases: tuple[int, int, int]) -> list[bytes]:
    """Steps that answer the call `number` and go on after it for every other call."""
    block = [_step(_LOAD, _FIRST_ARGUMENT_AT)] if cases else []
    for test, value, answer in cases:
        block += [_step(test, value, 0, 1), _return(answer)]
    block.append(_return(otherwise))
    return [_step(_EQUAL, number, 0, len(block)), *block]


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _return(answer: int) -> bytes:
    return _step(_RETURN, answer)
