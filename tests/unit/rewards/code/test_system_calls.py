# SPDX-License-Identifier: Apache-2.0
"""The list of allowed system calls: what the filter answers on either machine, and what the kernel makes of it here.

The filter's program is run by an interpreter of its few operations, so that arm64's is looked at too. Not shown: that
the numbers of arm64 are right where the system's headers are not at hand.
"""

import ctypes
import errno
import fcntl
import importlib
import os
import re
import select
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quadriga.rewards.code import containment, system_calls

ALLOWED, REFUSED, UNKNOWN, AT_LIMIT, KILLED = (
    "allowed",
    errno.EPERM,
    errno.ENOSYS,
    errno.EAGAIN,
    "killed",
)
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PID, OTHER = 4242, 4243
THREAD_FLAGS = 0x3D0F00
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.fixture(params=MACHINES)
def machine(request, monkeypatch):
    """The module as it is on that machine, with its filter complete for process `PID`, threads allowed."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=request.param))
    importlib.reload(system_calls)
    yield request.param
    monkeypatch.undo()
    importlib.reload(system_calls)


def verdict(name, *arguments, may_have_threads=True, audit=None, number=None):
    """What the filter answers to a call, by an interpreter of its program."""
    code = system_calls.make_filter(PID, may_have_threads=may_have_threads, has_listener=False)
    numbers = {known: number for number, known in system_calls.call_names().items()}
    number = numbers[name] if number is None else number
    audit = MACHINES[os.uname().machine] if audit is None else audit
    padded = [value & (1 << 64) - 1 for value in (*arguments, *[0] * (6 - len(arguments)))]
    facts = struct.pack("=IIQ6Q", number, audit, 0, *padded)
    steps, at, value = (
        [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)],
        0,
        0,
    )
    while True:
        operation, if_true, if_false, constant = steps[at]
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", facts, constant)
        elif operation == 0x54:
            value &= constant
        elif operation == 0x05:
            at += constant
        elif operation == 0x06:
            answer = constant & 0xFFFF0000
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(answer) or constant & 0xFFFF
        else:
            is_true = {0x15: value == constant, 0x35: value >= constant}[operation]
            at += if_true if is_true else if_false


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("read", (0, 0, 8), ALLOWED),
        ("futex", (), ALLOWED),
        ("exit_group", (), ALLOWED),
        # Signals, by every road.
        ("kill", (PID, 9), ALLOWED),
        ("kill", (OTHER, 9), REFUSED),
        ("kill", (-1, 9), REFUSED),
        ("kill", (0, 9), REFUSED),
        ("tgkill", (PID, PID, 9), ALLOWED),
        ("tgkill", (OTHER, OTHER, 9), REFUSED),
        ("tkill", (PID, 9), REFUSED),
        ("rt_sigqueueinfo", (PID, 9), REFUSED),
        ("rt_tgsigqueueinfo", (PID, PID, 9), REFUSED),
        ("pidfd_open", (OTHER,), REFUSED),
        ("pidfd_send_signal", (), REFUSED),
        ("mq_notify", (), REFUSED),
        ("timer_create", (), REFUSED),
        *[("fcntl", (3, command, PID), ALLOWED) for command in (0, 1, 2, 3, 4, 5, 6, 7, 1030)],
        *[
            ("fcntl", (3, command, PID), REFUSED)
            for command in (8, 10, 15, 16, 1024, 1025, 1026, 1031, 1033)
        ],
        *[("ioctl", (3, command), ALLOWED) for command in (0x5401, 0x5421, 0x541B)],
        *[("ioctl", (3, command), REFUSED) for command in (0x8901, 0x8902, 0x5452, 0x5412, 0x541C)],
        # Files.
        ("openat", (-100, 0, os.O_RDWR | os.O_DIRECTORY), ALLOWED),
        ("openat", (-100, 0, os.O_TMPFILE | os.O_RDWR), REFUSED),
        ("openat2", (), UNKNOWN),
        *[("renameat2", (-100, 0, -100, 0, flags), ALLOWED) for flags in (0, 1, 2)],
        *[("renameat2", (-100, 0, -100, 0, flags), REFUSED) for flags in (4, 5)],
        # Steering.
        ("sched_setaffinity", (0, 8), ALLOWED),
        ("sched_setaffinity", (PID, 8), ALLOWED),
        ("sched_setaffinity", (OTHER, 8), REFUSED),
        ("prlimit64", (PID, 0), ALLOWED),
        ("prlimit64", (OTHER, 0), REFUSED),
        ("prctl", (15,), ALLOWED),
        ("prctl", (1,), REFUSED),
        ("prctl", (4, 1), REFUSED),
        ("prctl", (62,), REFUSED),
        *[
            (name, (), REFUSED)
            for name in (
                "process_mrelease",
                "process_madvise",
                "process_vm_writev",
                "ptrace",
                "kcmp",
            )
        ],
        *[
            (name, (), REFUSED)
            for name in (
                "setpriority",
                "ioprio_set",
                "sched_setattr",
                "sched_setscheduler",
                "setpgid",
            )
        ],
        *[
            (name, (), REFUSED)
            for name in (
                "move_pages",
                "migrate_pages",
                "get_robust_list",
                "perf_event_open",
                "flock",
            )
        ],
        # Sockets.
        ("socket", (1, 1), REFUSED),
        ("socket", (2, 1), KILLED),
        ("socket", (16, 3), KILLED),
        ("socketpair", (1, 1), ALLOWED),
        ("socketpair", (1, 1 | 0x80800), ALLOWED),
        ("socketpair", (1, 2 | 0x80000), REFUSED),
        ("socketpair", (1, 3), REFUSED),
        ("socketpair", (1, 5), REFUSED),
        ("socketpair", (30, 1), REFUSED),
        ("sendto", (3, 1, 1, 0, 0, 0), ALLOWED),
        ("sendto", (3, 1, 1, 0, 0x1000, 16), REFUSED),
        ("sendto", (3, 1, 1, 0, 0x100000000, 16), REFUSED),
        *[
            (name, (), REFUSED)
            for name in ("connect", "bind", "listen", "accept4", "sendmmsg", "setsockopt")
        ],
        # Memory and disk that a limit does not see, and what outlives the process.
        *[
            (name, (), REFUSED)
            for name in ("fallocate", "memfd_create", "shmget", "msgget", "mq_open", "add_key")
        ],
        *[
            (name, (), UNKNOWN)
            for name in ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3")
        ],
        *[
            (name, (), REFUSED)
            for name in (
                "execve",
                "execveat",
                "unshare",
                "setns",
                "mount",
                "chroot",
                "bpf",
                "truncate",
            )
        ],
        ("clone", (THREAD_FLAGS,), ALLOWED),
        ("clone", (THREAD_FLAGS | 0x10000000,), AT_LIMIT),
        ("clone", (17,), AT_LIMIT),
    ],
)
def test_the_filter_answers(machine, name, arguments, expected):
    assert verdict(name, *arguments) == expected


@pytest.mark.parametrize("machine", ["x86_64"], indirect=True)
def test_the_older_call_to_open_a_file(machine):
    assert verdict("open", 0, os.O_RDWR | os.O_CREAT, 0o600) == ALLOWED
    assert verdict("open", 0, os.O_TMPFILE | os.O_RDWR) == REFUSED


def test_other_machines_and_unknown_calls(machine):
    assert verdict("read", audit=0x40000003) == KILLED
    assert verdict("clone", THREAD_FLAGS, may_have_threads=False) == AT_LIMIT
    assert [verdict("", number=number) for number in (400, 470, 512, 0x40000000, 0xFFFFFFFF)] == [
        UNKNOWN
    ] * 5


def test_the_table_is_whole():
    rows = system_calls._table()
    assert all(row["x86_64"] or row["aarch64"] for row in rows.values())
    assert {row["answer"] for row in rows.values()} == set(system_calls._ANSWERS)
    # What is allowed by its arguments is not allowed without them.
    assert {rows[name]["answer"] for name in system_calls._ALLOWED_IF} == {"EPERM", "EAGAIN"}


def test_numbers_are_those_of_the_systems_headers(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"this system has no {HEADERS[machine]}")
    lines = re.findall(r"#define __NR(?:3264)?_([a-z_]\w*)\s+(\d+)", HEADERS[machine].read_text())
    # Between them stand calls of 32-bit machines and of tracers; what is newer than our table is unknown to it.
    ours = [number for number in system_calls.call_names() if number < 335 or number >= 424]
    numbers = {
        int(number): name
        for name, number in lines
        if int(number) in ours and not name.endswith("syscalls")
    }
    assert len(numbers) > 300
    assert {number: system_calls.call_names()[number] for number in numbers} == numbers


contained = pytest.mark.skipif(
    bool(containment.why_unavailable()),
    reason=f"no containment here: {containment.why_unavailable()}",
)


def attempt(function):
    """What a function returned, or the error's number and the refused calls, under the filter and nothing else."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            system_calls.make_call("prctl", 38, 1, 0, 0, 0)
            listener = system_calls.filter_calls(may_have_threads=True)
            socket.send_fds(theirs, [b" "], [listener])
            os.close(listener)
            theirs.send(str(function()).encode())
        except OSError as error:
            theirs.send(str(error.errno).encode())
        finally:
            os._exit(0)
    theirs.close()
    _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
    names = []
    while ours not in select.select([ours, listener], [], [])[0]:
        names.append(system_calls.refuse_call(listener))
    os.close(listener)
    os.waitpid(pid, 0)
    with ours:
        return " ".join([ours.recv(1000).decode(), *filter(None, names)])


def signal_by_owner(pid, command):
    reading, writing = os.pipe()
    owner = struct.pack("=ii", 1, pid) if command == 15 else pid
    fcntl.fcntl(reading, command, owner)
    fcntl.fcntl(reading, 10, 9)
    fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(writing, b"x")
    return "done"


@contained
def test_no_road_leads_to_another_process_of_the_same_user_without_landlock():
    """The victim is the same user's, and no scope of Landlock stands between: the filter alone has to hold."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as victim:
        try:
            before = os.sched_getaffinity(victim.pid)
            roads = {
                "fcntl": lambda: signal_by_owner(victim.pid, 8),
                "fcntl ": lambda: signal_by_owner(victim.pid, 15),
                "ioctl": lambda: fcntl.ioctl(os.pipe()[0], 0x8901, struct.pack("=i", victim.pid)),
                "ioctl ": lambda: fcntl.ioctl(
                    socket.socketpair()[0].fileno(), 0x8902, struct.pack("=i", victim.pid)
                ),
                "kill": lambda: os.kill(victim.pid, 9),
                "pidfd_open": lambda: os.pidfd_open(victim.pid),
                "sched_setaffinity": lambda: os.sched_setaffinity(victim.pid, [min(before)]),
                "setpriority": lambda: os.setpriority(os.PRIO_PROCESS, victim.pid, 19),
                "process_mrelease": lambda: system_calls.make_call("process_mrelease", 99, 0),
                "rt_sigqueueinfo": lambda: system_calls.make_call(
                    "rt_sigqueueinfo", victim.pid, 9, None
                ),
            }
            assert {name: attempt(road) for name, road in roads.items()} == {
                name: f"{errno.EPERM} {name.strip()}" for name in roads
            }
            assert victim.poll() is None
            assert os.sched_getaffinity(victim.pid) == before
        finally:
            victim.kill()


@contained
def test_no_datagram_leaves_and_a_stream_pair_works(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outside:
        outside.bind(str(tmp_path / "outside"))
        outside.setblocking(False)
        address = str(tmp_path / "outside")

        def by_stream_pair():
            one, other = socket.socketpair()
            one.sendall(b"stays")
            one.sendmsg([b" in"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))])
            return other.recv(100)

        def by_message():
            socket.socketpair()[0].sendmsg([b"x"], [], 0, address)

        assert attempt(by_stream_pair) == "b'stays in'"
        assert (
            attempt(lambda: socket.socketpair(type=socket.SOCK_DGRAM))
            == f"{errno.EPERM} socketpair"
        )
        assert (
            attempt(lambda: socket.socketpair(type=socket.SOCK_SEQPACKET))
            == f"{errno.EPERM} socketpair"
        )
        assert (
            attempt(lambda: socket.socketpair()[0].sendto(b"x", address)) == f"{errno.EPERM} sendto"
        )
        assert attempt(lambda: socket.socketpair()[0].connect(address)) == f"{errno.EPERM} connect"
        # Here the kernel itself refuses: the address lies where the filter cannot look.
        assert attempt(by_message) == str(errno.EISCONN)
        with pytest.raises(BlockingIOError):
            outside.recv(100)


@contained
def test_where_another_listens_already_the_kernel_refuses_by_itself():
    """As in a container whose manager answers some calls: there may be one listener only."""

    allow_all = system_calls._Filter(1, struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000))
    pid = os.fork()
    if pid == 0:
        try:
            system_calls.make_call("prctl", 38, 1, 0, 0, 0)
            system_calls.make_call("seccomp", 1, 8, ctypes.byref(allow_all))
            listener = system_calls.filter_calls(may_have_threads=True)
            os.kill(os.getppid(), 0)
        except PermissionError:
            os._exit(42 if listener is None else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
