# SPDX-License-Identifier: Apache-2.0
"""SGLang's engine beside this process: requests join and leave while others are being answered.

    any thread, any loop ── request ──> connection ──> host process ──> SGLang's scheduler and detokenizer
                 future <── thread of our own <── connection <──┘

consumes: requests; each has a future, which the reading thread completes.
waits for: the host's replies; the host's death ends every future with an error that says so.
unblocked by: an answer's end, `abort`, the caller's cancellation, `close`.
"""

import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch

from quadriga.errors import RolloutError
from quadriga.rollout.sglang.core import Limits, SGLangBase
from quadriga.rollout.sglang.library import WHERE, installed, require_version
from quadriga.rollout.sglang.receiver import LOADER

HOST = "quadriga.rollout.sglang.host"
_END_S = 30.0
_POLL_S = 0.2
# Of the host's memory: no more than a bound there, for the cache has a size of its own.
_SHARE_OF_HOST = 0.9
# SGLang keeps a few positions of its limit for itself, and cuts answers short that come near it.
_SPARE_TOKENS = 8


@dataclass(frozen=True)
class SGLangOptions:
    """How an engine on SGLang is made.

    Attributes:
        path: folder or name of the model.
        dtype: of its weights and of the computation.
        device: "cpu", "cuda", ...
        limits: see there.
        tokenizer: folder or name, for stop texts; "": the model's.
        max_num_seqs, max_num_batched_tokens: answers, and tokens, of one forward pass at most.
        cache_tokens: tokens whose keys and values are kept; None: SGLang decides by `gpu_memory_utilization`.
        gpu_memory_utilization: share of the device's memory, weights included.
        is_eager: whether no graph is captured.
        has_weights: whether they are read from `path`; False: they are random until the first load, and the engine
            refuses to generate.
        extra: further options, in SGLang's own words; they win.
    """

    path: str
    dtype: torch.dtype
    device: str
    limits: Limits
    tokenizer: str = ""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.5
    is_eager: bool = False
    has_weights: bool = True
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def in_sglangs_words(self) -> dict[str, Any]:
        """The arguments of SGLang's engine."""
        own: dict[str, Any] = {
            "model_path": self.path,
            "tokenizer_path": self.tokenizer or self.path,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device,
            "context_length": self.limits.max_model_len + _SPARE_TOKENS,
            "max_running_requests": self.max_num_seqs,
            "chunked_prefill_size": self.max_num_batched_tokens,
            "mem_fraction_static": self.gpu_memory_utilization,
            "tp_size": self.limits.num_processes,
            "load_format": "auto" if self.has_weights else "dummy",
            "custom_weight_loader": [LOADER],
            "enable_deterministic_inference": self.limits.has_seeds,
            "enable_memory_saver": self.limits.can_sleep,
            "enable_weights_cpu_backup": self.limits.can_sleep,
            "disable_cuda_graph": self.is_eager,
            "trust_remote_code": self.trust_remote_code,
            "json_model_override_args": json.dumps(self.override_config),
            "log_level": "error",
        }
        if self.cache_tokens is not None:
            own["max_total_tokens"] = self.cache_tokens
        if self.device == "cpu":
            # What runs without SGLang's own kernels, which have no build for CPUs in general.
            own |= {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}
            own |= {"disable_overlap_schedule": True, "mem_fraction_static": _SHARE_OF_HOST}
        return own | self.extra


class SGLangEngine(SGLangBase):
    """See `SGLangBase`; SGLang's engine lives in a process of its own, whose end nothing else shares.

    Raises:
        RolloutError: SGLang is missing, too old, or refuses the model or the options.
    """

    def __init__(self, options: SGLangOptions) -> None:
        super().__init__(options.limits, has_weights=options.has_weights)
        require_version(installed())
        self._numbers = itertools.count()
        self._replies: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._has_ended = False
        key = secrets.token_bytes(32)
        with Listener(family="AF_UNIX", authkey=key) as listener:
            self.process = _start_host(str(listener.address), key, options)
            self._connection: Connection[Any, Any] = _accept(listener, self.process)
        try:
            self._connection.send(options.in_sglangs_words())
            is_ready, self.version = self._connection.recv()
        except (EOFError, OSError) as error:
            self._end_process()
            raise self._refused("a process that ended") from error
        if not is_ready:
            self._end_process()
            raise self._refused(self.version)
        threading.Thread(target=self._read, name="sglang", daemon=True).start()

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self._state != "closed":
            super().close()
            self._has_ended = True
            self._end_process()

    def _ask(self, method: str, **arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            if self._has_ended:
                future.set_exception(self._died("has ended"))
                return future
            number = next(self._numbers)
            self._replies[number] = future
            try:
                self._connection.send((number, method, arguments))
            except OSError as error:
                self._replies.pop(number)
                future.set_exception(self._died(f"is not there any more ({error})"))
        return future

    def _read(self) -> None:
        """Completes the futures, until the connection ends."""
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
            _complete(future, self._died("has ended"))

    def _end_process(self) -> None:
        """Asks the host to end SGLang and itself; what is left of its processes then is killed."""
        with suppress(OSError):  # it may be gone
            self._connection.send(None)
        with suppress(subprocess.TimeoutExpired):  # then it is killed
            self.process.wait(_END_S)
        with suppress(ProcessLookupError):  # nothing may be left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._connection.close()


def _start_host(address: str, key: bytes, options: SGLangOptions) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ)
    if options.device == "cpu":
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
    """Result or error, unless whoever waited has given it up."""
    try:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        assert future.cancelled()
