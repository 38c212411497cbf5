# SPDX-License-Identifier: Apache-2.0
"""Connections to SGLang in its own process or at a running server.

Requests join and leave while others run.

    SGLangProcess  any thread -- request --> pipe --> host process --> SGLang's scheduler
                   future <-- reader thread <-- pipe <-----+
    SGLangServer   any thread -- request --> thread for each request --> HTTP --> server

consumes: requests; each has a future.
waits for: the replies. If the host process dies or the server is lost, the futures get an error.
unblocked by: the end of a response, `abort`, the caller's cancellation, `close`.
"""

import base64
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

import torch

from quadriga.errors import RolloutError
from quadriga.http_client import HTTPClient, ServerLostError
from quadriga.observe.probe import installed, release_numbers
from quadriga.rollout.sglang.host import LEAST, WHERE, require_version
from quadriga.rollout.sglang.receiver import LOADER
from quadriga.rollout.third_party import engine_lost_error, start_error

logger = logging.getLogger(__name__)

HEALTH_CHECK_EVERY_S = 10.0
HOST = "quadriga.rollout.sglang.host"  # the program of SGLang's process
_END_S = 30.0  # time for the process to end by itself before it is killed
_URL = "actor_rollout_ref.rollout.engine_kwargs.sglang.url"
# Threads of a server's connection for all requests but those for responses.
_NUM_CONTROLS = 4


class SGLangProcess:
    """A process with SGLang's engine.

    A process that does not answer a health check is killed. Its requests fail, so that other
    engines can serve them.

    Args:
        arguments: arguments of SGLang's engine.
        silent_s: time limit for the answer to a health check, in seconds.

    Attributes:
        version: version of SGLang.
        num_processes: number of tensor-parallel ranks.
        has_seeds: whether a seed determines its response: SGLang's "deterministic inference".
        takes_handles: whether weights are sent as handles of device memory.

    Raises:
        RolloutError: SGLang is missing, too old, or refuses the model or the options.
    """

    def __init__(self, arguments: Mapping[str, Any], silent_s: float = 300.0) -> None:
        require_version(installed("sglang")[1])  # of the pair of name and version
        self.num_processes: int = arguments["tp_size"]
        self.has_seeds = bool(arguments["enable_deterministic_inference"])
        self.takes_handles = arguments["device"] != "cpu"
        self._numbers = itertools.count()
        self._replies: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._has_ended = False
        self._silent_s = silent_s
        # SGLang and its imports print hundreds of warnings. Errors are still printed.
        environment = dict(os.environ)
        environment.setdefault("PYTHONWARNINGS", "ignore")
        environment.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if arguments["device"] == "cpu":
            # More threads than cores would slow both processes.
            environment.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
            # Compiling takes longer than it saves.
            environment["TORCH_COMPILE_DISABLE"] = "1"
        self._connection, host_connection = Pipe()
        # The `with` closes our copy of the host's end, so that the end of the host process ends the
        # connection. The new session makes a process group, by which `_end_process` kills all
        # processes of SGLang.
        with host_connection:
            host_fd = host_connection.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-m", HOST, str(host_fd)],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[host_fd],
                start_new_session=True,
            )
        try:
            self._connection.send(dict(arguments))
            # After the start, the host sends SGLang's version, or the error.
            is_ready, content = self._connection.recv()
        except (EOFError, OSError) as error:
            self._end_process()
            problem = f"a process that ended with status {self.process.returncode}"
            raise start_error("sglang", "SGLang", problem) from error
        if not is_ready:
            self._end_process()
            raise start_error("sglang", "SGLang", content)
        self.version: str = content
        threading.Thread(target=self._read_replies, name="sglang", daemon=True).start()
        threading.Thread(target=self._check_health, name="sglang health", daemon=True).start()

    def close(self) -> None:
        """End SGLang and its process."""
        self._has_ended = True
        self._end_process()

    def ask(self, method: str, **arguments: Any) -> "Future[Any]":
        """Send a request to SGLang.

        Args:
            method: name of the request.
            arguments: fields of the request.

        Returns:
            Future of SGLang's result. It has a RolloutError if SGLang refuses the request, and an
            EngineLostError if SGLang's process has ended.
        """
        future: Future[Any] = Future()
        problem = "has ended"
        # Sent under the lock, because two threads may not write to the pipe at once.
        with self._lock:
            if not self._has_ended:
                number = next(self._numbers)
                try:
                    self._connection.send((number, method, arguments))
                    self._replies[number] = future
                    return future
                except OSError as error:
                    problem = f"is not there any more ({error})"
        future.set_exception(engine_lost_error("sglang", "SGLang", problem))
        return future

    def _read_replies(self) -> None:
        """Main function of the reader thread: set the results of futures until the connection ends.

        Futures of requests that have no reply by then get an error.
        """
        while True:
            try:
                number, has_succeeded, result = self._connection.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                future = self._replies.pop(number)
            # Requests about weights and the cache return a pair: whether they succeeded, and a
            # message.
            if isinstance(result, tuple):
                has_succeeded, result = result
            if not future.set_running_or_notify_cancel():
                continue  # the caller has cancelled it
            if has_succeeded:
                future.set_result(result)
            else:
                future.set_exception(RolloutError(WHERE, got=str(result), expected="success"))
        with self._lock:
            self._has_ended = True
            unanswered = list(self._replies.values())
            self._replies = {}
        for future in unanswered:
            if future.set_running_or_notify_cancel():
                future.set_exception(engine_lost_error("sglang", "SGLang", "has ended"))

    def _check_health(self) -> None:
        """Kill the process when it does not answer in time, so that its requests fail."""
        while not self._has_ended:
            time.sleep(HEALTH_CHECK_EVERY_S)
            try:
                self.ask("is_alive").result(self._silent_s)
            except TimeoutError:
                pid = self.process.pid
                logger.warning(
                    "SGLang's process %d has not answered for %g s: killed", pid, self._silent_s
                )
                os.killpg(pid, signal.SIGKILL)
            except RolloutError:
                return  # the process has ended, which its requests report

    def _end_process(self) -> None:
        """Ask the host to end SGLang and itself, then kill the remaining processes."""
        with suppress(OSError):  # the host may have ended
            self._connection.send(None)  # the sign to end
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        with suppress(ProcessLookupError):  # all processes may have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._connection.close()


class SGLangServer:
    """A running server, with the attributes of `SGLangProcess`. Requests and weights go over HTTP.

    It must have been started with `--custom-weight-loader quadriga.rollout.sglang.receiver.load`,
    which reports the weights that it received.

    Args:
        url: address of the server.
        max_model_len: longest prompt and response together, in tokens.
        max_num_seqs: most requests at the same time.
        timeout_s: time limit of one request in seconds. A server that exceeds it counts as lost.
        headers: headers of every request, for example with a key.

    Raises:
        RolloutError: the server does not answer, is too old, or cannot take weights.
    """

    takes_handles = False

    def __init__(
        self,
        url: str,
        *,
        max_model_len: int,
        max_num_seqs: int = 256,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._client = HTTPClient(
            url,
            RolloutError,
            setting=_URL,
            where=WHERE,
            fix="Compare max_prompt_length, max_response_length and the server's own settings.",
            headers=headers,
            timeout_s=timeout_s,
        )
        self._pool = ThreadPoolExecutor(max_num_seqs, "sglang")
        # Separate threads, because requests that abort others must not wait for them.
        self._controls = ThreadPoolExecutor(_NUM_CONTROLS, "sglang control")
        info = self._call("server_info", None, "GET") or {}
        self.version = str(info.get("version", ""))
        self.has_seeds = bool(info.get("enable_deterministic_inference"))
        self.num_processes = int(info.get("tp_size") or 1)
        if release_numbers(self.version) < release_numbers(LEAST):
            got = f"SGLang {self.version or 'of no version'}"
            raise RolloutError(self._client.where, got, expected=f"{LEAST} or newer")
        if LOADER not in (info.get("custom_weight_loader") or ()):
            raise RolloutError(
                self._client.where,
                got="a server that does not report which weights it receives",
                expected=f"a server started with --custom-weight-loader {LOADER}",
            )
        context_length = int(info.get("context_length") or 0)
        # SGLang reserves a few positions of its limit, so it must be higher. 0: not reported.
        if 0 < context_length <= max_model_len:
            raise RolloutError(
                self._client.where,
                got=f"--context-length {context_length}",
                expected=f"a server started with more than {max_model_len}",
            )

    def close(self) -> None:
        """End the threads; the server goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._controls.shutdown(wait=False)

    def ask(self, method: str, **arguments: Any) -> "Future[Any]":
        """Send a request to the server.

        Args:
            method: name of the request.
            arguments: fields of the request.

        Returns:
            Future of the server's reply. It has a RolloutError if the server refuses the request or
            does not answer.
        """
        if payloads := arguments.get("serialized_named_tensors"):
            encoded = [base64.b64encode(payload).decode() for payload in payloads]
            arguments["serialized_named_tensors"] = encoded
        pool = self._pool if method == "generate" else self._controls
        return pool.submit(self._call, method, arguments)

    def _call(self, method: str, arguments: dict[str, Any] | None, kind: str = "POST") -> Any:
        """Send a request over HTTP, and return the reply.

        Args:
            method: name of the request, which is its path.
            arguments: fields of the request; None: no body.
            kind: HTTP method.

        Raises:
            RolloutError: the server refuses the request or does not answer.
        """
        try:
            return self._client.call(method, arguments, method=kind, needs_object=False)
        except ServerLostError as error:
            raise RolloutError(
                f"{self._client.where}/{method}",
                got=f"a server that does not answer ({error})",
                expected="an answer",
                fix=f"Check whether the server of {_URL} runs, and look at its log.",
            ) from error
