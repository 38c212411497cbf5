# SPDX-License-Identifier: Apache-2.0
"""SGLang in a process of its own: requests join and leave while others run.

    any thread, any loop ── request ──> connection ──> host process ──> SGLang's scheduler and detokenizer
                 future <── thread of our own <── connection <──┘

consumes: requests; each has a future, which the reading thread completes.
waits for: the host's replies; the host's death ends every future with an error that says so.
unblocked by: the end of a response, `abort`, the caller's cancellation, `close`.
"""

import itertools
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch

from quadriga.errors import RolloutError
from quadriga.rollout.sglang.host import WHERE, installed, require_version
from quadriga.rollout.third_party import died, refused

HOST = "quadriga.rollout.sglang.host"
_END_S = 30.0
_POLL_S = 0.2


class SGLangProcess:
    """A host process with SGLang's engine, whose end nothing else shares.

    Args:
        arguments: of SGLang's engine.

    Raises:
        RolloutError: SGLang is missing, too old, or refuses the model or the options.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        require_version(installed())
        self.num_processes: int = arguments["tp_size"]
        self.has_seeds = bool(arguments["enable_deterministic_inference"])
        self._numbers = itertools.count()
        self._replies: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._has_ended = False
        key = secrets.token_bytes(32)
        with Listener(family="AF_UNIX", authkey=key) as listener:
            self.process = _start_host(str(listener.address), key, is_on_cpu=arguments["device"] == "cpu")
            self._connection: Connection[Any, Any] = _accept(listener, self.process)
        try:
            self._connection.send(dict(arguments))
            is_ready, self.version = self._connection.recv()
        except (EOFError, OSError) as error:
            self._end_process()
            raise refused("sglang", "SGLang", "a process that ended") from error
        if not is_ready:
            self._end_process()
            raise refused("sglang", "SGLang", self.version)
        threading.Thread(target=self._read, name="sglang", daemon=True).start()

    def close(self) -> None:
        """End SGLang and its process."""
        self._has_ended = True
        self._end_process()

    def ask(self, method: str, **arguments: Any) -> "Future[Any]":
        """Send a request to SGLang's engine."""
        future: Future[Any] = Future()
        with self._lock:
            if self._has_ended:
                future.set_exception(died("sglang", "SGLang", "has ended"))
                return future
            number = next(self._numbers)
            self._replies[number] = future
            try:
                self._connection.send((number, method, arguments))
            except OSError as error:
                self._replies.pop(number)
                future.set_exception(died("sglang", "SGLang", f"is not there any more ({error})"))
        return future

    def _read(self) -> None:
        """Complete the futures, until the connection ends."""
        while True:
            try:
                number, is_done, result = self._connection.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                future = self._replies.pop(number)
            # Calls about weights tell by a pair whether they were done.
            if isinstance(result, tuple):
                is_done, result = result
            _complete(future, result if is_done else RolloutError(WHERE, got=str(result), expected="success"))
        with self._lock:
            self._has_ended = True
            waiting, self._replies = self._replies, {}
        for future in waiting.values():
            _complete(future, died("sglang", "SGLang", "has ended"))

    def _end_process(self) -> None:
        """Tell the host to end SGLang and itself; what is left of its processes then is killed."""
        with suppress(OSError):  # it may be gone
            self._connection.send(None)
        with suppress(subprocess.TimeoutExpired):  # then it is killed
            self.process.wait(_END_S)
        with suppress(ProcessLookupError):  # nothing may be left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._connection.close()


def _start_host(address: str, key: bytes, *, is_on_cpu: bool) -> "subprocess.Popen[bytes]":
    # SGLang and what it imports print hundreds of warnings; errors still come through.
    environment = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"} | dict(os.environ)
    if is_on_cpu:
        # A process that spins for the cores of another slows both; and compiling takes longer than it saves here.
        environment.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        environment["TORCH_COMPILE_DISABLE"] = "1"
    command = [sys.executable, "-m", HOST, address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(key)
    process.stdin.close()
    return process


def _accept(listener: Listener, process: "subprocess.Popen[bytes]") -> "Connection[Any, Any]":
    """The host's connection, or an error if it ends before there is one."""
    found: Future[Any] = Future()

    def accept() -> None:
        try:
            found.set_result(listener.accept())
        except (OSError, EOFError) as error:
            found.set_exception(error)

    threading.Thread(target=accept, name="sglang accept", daemon=True).start()
    while True:
        try:
            return found.result(_POLL_S)
        except TimeoutError:
            if process.poll() is not None:
                raise RolloutError(
                    f"{WHERE}, at its start",
                    got=f"a process that ended with status {process.returncode}",
                    expected="one that answers",
                    fix="Its own message stands in the log above.",
                ) from None


def _complete(future: "Future[Any]", outcome: Any) -> None:
    """Set the result or the error, unless the caller was cancelled."""
    try:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        assert future.cancelled()
