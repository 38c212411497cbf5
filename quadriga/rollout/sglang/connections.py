# SPDX-License-Identifier: Apache-2.0
"""SGLang in a process of its own, or at a running server: requests join and leave while others run.

    any thread, any loop ── request ──> pipe ──> host process ──> SGLang's scheduler and detokenizer
                 future <── thread of our own <── pipe <──┘
                         ── request ──> HTTP, a thread for each ──> server

consumes: requests; each has a future.
waits for: the replies; the death of the host, or a server that is lost, ends the futures with an error that says so.
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
from quadriga.rollout.third_party import died, refused

logger = logging.getLogger(__name__)

HEALTH_CHECK_EVERY_S = 10.0
HOST = "quadriga.rollout.sglang.host"
_END_S = 30.0
_URL = "actor_rollout_ref.rollout.engine_kwargs.sglang.url"
_NUM_CONTROLS = 4


class SGLangProcess:
    """A host process with SGLang's engine, whose end nothing else shares.

    One that does not answer a health check for `silent_s` seconds is killed: its requests fail, and others can serve
    them.

    Attributes:
        num_processes: tensor-parallel ranks.
        has_seeds: whether a seed determines its response: SGLang's "deterministic inference".
        takes_handles: whether it computes on devices of this process, of whose memory handles are enough.

    Raises:
        RolloutError: SGLang is missing, too old, or refuses the model or the options.
    """

    def __init__(self, arguments: Mapping[str, Any], silent_s: float = 300.0) -> None:
        require_version(installed("sglang")[1])
        self.num_processes: int = arguments["tp_size"]
        self.has_seeds = bool(arguments["enable_deterministic_inference"])
        self.takes_handles = arguments["device"] != "cpu"
        self._numbers = itertools.count()
        self._replies: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._has_ended, self._silent_s = False, silent_s
        # SGLang and what it imports print hundreds of warnings; errors still come through.
        environment = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"} | dict(
            os.environ
        )
        if arguments["device"] == "cpu":
            # A process that spins for the cores of another slows both; and compiling takes longer than it saves here.
            environment.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
            environment["TORCH_COMPILE_DISABLE"] = "1"
        self._connection, theirs = Pipe()
        with theirs:  # only the host has it from here on, so that its end is seen
            self.process = subprocess.Popen(
                [sys.executable, "-m", HOST, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            self._connection.send(dict(arguments))
            is_ready, self.version = self._connection.recv()
        except (EOFError, OSError) as error:
            self._end_process()
            raise refused(
                "sglang", "SGLang", f"a process that ended with status {self.process.returncode}"
            ) from error
        if not is_ready:
            self._end_process()
            raise refused("sglang", "SGLang", self.version)
        threading.Thread(target=self._read, name="sglang", daemon=True).start()
        threading.Thread(target=self._check_health, name="sglang health", daemon=True).start()

    def close(self) -> None:
        """End SGLang and its process."""
        self._has_ended = True
        self._end_process()

    def ask(self, method: str, **arguments: Any) -> "Future[Any]":
        """Send one of SGLang's requests. Its result is SGLang's; a refusal is a `RolloutError`."""
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
        """Complete the futures, but for those whose callers were cancelled, until the connection ends."""
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
            if not future.set_running_or_notify_cancel():
                continue
            if is_done:
                future.set_result(result)
            else:
                future.set_exception(RolloutError(WHERE, got=str(result), expected="success"))
        with self._lock:
            self._has_ended = True
            waiting, self._replies = self._replies, {}
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(died("sglang", "SGLang", "has ended"))

    def _check_health(self) -> None:
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
                return  # it has ended, which its requests say

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


class SGLangServer:
    """A connection to a server, with the attributes of `SGLangProcess`: requests and weights travel over HTTP.

    It was started with `--custom-weight-loader quadriga.rollout.sglang.receiver.load`, so that it says what reached it.

    Args:
        max_model_len: longest prompt and response together, in tokens.
        max_num_seqs: requests in flight at the same time.
        timeout_s: seconds for one request, after which the server counts as lost.
        headers: sent with every request, as for a key.

    Raises:
        RolloutError: there is no such server, or it lacks what weights need.
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
        fix = "Compare max_prompt_length, max_response_length and the server's own settings."
        self._client = HTTPClient(
            url,
            RolloutError,
            setting=_URL,
            where=WHERE,
            fix=fix,
            headers=headers,
            timeout_s=timeout_s,
        )
        self._pool = ThreadPoolExecutor(max_num_seqs, "sglang")
        # Of their own: what ends requests must not wait for them.
        self._controls = ThreadPoolExecutor(_NUM_CONTROLS, "sglang control")
        facts = self._call("server_info", None, "GET") or {}
        self.version = str(facts.get("version", ""))
        self.has_seeds = bool(facts.get("enable_deterministic_inference"))
        self.num_processes = int(facts.get("tp_size") or 1)
        longest = int(facts.get("context_length") or 0)
        problem = wanted = ""
        if release_numbers(self.version) < release_numbers(LEAST):
            problem, wanted = f"SGLang {self.version or 'of no version'}", f"{LEAST} or newer"
        elif LOADER not in (facts.get("custom_weight_loader") or ()):
            problem, wanted = (
                "a server that does not say which weights reach it",
                f"--custom-weight-loader {LOADER}",
            )
        elif 0 < longest <= max_model_len:
            problem, wanted = f"--context-length {longest}", f"more than {max_model_len}"
        if problem:
            raise RolloutError(self._client.where, got=problem, expected=wanted)

    def close(self) -> None:
        """End the threads; the server goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._controls.shutdown(wait=False)

    def ask(self, method: str, **arguments: Any) -> "Future[Any]":
        """Send a request to the server; see `SGLangProcess.ask`."""
        if payloads := arguments.get("serialized_named_tensors"):
            arguments["serialized_named_tensors"] = [
                base64.b64encode(one).decode() for one in payloads
            ]
        pool = self._pool if method == "generate" else self._controls
        return pool.submit(self._call, method, arguments)

    def _call(self, method: str, arguments: dict[str, Any] | None, kind: str = "POST") -> Any:
        try:
            return self._client.call(method, arguments, method=kind, needs_object=False)
        except ServerLostError as error:
            got, fix = (
                f"a server that does not answer ({error})",
                f"Look whether it runs, and at its log: {_URL}.",
            )
            raise RolloutError(
                f"{self._client.where}/{method}", got=got, expected="an answer", fix=fix
            ) from error
