# SPDX-License-Identifier: Apache-2.0
"""The program of one supervisor: it runs the tests of one problem, each in a contained process of its own.

It is a fresh interpreter without the site's start-up files (`COMMAND`), with an empty environment. It never runs a
line of the model's, and it gets the inputs only: the expected outputs never reach it.

    grader                       supervisor                    process of a test
      | -- the job, as JSON -----> |                              |
      |                            | -- fork -------------------> |  gives everything up (`containment`), then runs
      |                            | <--- what it was refused --- |  waits for the answer
      |                            | <----------- its end ------- |
      | <-- one outcome a test --- |  status and streams          |
      |                            |  ... `parallel` at a time

    supervisor   waits for the ends of processes, 50 ms at most; a process past its wall time or with too full a folder
                 is killed. SIGKILL only, so nothing can be ignored. It never waits for the grader: while that has not
                 read all outcomes, no further test is started.
    everything   ends with the supervisor, which ends with the grader: the kernel kills a child whose parent is gone.

Streams are files in memory, not pipes: they need no reader, and the limit on a file's size bounds them. They travel as
they are, each after its length (`HEADER`): nothing in them is read before the grader has them apart.
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
from quadriga.rewards.code.containment import MEGABYTE, NETWORK_SIGNAL, Limits
from quadriga.rewards.code.system_calls import refuse_call

COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from quadriga.rewards.code.supervisor import main; main()"
"""Program text for `python -I -S -c`; the arguments are the import path."""

RESULT_FD = (
    3  # where a function's result goes: not to the standard output, where the program may print
)

HEADER = struct.Struct("=I8sid4Q")
"""Before each test's streams: its index, status, exit code, CPU seconds, and the bytes of the three streams and of the
names of the system calls that it was refused."""

_NOTICE_FD = (
    4  # where a process says that it is contained, just before it closes it and the program begins
)
# So many are told; then the kernel refuses by itself (ENOSYS), and no program can keep a supervisor busy.
_MAX_REFUSALS = 8

_POLL_S = 0.05
_ERROR_BYTES = 8000


class _Running:
    """One test under way: its process, its streams, its folder, when its time is up, and what it has been refused."""

    # Not a data class: importing their module takes a fifth of a supervisor's start.
    def __init__(
        self, index: int, pid: int, streams: tuple[int, int, int], folder: Path, deadline: float
    ) -> None:
        self.index, self.pid, self.pid_fd = index, pid, os.pidfd_open(pid)
        self.streams, self.folder, self.deadline = streams, folder, deadline
        self.is_contained = False
        self.listener: int | None = None
        self.refused: list[str] = []


def main() -> None:
    """Run the job on the standard input; in the process of a test, run the program."""
    job = json.load(sys.stdin.buffer)
    supervisor = Supervisor(job)
    # Not earlier: who takes a user namespace loses it.
    containment.die_with_parent(job["grader"])
    case = supervisor.run()
    if case is not None:
        # The process of a test comes out here, and ends as any program does: threads are joined, exit handlers run.
        execute(job["program"], case)


def execute(program: str, case: dict[str, Any]) -> None:
    """Run the program as `__main__`; with a case for a function, call it and write the result to `RESULT_FD`."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    # A program may annotate and import as it likes, as if it stood in a file.
    exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
    if "function" not in case:
        return
    name = case["function"]
    if not hasattr(module, name) and not hasattr(module, "Solution"):
        raise NameError(f"the program has neither a function {name!r} nor a class Solution")
    owner = module if hasattr(module, name) else module.Solution()
    result = getattr(owner, name)(*case["arguments"])
    with open(RESULT_FD, "wb", closefd=False) as stream:
        stream.write(json.dumps(result, default=_as_json).encode())


def _as_json(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value)


class Supervisor:
    """Runs the tests of one job, each in a contained process, and returns their results."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._cases = job["cases"]
        self._limits = Limits(**job["limits"])
        self._parallel = job["parallel"]
        self._is_in_memory = job["is_in_memory"]
        self._path = job["path"]
        self._readable = job["readable"]
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Running] = {}
        # Each is one test's at a time, and empty between two.
        self._folders = [Path(job["folder"], str(number)) for number in range(self._parallel)]
        for folder in self._folders:
            folder.mkdir()
        if self._is_in_memory:
            containment.mount_memory(self._folders, self._limits)
        self._unsent: deque[memoryview] = deque()
        os.set_blocking(1, False)
        # From the processes of all tests: each message is whole.
        self._notices, self._notice = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._notices.setblocking(False)
        self._selector.register(self._notices, selectors.EVENT_READ)

    def run(self) -> dict[str, Any] | None:
        """None when all tests have ended; in the process of a test, which leaves by here too, its case."""
        for index, case in enumerate(self._cases):
            while len(self._running) >= self._parallel or self._unsent:
                self._wait()
            if self._start(index, case) == 0:
                return case
        while self._running or self._unsent:
            self._wait()
        return None

    def _start(self, index: int, case: dict[str, Any]) -> int:
        folder = self._folders.pop()
        out, error, result = map(_memory_file, ("stdout", "stderr", "result"))
        streams = (out, error, result)
        given = _memory_file("stdin", case.get("input", "").encode("utf-8", "surrogateescape"))
        pid = os.fork()
        if pid == 0:
            self._become_test(index, folder, (given, *streams, self._notice.fileno()))
            return 0
        os.close(given)
        running = _Running(index, pid, streams, folder, time.monotonic() + self._limits.wall_s)
        self._running[index] = running
        self._selector.register(running.pid_fd, selectors.EVENT_READ, running)
        return pid

    def _become_test(self, index: int, folder: Path, streams: tuple[int, ...]) -> None:
        # First out of the way of the numbers that the streams have, and of those that they are to have.
        first_free = max(streams) + len(streams)
        aside = [os.dup2(fd, first_free + number) for number, fd in enumerate(streams)]
        # Before their numbers are others': they would close those when they are freed.
        for owner in (self._selector, self._notices, self._notice):
            owner.close()
        for number, fd in enumerate(aside):
            os.dup2(fd, number)
        os.closerange(len(aside), 4096)
        os.chdir(folder)
        # Python ignores it: a program that prints without end would go on through its own errors.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        sys.argv[:] = ["solution.py"]
        sys.path[:] = [str(folder), *self._path]
        os.environ.update(HOME=str(folder), TMPDIR=str(folder))
        stdin, stdout, stderr = (
            io.FileIO(0, "r", False),
            io.FileIO(1, "w", False),
            io.FileIO(2, "w", False),
        )
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(
            io.BufferedReader(stdin), "utf-8", "surrogateescape"
        )
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(
            io.BufferedWriter(stdout), "utf-8", "surrogateescape"
        )
        errors = io.BufferedWriter(stderr)
        sys.stderr = sys.__stderr__ = io.TextIOWrapper(
            errors, "utf-8", "backslashreplace", line_buffering=True
        )
        listener = containment.confine(
            str(folder), self._limits, self._readable, may_remove=self._is_in_memory
        )
        with socket.socket(fileno=_NOTICE_FD) as notice:
            socket.send_fds(
                notice, [index.to_bytes(4, "little")], [] if listener is None else [listener]
            )
        if listener is not None:
            os.close(listener)
        for name in [name for name in sys.modules if name.partition(".")[0] == "quadriga"]:
            # A program has no business with them, and may have modules of the same name.
            del sys.modules[name]

    def _wait(self) -> None:
        """Until a test has ended, or 50 ms: report what has ended, kill what is over its limits."""
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
            over = (
                "wall"
                if now > running.deadline
                else "folder"
                if self._is_full(running.folder)
                else ""
            )
            if over:
                os.kill(running.pid, signal.SIGKILL)
                self._report(running, over)

    def _take_notices(self) -> None:
        """Of processes that they are contained, with the listeners of the calls that they will be refused."""
        with suppress(BlockingIOError):
            while True:
                message, listeners, _, _ = socket.recv_fds(self._notices, 4, 1)
                running = self._running[int.from_bytes(message, "little")]
                running.is_contained = True
                for running.listener in listeners:
                    self._selector.register(running.listener, selectors.EVENT_READ, running)

    def _refuse(self, running: _Running) -> None:
        assert running.listener is not None
        name = refuse_call(running.listener)
        running.refused += [name] if name else []
        # A process gives up its memory for milliseconds after its last call: its listener would be ready all the time.
        if name is None or len(running.refused) >= _MAX_REFUSALS:
            self._stop_listening(running)

    def _stop_listening(self, running: _Running) -> None:
        if running.listener is not None:
            self._selector.unregister(running.listener)
            os.close(running.listener)
            running.listener = None

    def _is_full(self, folder: Path) -> bool:
        if self._is_in_memory:
            # The file system itself is full then.
            return False
        num_files = size = 0
        with os.scandir(folder) as entries:
            for entry in entries:
                num_files += 1
                try:
                    size += 512 * entry.stat(follow_symlinks=False).st_blocks
                except FileNotFoundError:
                    # The program has removed it in between.
                    continue
        return num_files > self._limits.num_files or size > self._limits.folder_megabytes * MEGABYTE

    def _report(self, running: _Running, over: str) -> None:
        _, status, usage = os.wait4(running.pid, 0)
        over = over or ("folder" if self._is_full(running.folder) else "")
        self._take_notices()
        self._stop_listening(running)
        self._selector.unregister(running.pid_fd)
        del self._running[running.index]
        stdout, stderr, result = map(_content, running.streams)
        stderr = stderr[-_ERROR_BYTES:]
        if not running.is_contained and not over:
            said = stderr.decode("utf-8", "replace")
            raise RuntimeError(
                f"a test's process could not be contained, and its program has not run: {said}"
            )
        os.close(running.pid_fd)
        for entry in os.scandir(running.folder):
            os.unlink(entry.path)
        self._folders.append(running.folder)
        cpu_s = usage.ru_utime + usage.ru_stime
        ended = _status(status, over, cpu_s, self._limits)
        # What it printed counts only where it ended well.
        streams = (stdout, stderr, result) if ended == "ok" else (b"", stderr, b"")
        streams += (", ".join(dict.fromkeys(running.refused)).encode(),)
        code = os.waitstatus_to_exitcode(status)
        head = HEADER.pack(running.index, ended.encode(), code, cpu_s, *map(len, streams))
        self._unsent.extend(memoryview(part) for part in (head, *streams) if part)
        self._send()

    def _send(self) -> None:
        """What the grader's pipe takes without waiting; the rest when it has room again."""
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


def _status(status: int, over: str, cpu_s: float, limits: Limits) -> str:
    code = os.waitstatus_to_exitcode(status)
    # The kernel counts CPU time by ticks: its SIGKILL at the limit may come a little before.
    is_out_of_time = code == -signal.SIGKILL and not over and cpu_s >= 0.9 * limits.time_s
    if cpu_s >= limits.time_s or is_out_of_time:
        return "time"
    if over or code == 0:
        return over or "ok"
    by_signal = {-signal.SIGXFSZ: "output", -NETWORK_SIGNAL: "network"}
    return by_signal.get(code, "crash" if code < 0 else "error")


def _memory_file(name: str, content: bytes = b"") -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as stream:
        stream.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _content(fd: int) -> bytes:
    # A program may have moved the end of its own stream, but never past the limit on files.
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    return content
