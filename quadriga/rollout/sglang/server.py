# SPDX-License-Identifier: Apache-2.0
"""A running server of SGLang: requests and weights travel over HTTP.

It is started with `--custom-weight-loader quadriga.rollout.sglang.receiver.load`, so that it says what reached it.
"""

import base64
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from quadriga.errors import RolloutError
from quadriga.http_client import HTTPClient, ServerLostError
from quadriga.observe.probe import release_numbers
from quadriga.rollout.sglang.host import LEAST, WHERE
from quadriga.rollout.sglang.receiver import LOADER

_URL = "actor_rollout_ref.rollout.engine_kwargs.sglang.url"
_NUM_CONTROLS = 4


class SGLangServer:
    """A connection to a server.

    Args:
        url: of the server.
        max_model_len: longest prompt and response together, in tokens.
        max_num_seqs: requests in flight at the same time.
        timeout_s: seconds without a byte after which the server counts as lost.
        headers: sent with every request, as for a key.

    Raises:
        RolloutError: there is no such server, or it lacks what weights need.
    """

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
            url, RolloutError, setting=_URL, where=WHERE, fix=fix, headers=headers, timeout_s=timeout_s
        )
        self._pool = ThreadPoolExecutor(max_num_seqs, "sglang")
        # Of their own: what ends requests must not wait for them.
        self._controls = ThreadPoolExecutor(_NUM_CONTROLS, "sglang control")
        facts = self._call("server_info", None, "GET") or {}
        self.version = str(facts.get("version", ""))
        self._require(facts, max_model_len)
        self.has_seeds = bool(facts.get("enable_deterministic_inference"))
        self.num_processes = int(facts.get("tp_size") or 1)

    def close(self) -> None:
        """End the threads; the server goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._controls.shutdown(wait=False)

    def ask(self, method: str, **arguments: Any) -> "Future[Any]":
        """Send a request to the server."""
        if payloads := arguments.get("serialized_named_tensors"):
            arguments["serialized_named_tensors"] = [base64.b64encode(one).decode() for one in payloads]
        pool = self._pool if method == "generate" else self._controls
        return pool.submit(self._call, method, arguments)

    def _call(self, method: str, arguments: dict[str, Any] | None, kind: str = "POST") -> Any:
        try:
            return self._client.call(method, arguments, method=kind, needs_object=False)
        except ServerLostError as error:
            raise RolloutError(
                f"{self._client.where}/{method}",
                got=f"a server that does not answer ({error})",
                expected="an answer",
                fix=f"Look whether it runs, and at its log: {_URL}.",
            ) from error

    def _require(self, facts: dict[str, Any], max_model_len: int) -> None:
        """Refuse a server that would not do, before anything is sent to it."""
        longest = int(facts.get("context_length") or 0)
        problem = wanted = ""
        if release_numbers(self.version) < release_numbers(LEAST):
            problem, wanted = f"SGLang {self.version or 'of no version'}", f"{LEAST} or newer"
        elif LOADER not in (facts.get("custom_weight_loader") or ()):
            problem, wanted = "a server that does not say which weights reach it", f"--custom-weight-loader {LOADER}"
        elif 0 < longest <= max_model_len:
            problem, wanted = f"--context-length {longest}", f"more than {max_model_len}"
        if problem:
            raise RolloutError(self._client.where, got=problem, expected=wanted)
