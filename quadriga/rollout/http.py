# SPDX-License-Identifier: Apache-2.0
"""Generation by servers that others run: any with OpenAI's completions that return token ids and log-probabilities.

A request goes to the server with the fewest in flight. One that does not answer, or answers with an error of its own,
is passed over: the request moves to the next one, and when every server has failed it `num_tries` times the error
names each. Weights stay with whoever runs the servers: those of version 0 are taken on trust, later ones refused.
"""

import asyncio
import http.client
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

import torch

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.rollout.base import Completion, EngineBase, FinishReason, SamplingParams
from quadriga.rollout.reported import LogProbsOf, split_log_probs
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint

_WHERE = "rollout.name=http"
_URLS = "actor_rollout_ref.rollout.engine_kwargs.urls"
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_AS_TEXT = "token_id:"
_IS_FINE, _IS_BUSY, _IS_SERVERS_FAULT = 200, 429, 500
_SEED_BITS = 63


class ServerLostError(Exception):
    """A server did not answer a request that another one may."""


class HTTPEngine(EngineBase):
    """See the module, and `RolloutEngine` for its methods.

    Args:
        urls: of the servers, without `/v1`.
        model: the name under which they serve it.
        eos_token_ids: end-of-text tokens of the model.
        max_num_seqs: requests in flight at the same time.
        log_probs_of: which log-probabilities the servers report.
        timeout_s: seconds without a byte after which a server counts as lost.
        num_tries: rounds over all servers before a request is given up.
        headers: sent with every request, as for a key.

    Raises:
        RolloutError: there is no server, or an address is none.
    """

    name = "http"

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        eos_token_ids: Sequence[int] = (),
        max_num_seqs: int = 256,
        log_probs_of: LogProbsOf = "raw_logprobs",
        timeout_s: float = 600.0,
        num_tries: int = 2,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        if not urls:
            raise RolloutError(_URLS, got="no server", expected="at least one address, as in http://host:8000")
        self.urls = [_address(url) for url in urls]
        self.model, self.eos_token_ids, self.log_probs_of = model, tuple(eos_token_ids), log_probs_of
        self.timeout_s, self.num_tries, self.headers = timeout_s, num_tries, dict(headers or {})
        self._pool = ThreadPoolExecutor(max_num_seqs, "http")
        self._lock = threading.Lock()
        self._num_in_flight: Counter[SplitResult] = Counter()
        self._calls: set[_Call] = set()
        self._trusted = Fingerprint({})

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        """See `RolloutEngine.generate`. A caller that is cancelled ends the connection, and so the request."""
        self._require_ready([prompt_token_ids], [sampling])
        call = _Call(self.timeout_s)
        running = self._pool.submit(self._answer, call, prompt_token_ids, sampling)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            call.give_up()
            raise

    def generate_batch(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Completion]:
        """See `RolloutEngine.generate_batch`. The first request that fails ends those that are not answered."""
        self._require_ready(prompts, sampling)
        calls = [_Call(self.timeout_s) for _ in prompts]
        running = [self._pool.submit(self._answer, *one) for one in zip(calls, prompts, sampling, strict=True)]
        try:
            return [future.result() for future in running]
        except BaseException:
            for call in calls:
                call.give_up()
            raise

    def abort(self) -> None:
        """See `RolloutEngine.abort`. A server keeps what it has: the answers have no token."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.give_up()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes version 0 as what the servers have; nothing can be sent to them.

        Raises:
            WeightSyncError: for any later version.
        """
        self._require_open("load_weights")
        offered = fingerprint(weights)
        if version:
            self.weight_version = -1
            raise WeightSyncError(
                f"{_WHERE}, weights of version {version}",
                got="servers that keep the weights they were started with",
                expected="version 0",
                fix="Use http for `generate` and `eval`; train with actor_rollout_ref.rollout.name=vllm or native.",
            )
        self._trusted = offered
        self.weight_version = 0

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """None: the servers have them."""
        return iter(())

    def fingerprint(self) -> Fingerprint:
        """Of the weights that the servers are trusted to have: none reaches them, so that nothing is checked."""
        return self._trusted

    def close(self) -> None:
        """See `RolloutEngine.close`; the servers go on."""
        super().close()
        self.abort()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, call: "_Call", prompt: Sequence[int], sampling: SamplingParams) -> Completion:
        """One answer, from whichever server gives it."""
        body = json.dumps(self._request(prompt, sampling)).encode()
        failures: list[str] = []
        tried: Counter[SplitResult] = Counter()
        with self._lock:
            self._calls.add(call)
        try:
            while len(failures) < self.num_tries * len(self.urls) and not call.is_given_up:
                with self._least_busy(tried) as url:
                    try:
                        return self._completion(url, call.post(url, body, self.headers), sampling)
                    except ServerLostError as error:
                        failures.append(f"{url.geturl()}: {error}")
        finally:
            with self._lock:
                self._calls.discard(call)
        if call.is_given_up:
            return Completion([], [], "abort", self.weight_version)
        raise RolloutError(
            f"{_WHERE}, {len(prompt)} prompt tokens",
            got="no answer; " + "; ".join(dict.fromkeys(failures)),
            expected="a server that answers",
            fix=f"Look whether they run: {_URLS}.",
        )

    @contextmanager
    def _least_busy(self, tried: Counter[SplitResult]) -> Iterator[SplitResult]:
        """The server that this request was sent to least often; among those, the one with the fewest in flight."""
        with self._lock:
            url = min(self.urls, key=lambda one: (tried[one], self._num_in_flight[one]))
            self._num_in_flight[url] += 1
        tried[url] += 1
        try:
            yield url
        finally:
            with self._lock:
                self._num_in_flight[url] -= 1

    def _request(self, prompt: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
        greedy = sampling.is_greedy
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": -1 if greedy else (sampling.top_k or -1),
            "min_p": 0.0 if greedy else sampling.min_p,
            "seed": sampling.seed % (1 << _SEED_BITS),
            "stop": list(sampling.stop) or None,
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(sampling.stops(self.eos_token_ids)),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def _completion(self, url: SplitResult, content: dict[str, Any], sampling: SamplingParams) -> Completion:
        """The one choice of an answer.

        Raises:
            RolloutError: it lacks token ids or log-probabilities, or ended for a reason that we do not know.
        """
        choice = content["choices"][0]
        numbers = choice.get("logprobs") or {}
        token_ids, log_probs = choice.get("token_ids"), numbers.get("token_logprobs")
        tokens = numbers.get("tokens") or []
        if token_ids is None and tokens and all(str(token).startswith(_AS_TEXT) for token in tokens):
            token_ids = [int(token.removeprefix(_AS_TEXT)) for token in tokens]
        reason = _REASONS.get(choice.get("finish_reason"))
        problem = ""
        if token_ids is None:
            problem = "an answer without token ids"
        elif log_probs is None or len(log_probs) != len(token_ids) or None in log_probs:
            problem = f"{len(token_ids)} tokens with {len(log_probs or [])} log-probabilities"
        elif reason is None:
            problem = f"an answer that ended with {choice.get('finish_reason')!r}"
        if problem or token_ids is None or reason is None:
            raise RolloutError(
                f"{_WHERE}, {url.geturl()}",
                got=problem,
                expected="choices with `token_ids`, as many `logprobs.token_logprobs`, and stop or length",
                fix="Use a server that knows `return_token_ids`, as vLLM's does, with log-probabilities switched on.",
            )
        before, drawn = split_log_probs(log_probs, sampling, self.log_probs_of)
        return Completion(token_ids, before, reason, self.weight_version, drawn)


class _Call:
    """One request on its way: another thread may give it up."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.is_given_up = False
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None

    def give_up(self) -> None:
        """Ends the connection, which tells the server."""
        with self._lock:
            self.is_given_up = True
            if self._connection is not None and self._connection.sock is not None:
                # Only this wakes a thread that waits for the server; the thread itself closes the connection.
                self._connection.sock.shutdown(2)

    def post(self, url: SplitResult, body: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
        """The server's answer to a completion request.

        Raises:
            ServerLostError: it does not answer, or not as a server in good health does.
            RolloutError: it refuses the request, as any other would.
        """
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=self.timeout_s)
        try:
            connection.connect()
            with self._lock:
                self._connection = connection
                if self.is_given_up:
                    raise ServerLostError("given up")
            path = url.path.rstrip("/") + "/v1/completions"
            connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            status, content = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerLostError(f"{type(error).__name__}: {error}") from error
        finally:
            with self._lock:
                self._connection = None
            connection.close()
        text = content.decode("utf-8", "replace")
        if status >= _IS_SERVERS_FAULT or status == _IS_BUSY:
            raise ServerLostError(f"status {status}: {text[:200]}")
        if status != _IS_FINE:
            raise RolloutError(
                f"{_WHERE}, {url.geturl()}",
                got=f"status {status}: {text[:500]}",
                expected="an answer",
                fix="Compare max_prompt_length, max_response_length and engine_kwargs.model with what it serves.",
            )
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerLostError(f"an answer that is no JSON: {text[:200]!r}") from error


def _address(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise RolloutError(_URLS, got=repr(url), expected="an address such as http://host:8000")
    return parts
