# SPDX-License-Identifier: Apache-2.0
"""Generation by running servers with OpenAI's completions API, token ids and log-probabilities.

A prompt with images is sent as a chat of one message with its text and its images. The server must
accept a chat template with a request, and must tokenize the chat as the data does.

A request goes to the server with the fewest requests in flight. If a server does not respond, or
reports an internal error, the request moves to the next server. When every server has failed
`num_tries` times, the error names all of them. Servers cannot load weights: version 0 is accepted
without a check, later versions are refused.

    any thread, any loop ── request ──> event loop in our own thread ── HTTP ──> a server

`ServedScorer` gets the log-probabilities of existing tokens from the servers of a model that is not
trained here.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.background import EventLoopThread
from quadriga.engine_traits.http import TRAITS
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
    image_data_urls,
    results_of,
    split_log_probs,
)
from quadriga.weight_sync.publish import NamedWeights

_WHERE = "rollout.name=http"
_KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
# Prefix of a token id that a server reports in the place of the token's text.
_ID_PREFIX = "token_id:"
# Writes the text of a message as it is, and PLACE, the model's token of images, for each image.
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ PLACE }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
_OPTIONS = ("logprobs_mode", "timeout_s", "num_tries", "headers")
_SCORER_OPTIONS = ("model", "headers", "timeout_s", "num_tries", "max_num_seqs")

# Time limit of a request of `Servers.ask_all`.
_ASK_ALL_TIMEOUT_S = 30.0
# Number of tokens, spread evenly over the vocabulary, by which tokenizers are compared.
_NUM_COMPARED_TOKENS = 1000
Read = TypeVar("Read")


class Servers:
    """Servers of one model, any of which may serve a request.

    Args:
        urls: addresses of the servers, without `/v1`.
        setting: configuration key with the addresses, for errors.
        where: purpose of the servers, for errors.
        fix: advice in the error for a request that a server refuses.
        headers: headers of every request.
        max_num_seqs: most requests in flight.
        timeout_s: time limit of one request in seconds. A server that exceeds it counts as lost.
        num_tries: rounds over all servers before a request fails.

    Raises:
        RolloutError: there is no server, or an address is invalid.
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
            expected = "at least one address, as in http://host:8000"
            raise RolloutError(setting, got="no server", expected=expected)
        self.clients = [
            HTTPClient(
                url,
                RolloutError,
                setting=setting,
                where=where,
                fix=fix,
                headers=headers,
                timeout_s=timeout_s,
            )
            for url in urls
        ]
        self.setting = setting
        self.where = where
        self.num_tries = num_tries
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._num_in_flight: Counter[HTTPClient] = Counter()

    def ask_all(self, path: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Send the same request to every server, to learn about the server itself.

        Args:
            path: path of the request below the server's address.
            body: JSON of a POST request; None: a GET request.

        Returns:
            The reply of each server.

        Raises:
            ConfigError: a server does not reply.
        """
        method = "GET" if body is None else "POST"
        replies = []
        for client in self.clients:
            try:
                replies.append(client.call(path, body, method=method, timeout_s=_ASK_ALL_TIMEOUT_S))
            except (ServerLostError, RolloutError) as error:
                raise ConfigError(
                    client.where,
                    got=f"no reply to /{path} ({error})",
                    expected="a running server with vLLM's API",
                    fix=f"Check the addresses in {self.setting}, and whether the servers run.",
                ) from error
        return replies

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[HTTPClient, dict[str, Any]], Read],
        description: str,
    ) -> Read:
        """Send a request to one server after another until one replies.

        Args:
            path: path of the request below a server's address.
            body: JSON of the request.
            read: called with the server and its reply. Its errors are raised, but a ServerLostError
                counts as no reply.
            description: description of the request, for errors.

        Returns:
            The result of `read`.

        Raises:
            RolloutError: no server replied, or one refused the request.
        """
        failures = []  # in the order of the tries
        untried = []  # servers that the round has still to try
        async with self._slots:
            while len(failures) < self.num_tries * len(self.clients):
                # Each round tries each server once, the least busy one first.
                untried = untried or list(self.clients)
                client = min(untried, key=self._num_in_flight.__getitem__)
                untried.remove(client)
                self._num_in_flight[client] += 1
                try:
                    # A refusal is not caught below: other servers would refuse the request, too.
                    return read(client, await client.call_async(path, body))
                except ServerLostError as error:
                    failures.append(f"{client.url}: {error}")
                finally:
                    self._num_in_flight[client] -= 1
        raise RolloutError(
            f"{self.where}, {description}",
            # The rounds often fail with the same errors, which are named once.
            got="no answer; " + "; ".join(dict.fromkeys(failures)),
            expected="a server that answers",
            fix=f"Check whether the servers of {self.setting} run.",
        )


class HTTPEngine(RolloutEngine):
    """An engine of running servers.

    Args:
        urls: addresses of the servers, without `/v1`.
        model: name under which the servers serve the model.
        eos_token_ids: end-of-text tokens of the model.
        logprobs_mode: distribution of the log-probabilities that the servers report.
        options: other arguments of `Servers`.

    Attributes:
        tokenizer: decodes the text of prompts with images. `from_config` sets it.
        image_token_id: the model's token of images; None: prompts cannot have images.
    """

    name = "http"
    traits = TRAITS

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
        fix = (
            "Compare max_prompt_length, max_response_length and engine_kwargs.model"
            " with what the server serves."
        )
        self.servers = Servers(urls, setting=f"{_KWARGS}.urls", where=_WHERE, fix=fix, **options)
        self.model = model
        self.eos_token_ids = tuple(eos_token_ids)
        self.logprobs_mode = logprobs_mode
        self.description = f"http, {model} at {', '.join(urls)}, with weights taken on trust"
        # Tasks of requests in the thread's loop, and those of them that `abort` has cancelled.
        self._running: set[asyncio.Task[Any]] = set()
        self._aborted: set[asyncio.Task[Any]] = set()
        self._thread = EventLoopThread("http")

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "HTTPEngine":
        """Make the engine of the servers that `rollout.engine_kwargs` names.

        Raises:
            ConfigError: an option is missing, unknown or wrong.
        """
        options = dict(setup.options)
        urls = options.pop("urls", None)
        model = options.pop("model", None)
        are_urls = isinstance(urls, list) and urls and all(isinstance(url, str) for url in urls)
        if not are_urls or not isinstance(model, str) or options.keys() - set(_OPTIONS):
            raise ConfigError(
                _KWARGS,
                got=f"{setup.rollout.engine_kwargs}",
                expected=f"urls (a list), model (a name), and perhaps {', '.join(_OPTIONS)}",
                fix=f"Set +{_KWARGS}.urls=[http://host:8000] and .model=NAME.",
            )
        skeleton = setup.skeleton()
        engine = cls(
            urls,
            model,
            eos_token_ids=stop_token_ids(skeleton, setup.tokenizer.eos_token_id),
            max_num_seqs=setup.rollout.max_num_seqs,
            **options,
        )
        engine.tokenizer = setup.tokenizer
        engine.image_token_id = getattr(skeleton.config, "image_token_id", None)
        engine.takes_images = engine.image_token_id is not None
        return engine

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """Generate one response. Cancelling the caller closes the connection to the server.

        Args:
            prompt: token ids.
            sampling: how the response is sampled.
            images: images of the prompt.
        """
        [future] = self._start([prompt], [sampling], [images])
        return await asyncio.wrap_future(future)

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """Generate a response for each prompt. The first error cancels all other requests.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt.

        Returns:
            The responses, in order.
        """
        futures = self._start(prompts, sampling, images)
        self._count_when_done(futures)
        return results_of(futures)

    def _start(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages
    ) -> list[Future[Completion]]:
        """Send requests to the servers without waiting for the replies."""
        self._require_ready(prompts, sampling, images)
        rows = zip(prompts, sampling, images or [None] * len(prompts), strict=True)
        return [self._thread.submit(self._generate_on_server(*row)) for row in rows]

    def abort(self) -> None:
        """End unfinished responses. They are empty: a server sends tokens only at the end."""

        async def cancel_all() -> None:
            # A request in `_aborted` returns an empty response; others were cancelled by callers.
            self._aborted |= self._running
            for task in self._running:
                task.cancel()

        self._thread.submit(cancel_all()).result()

    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Accept version 0 as the servers' weights: nothing can be sent to them.

        Args:
            weights: names and tensors of the weights.
            version: version of the weights.

        Raises:
            WeightSyncError: for any later version.
        """
        self._require_open("load_weights")
        # The weights are read to the end even if their version is refused, because the sender may
        # wait for that.
        self.note_arrival(weights, version)
        if version:
            self.weight_version = -1
            raise WeightSyncError(
                f"{_WHERE}, weights of version {version}",
                got="servers that keep the weights they were started with",
                expected="version 0",
                fix="Use http for `generate` and `eval`;"
                " train with actor_rollout_ref.rollout.name=vllm or native.",
            )

    def close(self) -> None:
        """End the requests. The servers keep running."""
        if self._state != "closed":
            super().close()
            self.abort()
            self._thread.close()

    async def _generate_on_server(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None
    ) -> Completion:
        """Generate one response on the first server that replies, in the engine's event loop.

        Args:
            prompt: token ids.
            sampling: how the response is sampled.
            images: images of the prompt.

        Returns:
            The completion; an empty one with the reason "abort" if `abort` ended the request.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_tokens,
            **sampling.drawing,  # temperature, top_p, top_k, min_p
            "seed": sampling.seed % (1 << SEED_BITS),
            "stop": list(sampling.stop) or None,
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(sampling.stops(self.eos_token_ids)),
            # The server's own rule is off: `stop_token_ids` has the end-of-text tokens that count.
            "ignore_eos": True,
            # Special tokens stay, so that the response has all tokens that were drawn.
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if images is None:
            path = "v1/completions"
            body |= {"prompt": list(prompt), "logprobs": 1}
        else:
            path = "v1/chat/completions"
            body |= self._chat_fields(images)
        chat_ids = None if images is None else list(prompt)
        read = partial(self._completion, sampling=sampling, chat_ids=chat_ids)

        task = asyncio.current_task()
        self._running.add(task)
        try:
            return await self.servers.ask(path, body, read, f"{len(prompt)} prompt tokens")
        except asyncio.CancelledError:
            # Only `abort` returns a completion. A caller that cancels does not wait for one.
            if task not in self._aborted:
                raise
            return Completion([], [], "abort", self.weight_version)
        finally:
            self._running.discard(task)
            self._aborted.discard(task)

    def _chat_fields(self, images: Images) -> dict[str, Any]:
        """Fields of a chat request for a prompt with images.

        The chat is one message, whose parts are the texts and images of the prompt in their order.
        The request brings a chat template that writes nothing but the parts, so that the server
        should get the tokens of the prompt. `_completion` checks this.
        """
        tokenizer = self.tokenizer
        # Otherwise `takes_images` is false, and `_require_ready` has refused the images.
        assert tokenizer is not None and self.image_token_id is not None, "images are refused"

        def decode(token_ids: Sequence[int]) -> str:
            text = tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            return str(text)

        # Token ids of the text before the first image, then of the text behind each image.
        texts: list[list[int]] = [[]]
        for token in images.short_prompt:
            if token == self.image_token_id:
                texts.append([])
            else:
                texts[-1].append(token)
        urls = iter(image_data_urls(images, self.name))
        parts = []
        for number, token_ids in enumerate(texts):
            if number > 0:
                parts.append({"type": "image_url", "image_url": {"url": next(urls)}})
            if token_ids:
                parts.append({"type": "text", "text": decode(token_ids)})
        # The text of the token as a string literal of Jinja, which is quoted as in JSON.
        image_token = json.dumps(decode([self.image_token_id]))
        return {
            "messages": [{"role": "user", "content": parts}],
            "chat_template": _TEMPLATE.replace("PLACE", image_token),
            "add_generation_prompt": False,
            "add_special_tokens": False,
            "logprobs": True,
        }

    def _completion(
        self,
        client: HTTPClient,
        content: dict[str, Any],
        sampling: SamplingParams,
        chat_ids: list[int] | None,
    ) -> Completion:
        """Make the completion of a reply's first choice.

        Args:
            client: the server.
            content: reply of the server.
            sampling: how the response was sampled.
            chat_ids: token ids of a prompt that was sent as a chat, with one for each embedding of
                an image. None: the prompt was sent as token ids.

        Raises:
            RolloutError: the reply lacks token ids or log-probabilities, or has an unknown finish
                reason; or the server did not tokenize the chat as `chat_ids`.
        """
        choice = (content.get("choices") or [{}])[0]
        fields = choice.get("logprobs") or {}
        if chat_ids is None:
            tokens = fields.get("tokens") or []
            log_probs = fields.get("token_logprobs") or []
        else:
            # With other tokens, training would see another prompt than the server has answered.
            server_ids = content.get("prompt_token_ids")
            if server_ids != chat_ids:
                got = "no `prompt_token_ids`"
                if server_ids:
                    got = f"{len(server_ids)} other tokens of a prompt with images"
                raise RolloutError(
                    client.where,
                    got,
                    expected=f"the {len(chat_ids)} tokens of the data",
                    fix="Use vLLM's server with the model's own tokenizer and the sizes of"
                    " data.mm_processor_kwargs.",
                )
            # The reply to a chat has an entry for each token, in place of a list for each field.
            entries = fields.get("content") or []
            tokens = [entry["token"] for entry in entries]
            log_probs = [entry["logprob"] for entry in entries]
        token_ids = choice.get("token_ids")
        # Some servers report ids only in the place of the tokens' texts, as "token_id:42".
        are_ids = tokens and all(str(token).startswith(_ID_PREFIX) for token in tokens)
        if token_ids is None and are_ids:
            token_ids = [int(token.removeprefix(_ID_PREFIX)) for token in tokens]

        reason = FINISH_REASONS.get(choice.get("finish_reason"))
        problem = ""
        if token_ids is None:
            problem = "a response without token ids"
        elif len(log_probs) != len(token_ids) or None in log_probs:
            problem = f"{len(token_ids)} tokens with {len(log_probs)} log-probabilities"
        elif reason is None:
            problem = f"a response that ended with {choice.get('finish_reason')!r}"
        if problem:
            raise RolloutError(
                client.where,
                got=problem,
                expected="choices with `token_ids`, as many `logprobs.token_logprobs`,"
                " and stop or length",
                fix="Use a server that knows `return_token_ids`, as vLLM's does,"
                " with log-probabilities switched on.",
            )
        assert token_ids is not None and reason is not None, "else there is a problem"
        log_probs, sampling_log_probs = split_log_probs(log_probs, sampling, self.logprobs_mode)
        return Completion(token_ids, log_probs, reason, self.weight_version, sampling_log_probs)


class ServedScorer:
    """Log-probabilities of existing tokens at temperature 1, from servers with vLLM's API.

    Args:
        addresses: addresses of the servers, separated by commas.
        setting: section of the configuration whose `path` has the addresses, for errors.
        options: `model` (default: the first one that the first server names), and `headers`,
            `timeout_s`, `num_tries`, `max_num_seqs` of `Servers`.
        top_k: number of the likeliest tokens at each place to score as well; None: none.

    Attributes:
        model: name under which the servers serve the model.
        max_tokens: longest sequence that every server takes, in tokens, including the one token
            that it generates; None: no server reports it.

    Raises:
        ConfigError: an option is unknown, or a server does not report its models.
    """

    def __init__(
        self, addresses: str, setting: str, options: Mapping[str, Any], top_k: int | None
    ) -> None:
        unknown = options.keys() - set(_SCORER_OPTIONS)
        if unknown:
            raise ConfigError(
                f"{setting}.engine_kwargs",
                got=", ".join(sorted(unknown)),
                expected=f"some of {', '.join(_SCORER_OPTIONS)}",
                fix="Leave it out.",
            )
        # Advice for a request that a server refuses.
        fix = "Serve it with room for prompt, response and one token more (--max-model-len)"
        fix += f", and --max-logprobs {top_k} or more." if top_k else "."
        urls = [url.strip() for url in addresses.split(",") if url.strip()]
        server_options = dict(options)
        model = server_options.pop("model", None)
        self.top_k = top_k
        self.servers = Servers(
            urls, setting=f"{setting}.path", where=setting, fix=fix, **server_options
        )
        # For each server, the entries of the models that it serves.
        server_models = [reply.get("data") or [{}] for reply in self.servers.ask_all("v1/models")]
        self.model = model or server_models[0][0].get("id")
        # Server and longest sequence, for each server that reports one.
        limits: list[tuple[HTTPClient, int]] = []
        for client, models in zip(self.servers.clients, server_models, strict=True):
            for served in models:
                limit = served.get("max_model_len")
                if served.get("id") == self.model and limit:
                    limits.append((client, limit))
        self.max_tokens: int | None = None
        self._least_room: HTTPClient | None = None  # the server with the lowest limit
        if limits:
            self._least_room, self.max_tokens = min(limits, key=itemgetter(1))
        self._thread = EventLoopThread("scorer")

    def require_same_tokenizer_and_room(
        self, tokenizer: PreTrainedTokenizerBase, max_tokens: int
    ) -> None:
        """Refuse servers that have another tokenizer, or no room for the sequences.

        Args:
            tokenizer: the policy's tokenizer.
            max_tokens: longest sequence; a server generates one token more.

        Raises:
            ConfigError: a server has another tokenizer, or too little room. Of several with too
                little room, the error names the server with the least.
        """
        if self.max_tokens is not None and self.max_tokens <= max_tokens:
            raise ConfigError(
                self._least_room.where,
                got=f"room for {self.max_tokens} tokens (max_model_len)",
                expected=f"at least {max_tokens + 1}",
                fix=f"Serve the model with --max-model-len {max_tokens + 1} or more.",
            )
        # A server does not report its vocabulary. So each one tokenizes a text of many tokens of
        # the policy's vocabulary, and the results are compared.
        count = _NUM_COMPARED_TOKENS
        text = tokenizer.decode([len(tokenizer) * number // count for number in range(count)])
        expected_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        replies = self.servers.ask_all("tokenize", body)
        for client, reply in zip(self.servers.clients, replies, strict=True):
            if reply.get("tokens") != expected_ids:
                raise ConfigError(
                    client.where,
                    got="a tokenizer that reads text into other tokens",
                    expected="the tokens of the policy's tokenizer",
                    fix="Serve a model with the vocabulary of the policy.",
                )

    def scores(self, data: DataProto) -> dict[str, torch.Tensor]:
        """Log-probabilities of the responses of a batch.

        Args:
            data: batch `input_ids`, `attention_mask` [B, P + T], `response_mask` [B, T].

        Returns:
            `log_probs` [B, T], and with `top_k` the log-probabilities and ids of the likeliest
            tokens at each place, `top_log_probs` and `top_ids` [B, T, k]. All are zero where the
            response mask is.

        Raises:
            RolloutError: no server replies, or one does not report these numbers.
        """
        mask = data.batch["response_mask"].bool()
        attention = data.batch["attention_mask"].bool()
        scores = {"log_probs": torch.zeros(mask.shape)}
        if self.top_k:
            scores["top_log_probs"] = torch.zeros(*mask.shape, self.top_k)
            scores["top_ids"] = torch.zeros(*mask.shape, self.top_k, dtype=torch.int32)
        # Only rows with a token to score are sent, without their padding.
        rows = mask.any(-1).nonzero()[:, 0].tolist()
        sequences = [data.batch["input_ids"][row][attention[row]].tolist() for row in rows]
        futures = [self._thread.submit(self._ask_for_scores(tokens)) for tokens in sequences]
        replies = results_of(futures)
        for row, entries in zip(rows, replies, strict=True):
            columns = mask[row].nonzero()[:, 0]  # places in the response, from 0 to T - 1
            # A reply has an entry for each token that was sent, prompt tokens first.
            num_prompt_tokens = int(attention[row, : -mask.shape[1]].sum())
            masked_entries = [entries[num_prompt_tokens + column] for column in columns.tolist()]
            log_probs, top_pairs = zip(*masked_entries, strict=True)
            scores["log_probs"][row, columns] = torch.tensor(log_probs)
            if self.top_k:
                # Pairs of token id and log-probability, [n, k, 2]. Float64 holds ids exactly.
                pairs = torch.tensor(top_pairs, dtype=torch.float64)
                scores["top_ids"][row, columns] = pairs[..., 0].int()
                scores["top_log_probs"][row, columns] = pairs[..., 1].float()
        return scores

    async def _ask_for_scores(self, tokens: list[int]) -> list[Any]:
        """Request the log-probabilities of a sequence.

        A server scores a prompt only when it generates, so one token is generated and ignored.

        Returns:
            For each token its scores; see `_read_scores`.
        """
        body = {
            "model": self.model,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self.top_k or 0,
            "prompt": tokens,
        }
        read = partial(self._read_scores, tokens=tokens)
        return await self.servers.ask("v1/completions", body, read, f"{len(tokens)} tokens")

    def _read_scores(
        self, client: HTTPClient, content: dict[str, Any], *, tokens: list[int]
    ) -> list[Any]:
        """Read the log-probabilities of a sequence from a server's reply.

        Args:
            client: the server.
            content: reply of the server.
            tokens: token ids of the sequence.

        Returns:
            For each token a pair: its log-probability, and a list of the likeliest tokens at its
            place, as pairs of id and log-probability. None for the first token, which has no
            prediction.

        Raises:
            RolloutError: the server does not report all of these numbers.
        """
        entries = (content.get("choices") or [{}])[0].get("prompt_logprobs") or []
        fix = (
            "Use a server that reports log-probabilities of prompts, as vLLM's does,"
            " and serve with a larger --max-logprobs."
        )
        if len(entries) != len(tokens):
            raise RolloutError(
                client.where,
                got=f"`prompt_logprobs` of {len(entries)} tokens",
                expected=f"those of {len(tokens)} tokens",
                fix=fix,
            )
        num_top = self.top_k or 0
        scores: list[Any] = [None]
        for place in range(1, len(tokens)):
            # An entry has the token itself and the likeliest tokens, by their ids as texts.
            entry = entries[place] or {}
            log_probs = {int(token): float(numbers["logprob"]) for token, numbers in entry.items()}
            top = sorted(log_probs.items(), key=lambda pair: -pair[1])[:num_top]
            if tokens[place] not in log_probs or len(top) < num_top:
                expected = "the token of the response"
                if num_top:
                    expected += f" and the {num_top} likeliest"
                got = f"{len(log_probs)} tokens at place {place}"
                raise RolloutError(client.where, got, expected, fix)
            scores.append((log_probs[tokens[place]], top))
        return scores

    def close(self) -> None:
        """End all requests."""
        self._thread.close()
