# SPDX-License-Identifier: Apache-2.0
"""Generation by running servers: any with OpenAI's completions that return token ids and log-probabilities.

A request goes to the server with the fewest in flight. One that does not respond, or responds with an error of its own,
is passed over: the request moves to the next one, and when every server has failed it `num_tries` times the error
names each. The servers keep their weights: those of version 0 are taken on trust, later ones refused.

    any thread, any loop ── request ──> event loop of a thread of our own ── HTTP ──> a server
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from quadriga.errors import ConfigError, RolloutError, WeightSyncError
from quadriga.http_client import HTTPClient, ServerLostError
from quadriga.models.load import stop_token_ids
from quadriga.rollout.event_loop import EventLoopThread
from quadriga.rollout.interface import (
    BatchImages,
    Completion,
    Images,
    Prompt,
    Prompts,
    RolloutEngine,
    Sampling,
    SamplingParams,
)
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.third_party import FINISH_REASONS, SEED_BITS, LogProbsOf, split_log_probs
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint

_WHERE = "rollout.name=http"
_KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
_AS_TEXT = "token_id:"
_OPTIONS = ("logprobs_mode", "timeout_s", "num_tries", "headers")


class HTTPEngine(RolloutEngine):
    """An engine of servers.

    Args:
        urls: of the servers, without `/v1`.
        model: the name under which they serve it.
        eos_token_ids: end-of-text tokens of the model.
        max_num_seqs: the most requests in flight.
        logprobs_mode: which log-probabilities the servers report.
        timeout_s: seconds without a byte after which a server counts as lost.
        num_tries: rounds over all servers before a request fails.

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
        logprobs_mode: LogProbsOf = "raw_logprobs",
        timeout_s: float = 600.0,
        num_tries: int = 2,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        if not urls:
            got, expected = "no server", "at least one address, as in http://host:8000"
            raise RolloutError(f"{_KWARGS}.urls", got=got, expected=expected)
        fix = "Compare max_prompt_length, max_response_length and engine_kwargs.model with what it serves."
        common: dict[str, Any] = {"setting": f"{_KWARGS}.urls", "where": _WHERE, "fix": fix}
        self.clients = [HTTPClient(url, RolloutError, **common, headers=headers, timeout_s=timeout_s) for url in urls]
        self.model, self.eos_token_ids, self.num_tries = model, tuple(eos_token_ids), num_tries
        self.logprobs_mode = logprobs_mode
        self.description = f"http, {model} at {', '.join(urls)}, with weights taken on trust"
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._num_in_flight: Counter[HTTPClient] = Counter()
        self._running: set[asyncio.Task[Any]] = set()
        self._aborted: set[asyncio.Task[Any]] = set()
        self._trusted = Fingerprint({})
        self._thread = EventLoopThread("http")

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "HTTPEngine":
        options = dict(setup.options)
        urls, model = options.pop("urls", None), options.pop("model", None)
        is_list = isinstance(urls, list) and all(isinstance(url, str) for url in urls)
        if not is_list or not urls or not isinstance(model, str) or options.keys() - set(_OPTIONS):
            expected = f"urls (a list), model (a name), and perhaps {', '.join(_OPTIONS)}"
            fix = f"Set +{_KWARGS}.urls=[http://host:8000] and .model=NAME."
            raise ConfigError(_KWARGS, got=f"{setup.rollout.engine_kwargs}", expected=expected, fix=fix)
        eos_token_ids = stop_token_ids(setup.skeleton(), setup.tokenizer.eos_token_id)
        return cls(urls, model, eos_token_ids=eos_token_ids, max_num_seqs=setup.rollout.max_num_seqs, **options)

    async def generate(self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None) -> Completion:
        """One response. A caller that is cancelled ends the connection, and so the request."""
        self._require_ready([prompt], [sampling], [images])
        return await asyncio.wrap_future(self._thread.submit(self._respond(prompt, sampling)))

    def generate_batch(self, prompts: Prompts, sampling: Sampling, images: BatchImages = None) -> list[Completion]:
        """The first request that fails ends those that are under way."""
        self._require_ready(prompts, sampling, images)
        futures = [self._thread.submit(self._respond(*one)) for one in zip(prompts, sampling, strict=True)]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def abort(self) -> None:
        """End unfinished responses. A server keeps what it has: they have no token."""

        async def cancel_all() -> None:
            self._aborted |= self._running
            for task in self._running:
                task.cancel()

        self._thread.submit(cancel_all()).result()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes version 0 as what the servers have; nothing can be sent to them.

        Raises:
            WeightSyncError: for any later version.
        """
        self._require_open("load_weights")
        offered = fingerprint(weights)
        if version:
            self.weight_version = -1
            got = "servers that keep the weights they were started with"
            fix = "Use http for `generate` and `eval`; train with actor_rollout_ref.rollout.name=vllm or native."
            raise WeightSyncError(f"{_WHERE}, weights of version {version}", got=got, expected="version 0", fix=fix)
        self._trusted = offered
        self.weight_version = 0

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """None: the servers have them."""
        return ()

    def fingerprint(self) -> Fingerprint:
        """Of the weights that the servers are trusted to have: nothing reaches them, so that nothing is checked."""
        return self._trusted

    def close(self) -> None:
        """End the requests; the servers go on."""
        if self._state != "closed":
            super().close()
            self.abort()
            self._thread.close()

    async def _respond(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """One response, from the first server that gives it."""
        failures: list[str] = []
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_tokens,
            **sampling.drawing,
            "seed": sampling.seed % (1 << SEED_BITS),
            "stop": list(sampling.stop) or None,
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(sampling.stops(self.eos_token_ids)),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        task = asyncio.current_task()
        assert task is not None
        tried: Counter[HTTPClient] = Counter()
        self._running.add(task)
        try:
            async with self._slots:
                while len(failures) < self.num_tries * len(self.clients):
                    client = min(self.clients, key=lambda one: (tried[one], self._num_in_flight[one]))
                    tried[client] += 1
                    self._num_in_flight[client] += 1
                    try:
                        return self._completion(client, await client.call_async("v1/completions", body), sampling)
                    except ServerLostError as error:
                        failures.append(f"{client.url}: {error}")
                    finally:
                        self._num_in_flight[client] -= 1
        except asyncio.CancelledError:
            if task not in self._aborted:
                raise
            return Completion([], [], "abort", self.weight_version)
        finally:
            self._running.discard(task)
            self._aborted.discard(task)
        got, fix = "no answer; " + "; ".join(dict.fromkeys(failures)), f"Look whether they run: {_KWARGS}.urls."
        raise RolloutError(f"{_WHERE}, {len(prompt)} prompt tokens", got=got, expected="a server that answers", fix=fix)

    def _completion(self, client: HTTPClient, content: dict[str, Any], sampling: SamplingParams) -> Completion:
        """The first choice of a reply."""
        choice = (content.get("choices") or [{}])[0]
        numbers = choice.get("logprobs") or {}
        tokens, log_probs = numbers.get("tokens") or [], numbers.get("token_logprobs") or []
        token_ids = choice.get("token_ids")
        if token_ids is None and tokens and all(str(token).startswith(_AS_TEXT) for token in tokens):
            token_ids = [int(token.removeprefix(_AS_TEXT)) for token in tokens]
        reason = FINISH_REASONS.get(choice.get("finish_reason"))
        problem = ""
        if token_ids is None:
            problem = "a response without token ids"
        elif len(log_probs) != len(token_ids) or None in log_probs:
            problem = f"{len(token_ids)} tokens with {len(log_probs)} log-probabilities"
        elif reason is None:
            problem = f"a response that ended with {choice.get('finish_reason')!r}"
        if problem:
            expected = "choices with `token_ids`, as many `logprobs.token_logprobs`, and stop or length"
            fix = "Use a server that knows `return_token_ids`, as vLLM's does, with log-probabilities switched on."
            raise RolloutError(client.where, got=problem, expected=expected, fix=fix)
        assert token_ids is not None and reason is not None, "else there is a problem"
        before, drawn = split_log_probs(log_probs, sampling, self.logprobs_mode)
        return Completion(token_ids, before, reason, self.weight_version, drawn)
