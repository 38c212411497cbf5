# SPDX-License-Identifier: Apache-2.0
"""Generation by running servers: any with OpenAI's completions that return token ids and log-probabilities.

A prompt with images goes as a chat of one message, in which its text and its images stand, to a server that takes a
chat template with a request; the tokens that it made of it must be those of the data.

A request goes to the server with the fewest in flight. One that does not respond, or responds with an error of its own,
is passed over: the request moves to the next one, and when every server has failed it `num_tries` times the error
names each. The servers keep their weights: those of version 0 are taken on trust, later ones refused.

    any thread, any loop ── request ──> event loop of a thread of our own ── HTTP ──> a server

Servers of a model that is not ours to train tell the log-probabilities of given tokens (`ServedScorer`).
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.background import EventLoopThread
from quadriga.errors import ConfigError, RolloutError, WeightSyncError
from quadriga.http_client import HTTPClient, ServerLostError
from quadriga.models.load import stop_token_ids
from quadriga.protocol import DataProto
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
from quadriga.rollout.third_party import (
    FINISH_REASONS,
    SEED_BITS,
    LogProbsOf,
    data_urls,
    split_log_probs,
)
from quadriga.weight_sync.fingerprint import fingerprint

_WHERE = "rollout.name=http"
_KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
_AS_TEXT = "token_id:"
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}{{ PLACE }}{% endif %}{% endfor %}{% endfor %}"
)
_OPTIONS = ("logprobs_mode", "timeout_s", "num_tries", "headers")

_TOLD_S = 30.0
_NUM_PROBED = 1000
"""Tokens, evenly over the vocabulary, that a server must read as a tokenizer here does."""
Read = TypeVar("Read")


class Servers:
    """Servers of one model, any of which may be asked.

    Args:
        urls: of the servers, without `/v1`.
        setting: the key that names them, for errors; `where` and `fix` as `HTTPClient` has them.
        max_num_seqs: the most requests in flight.
        timeout_s: seconds for one request, after which a server counts as lost.
        num_tries: rounds over all servers before a request fails.

    Raises:
        RolloutError: there is no server, or an address is none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        setting: str,
        where: str,
        fix: str,
        headers: Mapping[str, str] | None = None,
        max_num_seqs: int = 256,
        timeout_s: float = 600.0,
        num_tries: int = 2,
    ) -> None:
        if not urls:
            raise RolloutError(
                setting, got="no server", expected="at least one address, as in http://host:8000"
            )
        common: dict[str, Any] = {"setting": setting, "where": where, "fix": fix}
        self.clients = [
            HTTPClient(url, RolloutError, **common, headers=headers, timeout_s=timeout_s)
            for url in urls
        ]
        self.setting, self.where, self.num_tries = setting, where, num_tries
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._num_in_flight: Counter[HTTPClient] = Counter()

    def told(self, path: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """What each server replies to a question about itself. Raises ConfigError: one does not."""
        found, method = [], "GET" if body is None else "POST"
        for client in self.clients:
            try:
                found.append(client.call(path, body, method=method, timeout_s=_TOLD_S))
            except (ServerLostError, RolloutError) as error:
                got, expected = (
                    f"no reply to /{path} ({error})",
                    "a server with vLLM's API that is up",
                )
                raise ConfigError(
                    client.where, got=got, expected=expected, fix=f"Check {self.setting}."
                ) from error
        return found

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[HTTPClient, dict[str, Any]], Read],
        what: str,
    ) -> Read:
        """What `read` makes of the reply of the first server that gives one. Raises RolloutError: none did; or as
        `read`."""
        failures: list[str] = []
        tried: Counter[HTTPClient] = Counter()
        async with self._slots:
            while len(failures) < self.num_tries * len(self.clients):
                client = min(self.clients, key=lambda one: (tried[one], self._num_in_flight[one]))
                tried[client] += 1
                self._num_in_flight[client] += 1
                try:
                    return read(client, await client.call_async(path, body))
                except ServerLostError as error:
                    failures.append(f"{client.url}: {error}")
                finally:
                    self._num_in_flight[client] -= 1
        got, fix = (
            "no answer; " + "; ".join(dict.fromkeys(failures)),
            f"Look whether they run: {self.setting}.",
        )
        raise RolloutError(
            f"{self.where}, {what}", got=got, expected="a server that answers", fix=fix
        )


class HTTPEngine(RolloutEngine):
    """An engine of servers, which serve `model` under this name and report log-probabilities of `logprobs_mode`.
    `eos_token_ids`: end-of-text tokens of the model.
    `options`: those of `Servers`."""

    name = "http"

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        eos_token_ids: Sequence[int] = (),
        logprobs_mode: LogProbsOf = "raw_logprobs",
        **options: Any,
    ) -> None:
        super().__init__()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.image_token_id: int | None = None
        fix = "Compare max_prompt_length, max_response_length and engine_kwargs.model with what it serves."
        self.servers = Servers(urls, setting=f"{_KWARGS}.urls", where=_WHERE, fix=fix, **options)
        self.model, self.eos_token_ids = model, tuple(eos_token_ids)
        self.logprobs_mode = logprobs_mode
        self.description = f"http, {model} at {', '.join(urls)}, with weights taken on trust"
        self._running: set[asyncio.Task[Any]] = set()
        self._aborted: set[asyncio.Task[Any]] = set()
        self._thread = EventLoopThread("http")

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "HTTPEngine":
        options = dict(setup.options)
        urls, model = options.pop("urls", None), options.pop("model", None)
        is_list = isinstance(urls, list) and all(isinstance(url, str) for url in urls)
        if not is_list or not urls or not isinstance(model, str) or options.keys() - set(_OPTIONS):
            expected = f"urls (a list), model (a name), and perhaps {', '.join(_OPTIONS)}"
            fix = f"Set +{_KWARGS}.urls=[http://host:8000] and .model=NAME."
            raise ConfigError(
                _KWARGS, got=f"{setup.rollout.engine_kwargs}", expected=expected, fix=fix
            )
        skeleton = setup.skeleton()
        options["eos_token_ids"] = stop_token_ids(skeleton, setup.tokenizer.eos_token_id)
        engine = cls(urls, model, max_num_seqs=setup.rollout.max_num_seqs, **options)
        image = getattr(skeleton.config, "image_token_id", None)
        engine.tokenizer, engine.image_token_id, engine.takes_images = (
            setup.tokenizer,
            image,
            image is not None,
        )
        return engine

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """One response. A caller that is cancelled ends the connection, and so the request."""
        self._require_ready([prompt], [sampling], [images])
        return await asyncio.wrap_future(
            self._thread.submit(self._respond(prompt, sampling, images))
        )

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """The first request that fails ends those that are under way."""
        self._require_ready(prompts, sampling, images)
        images = [None] * len(prompts) if images is None else images
        futures = [
            self._thread.submit(self._respond(*one))
            for one in zip(prompts, sampling, images, strict=True)
        ]
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
        Raises WeightSyncError: for any later version."""
        self._require_open("load_weights")
        offered = fingerprint(weights)
        if version:
            self.weight_version = -1
            got = "servers that keep the weights they were started with"
            fix = "Use http for `generate` and `eval`; train with actor_rollout_ref.rollout.name=vllm or native."
            raise WeightSyncError(
                f"{_WHERE}, weights of version {version}", got=got, expected="version 0", fix=fix
            )
        self._arrived, self.weight_version = offered, 0

    def close(self) -> None:
        """End the requests; the servers go on."""
        if self._state != "closed":
            super().close()
            self.abort()
            self._thread.close()

    async def _respond(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None
    ) -> Completion:
        """One response, from the first server that gives it."""
        path, asked = "v1/completions", {"prompt": list(prompt), "logprobs": 1}
        if images is not None:
            path, asked = "v1/chat/completions", self._chat(images)
        body = {
            "model": self.model,
            **asked,
            "max_tokens": sampling.max_tokens,
            **sampling.drawing,
            "seed": sampling.seed % (1 << SEED_BITS),
            "stop": list(sampling.stop) or None,
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(sampling.stops(self.eos_token_ids)),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            read = partial(
                self._completion,
                sampling=sampling,
                expanded=None if images is None else list(prompt),
            )
            return await self.servers.ask(path, body, read, f"{len(prompt)} prompt tokens")
        except asyncio.CancelledError:
            if task not in self._aborted:
                raise
            return Completion([], [], "abort", self.weight_version)
        finally:
            self._running.discard(task)
            self._aborted.discard(task)

    def _chat(self, images: Images) -> dict[str, Any]:
        """A message with the images of a prompt, and a template that writes its text as it is."""
        assert self.tokenizer is not None and self.image_token_id is not None, (
            "else images are refused"
        )
        shown, texts = iter(data_urls(images, self.name)), list[list[int]]([[]])
        for token in images.short_prompt:
            if token == self.image_token_id:
                texts.append([])
            else:
                texts[-1].append(token)
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        parts: list[dict[str, Any]] = []
        for number, ids in enumerate(texts):
            parts += [{"type": "image_url", "image_url": {"url": next(shown)}}] if number else []
            parts += (
                [{"type": "text", "text": self.tokenizer.decode(ids, **options)}] if ids else []
            )
        place = json.dumps(self.tokenizer.decode([self.image_token_id], **options))
        template = _TEMPLATE.replace("PLACE", place)
        settings = {
            "chat_template": template,
            "add_generation_prompt": False,
            "add_special_tokens": False,
        }
        return {"messages": [{"role": "user", "content": parts}], **settings, "logprobs": True}

    def _completion(
        self,
        client: HTTPClient,
        content: dict[str, Any],
        sampling: SamplingParams,
        expanded: list[int] | None,
    ) -> Completion:
        """The first choice of a reply. `expanded` are the tokens of a prompt with images."""
        choice = (content.get("choices") or [{}])[0]
        numbers = choice.get("logprobs") or {}
        if expanded is not None:
            if (told := content.get("prompt_token_ids")) != expanded:
                got = (
                    f"{len(told)} other tokens of a prompt with images"
                    if told
                    else "no `prompt_token_ids`"
                )
                fix = "Use vLLM's server with the model's own tokenizer and the sizes of data.mm_processor_kwargs."
                raise RolloutError(
                    client.where, got=got, expected=f"the {len(expanded)} of the data", fix=fix
                )
            of_chat = {"tokens": "token", "token_logprobs": "logprob"}
            listed = numbers.get("content") or []
            numbers = {name: [one[key] for one in listed] for name, key in of_chat.items()}
        tokens, log_probs = numbers.get("tokens") or [], numbers.get("token_logprobs") or []
        token_ids = choice.get("token_ids")
        if (
            token_ids is None
            and tokens
            and all(str(token).startswith(_AS_TEXT) for token in tokens)
        ):
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
            expected = (
                "choices with `token_ids`, as many `logprobs.token_logprobs`, and stop or length"
            )
            fix = "Use a server that knows `return_token_ids`, as vLLM's does, with log-probabilities switched on."
            raise RolloutError(client.where, got=problem, expected=expected, fix=fix)
        assert token_ids is not None and reason is not None, "else there is a problem"
        before, drawn = split_log_probs(log_probs, sampling, self.logprobs_mode)
        return Completion(token_ids, before, reason, self.weight_version, drawn)


class ServedScorer:
    """A model behind servers with vLLM's API, which tell the log-probabilities of a prompt's tokens, at temperature 1.

    Args:
        addresses: of the servers, with commas.
        setting: the section that names them, for errors.
        options: `model` (else the first that they serve), `headers`, `timeout_s`, `num_tries`, `max_num_seqs`.
        top_k: how many likeliest tokens are wanted as well; None: none.

    Attributes:
        model: the name under which they serve it.
        max_tokens: of a sequence, one generated token included; None: they do not say.

    Raises:
        ConfigError: an option that there is not, or a server does not tell what it serves.
    """

    def __init__(
        self, addresses: str, setting: str, options: Mapping[str, Any], top_k: int | None
    ) -> None:
        known = ("model", "headers", "timeout_s", "num_tries", "max_num_seqs")
        if unknown := options.keys() - set(known):
            got, expected = ", ".join(sorted(unknown)), f"some of {', '.join(known)}"
            raise ConfigError(
                f"{setting}.engine_kwargs", got=got, expected=expected, fix="Leave it out."
            )
        fix = "Serve it with room for prompt, response and one token more (--max-model-len)"
        fix += f", and --max-logprobs {top_k} or more." if top_k else "."
        urls = [url.strip() for url in addresses.split(",") if url.strip()]
        others = {name: value for name, value in options.items() if name != "model"}
        self.top_k, self.servers = (
            top_k,
            Servers(urls, setting=f"{setting}.path", where=setting, fix=fix, **others),
        )
        served = [reply.get("data") or [{}] for reply in self.servers.told("v1/models")]
        self.model = options.get("model") or served[0][0].get("id")
        limits = [
            one.get("max_model_len")
            for models in served
            for one in models
            if one.get("id") == self.model
        ]
        self.max_tokens = min((limit for limit in limits if limit), default=None)
        self._thread = EventLoopThread("scorer")

    def require_tokens_of(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        """Refuse servers that read text into other tokens, or have no room for sequences of `max_tokens` and one more.
        Raises ConfigError: says which."""
        if self.max_tokens is not None and self.max_tokens <= max_tokens:
            got, expected = (
                f"room for {self.max_tokens} tokens (max_model_len)",
                f"at least {max_tokens + 1}",
            )
            raise ConfigError(
                self.servers.clients[0].where, got=got, expected=expected, fix="Serve it with more."
            )
        text = tokenizer.decode(
            [len(tokenizer) * number // _NUM_PROBED for number in range(_NUM_PROBED)]
        )
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        replies = self.servers.told(
            "tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False}
        )
        for client, reply in zip(self.servers.clients, replies, strict=True):
            if reply.get("tokens") != own:
                got, expected = (
                    "a tokenizer that reads text into other tokens",
                    "the tokens of the policy's tokenizer",
                )
                raise ConfigError(
                    client.where,
                    got=got,
                    expected=expected,
                    fix="Choose a model with its vocabulary.",
                )

    def scores(self, data: DataProto) -> dict[str, torch.Tensor]:
        """`log_probs` [B, T], and where wanted `top_log_probs` and `top_ids` [B, T, k], zero where the mask is.
        Raises RolloutError: no server replies, or one replies with something else."""
        mask, attention = data.batch["response_mask"].bool(), data.batch["attention_mask"].bool()
        found = {"log_probs": torch.zeros(mask.shape)}
        if self.top_k:
            found["top_log_probs"] = torch.zeros(*mask.shape, self.top_k)
            found["top_ids"] = torch.zeros(*mask.shape, self.top_k, dtype=torch.int32)
        rows = mask.any(-1).nonzero()[:, 0].tolist()
        sequences = [data.batch["input_ids"][row][attention[row]].tolist() for row in rows]
        for row, entries in zip(
            rows, self._thread.submit(self._ask(sequences)).result(), strict=True
        ):
            places = mask[row].nonzero()[:, 0]
            first = int(attention[row, : -mask.shape[1]].sum())
            own, top = zip(*(entries[first + place] for place in places.tolist()), strict=True)
            found["log_probs"][row, places] = torch.tensor(own)
            if self.top_k:
                tokens, values = torch.tensor(top, dtype=torch.float64).unbind(-1)
                found["top_ids"][row, places], found["top_log_probs"][row, places] = (
                    tokens.int(),
                    values.float(),
                )
        return found

    async def _ask(self, sequences: Sequence[list[int]]) -> list[list[Any]]:
        """For each token of each sequence what `_read` gives."""
        common = {
            "model": self.model,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self.top_k or 0,
        }
        asked = []
        for tokens in sequences:
            read = partial(self._read, tokens=tokens)
            asked.append(
                self.servers.ask(
                    "v1/completions", common | {"prompt": tokens}, read, f"{len(tokens)} tokens"
                )
            )
        return await asyncio.gather(*asked)

    def _read(self, client: HTTPClient, content: dict[str, Any], *, tokens: list[int]) -> list[Any]:
        """For each token but the first its log-probability, and the likeliest tokens with theirs.
        Raises RolloutError: they are not there."""
        told = (content.get("choices") or [{}])[0].get("prompt_logprobs") or []
        fix = "Use a server that tells them, as vLLM's does; it may limit their number (--max-logprobs)."
        if len(told) != len(tokens):
            expected = f"`prompt_logprobs` of {len(tokens)} tokens"
            raise RolloutError(
                client.where, got=f"those of {len(told)}", expected=expected, fix=fix
            )
        found: list[Any] = [None]
        for place, (token, entry) in enumerate(zip(tokens[1:], told[1:], strict=True), start=1):
            values = {int(one): float(each["logprob"]) for one, each in (entry or {}).items()}
            top = sorted(values.items(), key=lambda pair: -pair[1])[: self.top_k or 0]
            if token not in values or len(top) < (self.top_k or 0):
                expected = f"the token of the response{f' and the {self.top_k} likeliest' if self.top_k else ''}"
                got = f"{len(values)} tokens at place {place}"
                raise RolloutError(client.where, got=got, expected=expected, fix=fix)
            found.append((values[token], top))
        return found

    def close(self) -> None:
        """End what is asked."""
        self._thread.close()
