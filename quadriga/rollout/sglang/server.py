# SPDX-License-Identifier: Apache-2.0
"""SGLang's server, which others run: requests and weights travel over HTTP.

It is started with `--custom-weight-loader quadriga.rollout.sglang.receiver.load`, so that it says what reached it.
"""

import base64
import http.client
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from quadriga.errors import RolloutError
from quadriga.observe.probe import release_numbers
from quadriga.rollout.sglang.core import Limits, SGLangBase
from quadriga.rollout.sglang.library import LEAST, WHERE
from quadriga.rollout.sglang.receiver import LOADER

_URL = "actor_rollout_ref.rollout.engine_kwargs.sglang.url"
_IS_FINE = 200
_CONTROLS = 4


class SGLangServer(SGLangBase):
    """See `SGLangBase`. The server's weights are not trusted: it generates with those that were sent to it.

    Args:
        url: of the server.
        limits: see there; how many processes it has and whether seeds count is asked of the server.
        max_num_seqs: requests in flight at the same time.
        timeout_s: seconds without a byte after which the server counts as lost.
        headers: sent with every request, as for a key.

    Raises:
        RolloutError: there is no such server, or it lacks what weights need.
    """

    def __init__(
        self,
        url: str,
        limits: Limits,
        *,
        max_num_seqs: int = 256,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = urlsplit(url)
        if self.url.scheme not in ("http", "https") or not self.url.netloc:
            raise RolloutError(_URL, got=repr(url), expected="an address such as http://host:30000")
        self.timeout_s, self.headers = timeout_s, dict(headers or {})
        self._pool = ThreadPoolExecutor(max_num_seqs, "sglang")
        # Of their own: what ends requests must not wait for them.
        self._controls = ThreadPoolExecutor(_CONTROLS, "sglang control")
        facts = self._post("server_info", {}, kind="GET")
        self.version = str(facts.get("version", ""))
        self._require(facts, limits)
        is_seeded = bool(facts.get("enable_deterministic_inference"))
        known = replace(limits, has_seeds=is_seeded, num_processes=int(facts.get("tp_size") or 1))
        super().__init__(known, has_weights=False)

    def close(self) -> None:
        """See `RolloutEngine.close`; the server goes on."""
        super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._controls.shutdown(wait=False)

    def _ask(self, method: str, **arguments: Any) -> "Future[Any]":
        if method == "generate":
            return self._pool.submit(self._post, method, arguments)
        return self._controls.submit(self._done, method, arguments)

    def _done(self, method: str, arguments: dict[str, Any]) -> Any:
        """A call about weights, memory or requests; the server says in its answer whether it was done."""
        if payloads := arguments.get("serialized_named_tensors"):
            coded = [base64.b64encode(one).decode() for one in payloads]
            arguments = arguments | {"serialized_named_tensors": coded}
        return self._post(method, arguments)

    def _post(self, method: str, arguments: dict[str, Any], *, kind: str = "POST") -> Any:
        """The server's answer.

        Raises:
            RolloutError: it does not answer, or refuses.
        """
        make = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection = make(self.url.netloc, timeout=self.timeout_s)
        body = json.dumps(arguments).encode() if kind == "POST" else None
        try:
            path = f"{self.url.path.rstrip('/')}/{method}"
            connection.request(kind, path, body, {"Content-Type": "application/json", **self.headers})
            response = connection.getresponse()
            status, content = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RolloutError(
                f"{WHERE}, {self.url.geturl()}/{method}",
                got=f"a server that does not answer ({type(error).__name__}: {error})",
                expected="an answer",
                fix=f"Look whether it runs, and at its log: {_URL}.",
            ) from error
        finally:
            connection.close()
        text = content.decode("utf-8", "replace")
        if status != _IS_FINE:
            raise RolloutError(
                f"{WHERE}, {self.url.geturl()}/{method}",
                got=f"status {status}: {text[:500]}",
                expected="an answer",
                fix="Compare max_prompt_length, max_response_length and the server's own settings.",
            )
        is_json = response.headers.get_content_type() == "application/json"
        return json.loads(text) if is_json else None

    def _require(self, facts: dict[str, Any], limits: Limits) -> None:
        """Refuses a server that would not do, before anything is sent to it."""
        longest = int(facts.get("context_length") or 0)
        problem = wanted = ""
        if release_numbers(self.version) < release_numbers(LEAST):
            problem, wanted = f"SGLang {self.version or 'of no version'}", f"{LEAST} or newer"
        elif LOADER not in (facts.get("custom_weight_loader") or ()):
            problem, wanted = "a server that does not say which weights reach it", f"--custom-weight-loader {LOADER}"
        elif 0 < longest <= limits.max_model_len:
            problem, wanted = f"--context-length {longest}", f"more than {limits.max_model_len}"
        if problem:
            raise RolloutError(f"{WHERE}, {self.url.geturl()}", got=problem, expected=wanted)
