# SPDX-License-Identifier: Apache-2.0
"""Program of a supervisor, which runs the tests of one problem, each in a contained process.

A supervisor is a fresh interpreter without the site's start-up files (`COMMAND`) and with few
environment variables. It never runs a line that the model wrote, and it gets only the inputs of
tests, not the expected outputs.

    grader                       supervisor                    process of a test
      | -- the job, as JSON -----> |                              |
      |                            | -- fork -------------------> |  gives up its rights, then runs
      |                            |                              |  the program (`containment`)
      |                            | <--- a refused system call - |  waits for the answer
      |                            | <----------- its end ------- |
      | <-- an outcome per test -- |  status and streams          |
      |                            |  ... `parallel` at a time

    supervisor   waits for the end of a process, 50 ms at most. Kills a process after its wall time
                 or if its folder is too full, by SIGKILL, which cannot be ignored. Never blocks on
                 the grader, but starts no further test before the grader has read all outcomes.
    everything   ends with the supervisor, which ends with the grader: the kernel kills a child
                 whose parent is gone.

Streams are files in memory, not pipes: nobody has to read them while the program runs, and the
limit on the size of files applies to them. They are sent unchanged, after their lengths (`HEADER`),
so that nothing in their content can pass for an outcome.
"""

import io
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import types
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from quadriga.rewards.code import containment
from quadriga.rewards.code.containment import MEGABYTE, NETWORK_SIGNAL, ResourceLimits
from quadriga.rewards.code.system_calls import refuse_call

COMMAND = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from quadriga.rewards.code.supervisor import main; main()"
)
"""Program text for `python -I -S -c`; the arguments are the import path."""

# Descriptor for the result of a function, apart from the standard output, to which the program
# prints.
RESULT_FD = 3

HEADER = struct.Struct("=I8sid4Q")
"""Sent before the streams of each test: index, status, exit code, CPU seconds, and the bytes of
standard output, standard error, result, and names of refused system calls."""

# Descriptor on which the process of a test reports that it is contained; closed before the program
# begins.
_NOTICE_FD = 4
# After so many refused calls the listener is closed and the kernel refuses them itself (ENOSYS), so
# that no program can keep its supervisor busy.
_MAX_REFUSALS = 8

_POLL_S = 0.05
_ERROR_BYTES = 8000


class _RunningTest:
    """A test under way.

    Attributes:
        index: position of the test.
        pid: id of the test's process.
        pid_fd: descriptor that is ready when the process has ended.
        streams: files in memory for the standard output, standard error and result.
        folder: folder of the program.
        deadline: time at which the process is killed, by `time.monotonic`.
        is_contained: whether the process has given up its rights, after which the program begins.
        listener: descriptor for the process's refused system calls. None: there is none (yet).
        refused: names of the refused system calls.
    """

    # Not a dataclass: importing `dataclasses` takes a fifth of a supervisor's start.
    def __init__(
        self, index: int, pid: int, streams: tuple[int, int, int], folder: Path, deadline: float
    ) -> None:
        self.index = index
        self.pid = pid
        self.pid_fd = os.pidfd_open(pid)
        self.streams = streams
        self.folder = folder
        self.deadline = deadline
        self.is_contained = False
        self.listener: int | None = None
        self.refused: list[str] = []


def main() -> None:
    """Run the job that is read from the standard input."""
    job = json.load(sys.stdin.buffer)
    supervisor = Supervisor(job)
    # After the constructor, which may mount: entering a user namespace for it resets this setting.
    containment.die_with_parent(job["grader"])
    case = supervisor.run()
    if case is not None:
        # This is the forked process of a test. By returning from here it ends like any program,
        # with exit handlers.
        execute(job["program"], case)


def execute(program: str, case: dict[str, Any]) -> None:
    """Run a program as `__main__`.

    Args:
        program: text of the program.
        case: input of the test, as in `Case.test_input`. If it names a function, the function is called
            and the result is written to `RESULT_FD` as JSON. The function may also be a method of a
            class `Solution`.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    # By default `compile` would apply this file's `__future__` statements.
    exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
    if "function" not in case:
        return
    name = case["function"]
    owner: Any = module
    if not hasattr(module, name):
        if not hasattr(module, "Solution"):
            raise NameError(f"the program has neither a function {name!r} nor a class Solution")
        owner = module.Solution()
    result = getattr(owner, name)(*case["arguments"])
    with open(RESULT_FD, "wb", closefd=False) as stream:
        stream.write(json.dumps(result, default=_as_json).encode())


def _as_json(value: Any) -> Any:
    """Convert a value that JSON does not know to a list: a set, an array, or any other iterable."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value)


class Supervisor:
    """Runs the tests of one job, each in a contained process, and sends their outcomes.

    Args:
        job: what `run_cases` sends: the program, the inputs of the tests, limits and folders.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._cases = job["cases"]
        self._limits = ResourceLimits(**job["limits"])
        self._parallel = job["parallel"]
        self._is_in_memory = job["is_in_memory"]
        self._path = job["path"]
        self._readable = job["readable"]
        self._selector = selectors.DefaultSelector()
        # Tests under way, by their positions.
        self._running: dict[int, _RunningTest] = {}
        # Folders that no test uses at the moment, all empty.
        self._folders = [Path(job["folder"], str(number)) for number in range(self._parallel)]
        for folder in self._folders:
            folder.mkdir()
        if self._is_in_memory:
            containment.mount_memory_file_systems(self._folders, self._limits)
        # Bytes of outcomes that the grader's pipe, descriptor 1, has not taken yet.
        self._unsent: deque[memoryview] = deque()
        os.set_blocking(1, False)
        # Processes of tests report here that they are contained. All write to one socket, so it is
        # of a type that keeps messages apart.
        self._notices, self._notice_sender = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._notices.setblocking(False)
        self._selector.register(self._notices, selectors.EVENT_READ)

    def run(self) -> dict[str, Any] | None:
        """Run all tests. This returns in the supervisor, and in the forked process of each test.

        Returns:
            In the supervisor None, when all tests have ended. In the process of a test its case,
            whose program has to be run.
        """
        for index, case in enumerate(self._cases):
            while len(self._running) >= self._parallel or self._unsent:
                self._wait()
            if self._start(index, case) == 0:
                return case
        while self._running or self._unsent:
            self._wait()
        return None

    def _start(self, index: int, case: dict[str, Any]) -> int:
        """Fork the process of a test.

        Args:
            index: position of the test.
            case: input of the test, as in `Case.test_input`.

        Returns:
            Like `os.fork`, 0 in the new process, which is contained then, else the process's id.
        """
        folder = self._folders.pop()
        streams = (
            _create_memory_file("stdout"),
            _create_memory_file("stderr"),
            _create_memory_file("result"),
        )
        stdin = _create_memory_file(
            "stdin", case.get("input", "").encode("utf-8", "surrogateescape")
        )
        pid = os.fork()
        if pid == 0:
            self._become_test(index, folder, (stdin, *streams, self._notice_sender.fileno()))
            return 0
        os.close(stdin)
        running = _RunningTest(index, pid, streams, folder, time.monotonic() + self._limits.wall_s)
        self._running[index] = running
        self._selector.register(running.pid_fd, selectors.EVENT_READ, running)
        return pid

    def _become_test(self, index: int, folder: Path, fds: tuple[int, ...]) -> None:
        """Turn this forked process into that of a test: set its streams and folder, contain it.

        Args:
            index: position of the test.
            folder: folder of the test.
            fds: what the descriptors 0 to 4 are to be: standard input, output and error, the
                result, and the notice that the process is contained.
        """
        # First duplicate all beyond their old and new numbers, so that none is overwritten.
        first_free = max(fds) + len(fds)
        moved_fds = [os.dup2(fd, first_free + number) for number, fd in enumerate(fds)]
        # Close these objects now: later they would close other descriptors that have the same
        # numbers.
        for owner in (self._selector, self._notices, self._notice_sender):
            owner.close()
        for number, fd in enumerate(moved_fds):
            os.dup2(fd, number)
        os.closerange(len(moved_fds), 4096)

        os.chdir(folder)
        # End the process when it writes beyond the limit on sizes. Python ignores this signal, and
        # then a program that prints without end could catch an OSError and go on.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        sys.argv[:] = ["solution.py"]
        sys.path[:] = [str(folder), *self._path]
        os.environ.update(HOME=str(folder), TMPDIR=str(folder))
        # New objects for the standard streams: the old ones belong to the supervisor.
        stdin = io.BufferedReader(io.FileIO(0, "r", False))
        stdout = io.BufferedWriter(io.FileIO(1, "w", False))
        stderr = io.BufferedWriter(io.FileIO(2, "w", False))
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(stdin, "utf-8", "surrogateescape")
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(stdout, "utf-8", "surrogateescape")
        sys.stderr = sys.__stderr__ = io.TextIOWrapper(
            stderr, "utf-8", "backslashreplace", line_buffering=True
        )

        listener = containment.confine(
            str(folder), self._limits, self._readable, may_remove=self._is_in_memory
        )
        # Send the supervisor the number of the test and, if there is one, the listener.
        listeners = [] if listener is None else [listener]
        with socket.socket(fileno=_NOTICE_FD) as notice:
            socket.send_fds(notice, [index.to_bytes(4, "little")], listeners)
        if listener is not None:
            os.close(listener)
        # The program must get its own modules, even if one is called `quadriga`.
        for name in list(sys.modules):
            if name.partition(".")[0] == "quadriga":
                del sys.modules[name]

    def _wait(self) -> None:
        """Handle events, for 50 ms at most; kill and report tests that exceed a limit."""
        for key, _ in self._selector.select(_POLL_S):
            if key.fd == 1:
                self._send()
            elif key.fileobj is self._notices:
                self._take_notices()
            elif key.fd == key.data.pid_fd:
                self._report(key.data, "")
            elif key.fd == key.data.listener:
                self._refuse(key.data)
        now = time.monotonic()
        for running in list(self._running.values()):
            if now > running.deadline:
                exceeded = "wall"
            elif self._is_full(running.folder):
                exceeded = "folder"
            else:
                continue
            os.kill(running.pid, signal.SIGKILL)
            self._report(running, exceeded)

    def _take_notices(self) -> None:
        """Read which processes are contained, and take the listeners that they send."""
        with suppress(BlockingIOError):
            while True:
                # A message is the position of a test in 4 bytes, with at most one descriptor.
                message, listeners, _, _ = socket.recv_fds(self._notices, 4, 1)
                running = self._running[int.from_bytes(message, "little")]
                running.is_contained = True
                for listener in listeners:
                    running.listener = listener
                    self._selector.register(listener, selectors.EVENT_READ, running)

    def _refuse(self, running: _RunningTest) -> None:
        """Refuse the system call for which a test waits, and store the name of the call."""
        assert running.listener is not None
        name = refuse_call(running.listener)
        if name:
            running.refused.append(name)
        # None: the process is ending. Stop, because the listener stays ready until the end.
        if name is None or len(running.refused) >= _MAX_REFUSALS:
            self._stop_listening(running)

    def _stop_listening(self, running: _RunningTest) -> None:
        """Close the listener of a test, if there is one. The kernel then refuses calls itself."""
        if running.listener is not None:
            self._selector.unregister(running.listener)
            os.close(running.listener)
            running.listener = None

    def _is_full(self, folder: Path) -> bool:
        """Whether a folder exceeds the limits on files or bytes."""
        if self._is_in_memory:
            return False  # the kernel enforces the limits
        num_files = 0
        size = 0
        with os.scandir(folder) as entries:
            for entry in entries:
                num_files += 1
                try:
                    size += 512 * entry.stat(follow_symlinks=False).st_blocks
                except FileNotFoundError:
                    continue  # the program has just removed it
        return num_files > self._limits.num_files or size > self._limits.folder_megabytes * MEGABYTE

    def _report(self, running: _RunningTest, exceeded: str) -> None:
        """Queue the outcome of a test that has ended, and send what can be sent.

        Args:
            running: the test.
            exceeded: the limit for which the test was killed, "wall" or "folder"; "" if it ended by
                itself.

        Raises:
            RuntimeError: the process ended before its program began.
        """
        _, wait_status, usage = os.wait4(running.pid, 0)
        if not exceeded and self._is_full(running.folder):
            exceeded = "folder"
        # If the process ended at once, the notice that it was contained may not have been read yet.
        self._take_notices()
        self._stop_listening(running)
        self._selector.unregister(running.pid_fd)
        del self._running[running.index]
        stdout, stderr, result = map(_read_and_close, running.streams)
        stderr = stderr[-_ERROR_BYTES:]
        if not running.is_contained and not exceeded:
            reason = stderr.decode("utf-8", "replace")
            raise RuntimeError(
                f"a test's process could not be contained, and its program has not run: {reason}"
            )
        os.close(running.pid_fd)
        # The next test gets an empty folder.
        for entry in os.scandir(running.folder):
            os.unlink(entry.path)
        self._folders.append(running.folder)

        cpu_s = usage.ru_utime + usage.ru_stime
        code = os.waitstatus_to_exitcode(wait_status)
        status = _status(code, exceeded, cpu_s, self._limits)
        if status != "ok":
            # Output and result are not compared, because the test has failed.
            stdout = b""
            result = b""
        refused = ", ".join(dict.fromkeys(running.refused)).encode()
        streams = (stdout, stderr, result, refused)
        header = HEADER.pack(running.index, status.encode(), code, cpu_s, *map(len, streams))
        self._unsent.extend(memoryview(part) for part in (header, *streams) if part)
        self._send()

    def _send(self) -> None:
        """Send what the grader's pipe takes without blocking; `_wait` sends the rest later."""
        # Whether `_wait` watches the pipe, because it was full before.
        is_waiting = 1 in self._selector.get_map()
        while self._unsent:
            try:
                num_sent = os.write(1, self._unsent[0])
            except BlockingIOError:
                if not is_waiting:
                    self._selector.register(1, selectors.EVENT_WRITE)
                return
            self._unsent[0] = self._unsent[0][num_sent:]
            if not self._unsent[0]:
                self._unsent.popleft()
        if is_waiting:
            self._selector.unregister(1)


def _status(code: int, exceeded: str, cpu_s: float, limits: ResourceLimits) -> str:
    """Status of a test that has ended (`CaseRun.status`).

    Args:
        code: exit status. If a signal ended the program, the signal's number, negated.
        exceeded: the limit for which the supervisor killed the program, or "".
        cpu_s: CPU time in seconds.
        limits: limits of the test.
    """
    # The kernel kills a program at the limit of CPU time. It counts in ticks, so `cpu_s` may be a
    # little below the limit.
    is_out_of_time = code == -signal.SIGKILL and not exceeded and cpu_s >= 0.9 * limits.time_s
    if cpu_s >= limits.time_s or is_out_of_time:
        return "time"
    if exceeded:
        return exceeded
    if code == 0:
        return "ok"
    if code == -signal.SIGXFSZ:
        return "output"
    if code == -NETWORK_SIGNAL:
        return "network"
    return "crash" if code < 0 else "error"


def _create_memory_file(name: str, content: bytes = b"") -> int:
    """Create a file in memory, and return its descriptor, positioned at the beginning."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as stream:
        stream.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read_and_close(fd: int) -> bytes:
    """Read a file in memory as a whole, and close it."""
    # The size is what the program has made it, but not beyond the limit on the size of files.
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    return content
