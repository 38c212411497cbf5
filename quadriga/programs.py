# SPDX-License-Identifier: Apache-2.0
"""Starts fresh interpreters under a supervisor (`quadriga.descendants`), with connections to them."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from types import MappingProxyType

from quadriga import streams
from quadriga.descendants import end_descendants, end_group, supervise
from quadriga.lazy import collector_paused, keep_modules

_END_LIMIT_S = 15.0  # longer than a supervisor takes to end its descendants
# Arguments: those of `run_program`, then the entries of the driver's import path.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[5:]; "
    "from quadriga.programs import run_program; "
    "run_program(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
)


class SupervisedProgram:
    """A fresh interpreter that calls `main(connection_fd)` of a module, and the connection to it.

    Unlike a process of `multiprocessing`, it neither inherits threads, locks, signal handlers and
    memory of this process, nor runs the user's script again. It has its own process group, so that
    Ctrl-C reaches only this process, which decides what to do. However this process ends, the
    program and everything that it has started end, too.

    Args:
        module: name of the module with `main`.
        output_fd: file descriptor for standard output and standard error, in UTF-8. None: those of
            this process.
        variables: environment variables of the program, in addition to those of this process.
    """

    def __init__(
        self,
        module: str,
        output_fd: int | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        ours, theirs = socket.socketpair()
        # The supervisor ends the program when a byte arrives in this pipe, or when its other end closes.
        their_lifeline, self._lifeline = os.pipe()
        fds = (theirs.fileno(), their_lifeline)
        encoding = "" if output_fd is None else "utf-8"
        # Unbuffered (-u), so that its output is complete even if it hangs.
        command = [
            sys.executable,
            "-u",
            "-c",
            _PROGRAM,
            module,
            *map(str, fds),
            encoding,
            *map(str, sys.path),
        ]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                env={**os.environ, **variables},
                pass_fds=fds,
                process_group=0,
            )
        finally:
            # The program has inherited copies of these ends. Here they are closed, so that the end
            # of the program closes the last copy.
            theirs.close()
            os.close(their_lifeline)
        self.connection = Connection(ours.detach())
        self._lock = threading.Lock()

    def kill(self) -> None:
        """Kill the program and everything it has started. Any thread may call this, also repeatedly."""
        # The supervisor may already have ended.
        with self._lock, suppress(ProcessLookupError, BrokenPipeError):
            if not self.connection.closed:
                os.write(self._lifeline, b"x")
                # The supervisor's child may have stopped it, so that it does not read the byte.
                self.process.send_signal(signal.SIGCONT)

    def close(self, patience_s: float = 0.0) -> str:
        """Kill the program, unless it ends by itself within `patience_s`, and close the connection.

        Returns:
            How it ended, such as "exit status 1" or "signal SIGKILL".
        """
        if not self.connection.closed:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=patience_s)
            self.kill()
            try:
                self.process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                end_descendants(self.process.pid)
                self.process.kill()
                self.process.wait()
            # A supervisor that was killed has not ended the control group.
            end_group(self.process.pid)
            with self._lock:
                self.connection.close()
                os.close(self._lifeline)
        code = self.process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def run_program(module: str, connection_fd: int, lifeline_fd: int, encoding: str) -> None:
    """Run the program of a `SupervisedProgram`.

    Args:
        module: name of the module with `main`.
        connection_fd: file descriptor of the connection, the argument of `main`.
        lifeline_fd: file descriptor that tells the supervisor to end the program.
        encoding: encoding of the output; "": that of the locale.
    """
    supervise(lifeline_fd)  # returns only in the supervisor's child
    streams.install(encoding or None)
    # Programs that this one starts must not hold the connection open after its end.
    os.set_inheritable(connection_fd, False)
    keep_modules()
    with collector_paused():
        main = import_module(module).main
    main(connection_fd)
