# SPDX-License-Identifier: Apache-2.0
"""Judges that other machines run: any server with OpenAI's chat completions, asked at a rate that it allows.

    judge.ask     waits for: a free place (`max_concurrency`), then requests and tokens of the last minute to fall below
                  their limits, then the server; unblocked by its answer or by `timeout_s`, whichever is first

One `Judge` holds one account's limits. Whoever asks in several processes has several judges, and must share the limits
out among them: with `rollout.mode=async` that is each process that generates.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from quadriga.errors import ConfigError, RewardError
from quadriga.http_client import HTTPClient

WINDOW_S = 60.0
# Of text in most tokenizers; used for an estimate until the server has counted.
_CHARS_PER_TOKEN = 3

Message = dict[str, str]


class RateLimit:
    """At most so many requests, and so many tokens, in any 60 seconds. Threads may share it.

    Args:
        requests_per_minute: None: any number.
        tokens_per_minute: of prompts and answers together. None: any number.
        clock: seconds that only grow.
        wait: blocks for so many seconds at most, until `notify` of the condition it is given.
    """

    def __init__(
        self,
        *,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float], Any] = threading.Condition.wait,
    ) -> None:
        self._max_requests = requests_per_minute
        self._max_tokens = tokens_per_minute
        self._clock = clock
        self._wait = wait
        self._changed = threading.Condition()
        # One entry a request, the oldest first: [when, tokens].
        self._window: deque[list[float]] = deque()
        self._num_tokens = 0.0

    def acquire(self, num_tokens: int, deadline: float) -> list[float]:
        """Wait for room for a request of about so many tokens; returns its entry, for `settle`.

        Raises:
            TimeoutError: there is no room before the deadline, a time of the clock.
        """
        with self._changed:
            while True:
                pause_s = self._pause_s(num_tokens)
                if pause_s <= 0:
                    entry = [self._clock(), float(num_tokens)]
                    self._window.append(entry)
                    self._num_tokens += num_tokens
                    return entry
                left_s = deadline - self._clock()
                if left_s <= 0:
                    raise TimeoutError("the judge's limit on requests or tokens per minute left no room in time")
                self._wait(self._changed, min(pause_s, left_s))

    def settle(self, entry: list[float], num_tokens: int) -> None:
        """Put the number of tokens that the server has counted in the place of the estimate."""
        with self._changed:
            if any(entry is other for other in self._window):
                self._num_tokens += num_tokens - entry[1]
                entry[1] = float(num_tokens)
                self._changed.notify_all()

    def _pause_s(self, num_tokens: int) -> float:
        now = self._clock()
        while self._window and self._window[0][0] <= now - WINDOW_S:
            self._num_tokens -= self._window.popleft()[1]
        if not self._window:
            # A request larger than a minute's tokens goes alone: it would never fit.
            return 0.0
        has_requests = self._max_requests is None or len(self._window) < self._max_requests
        has_tokens = self._max_tokens is None or self._num_tokens + num_tokens <= self._max_tokens
        return 0.0 if has_requests and has_tokens else self._window[0][0] + WINDOW_S - now


@dataclass(frozen=True)
class JudgeSettings:
    """Who judges, and at what rate it may be asked.

    Attributes:
        url: of the API, as in "http://host:8000/v1"; "/chat/completions" is added if it is not there.
        model: as the server names it.
        api_key_env: environment variable that holds the key. None: the server wants none.
        requests_per_minute: None: any number.
        tokens_per_minute: of prompts and answers together. None: any number.
        max_concurrency: requests at the same time.
        timeout_s: for one question, with all its waits and retries.
        max_attempts: requests for one question.
        backoff_s: pause after the first failure; it doubles with each.
        max_tokens: longest answer, in tokens.
        temperature: of the judge's sampling.

    Raises:
        ConfigError: a number is out of range.
    """

    url: str
    model: str
    api_key_env: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int = 8
    timeout_s: float = 120.0
    max_attempts: int = 5
    backoff_s: float = 1.0
    max_tokens: int = 512
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            number = getattr(self, entry.name)
            if entry.name in ("url", "model", "api_key_env", "temperature") or (number is None is entry.default):
                continue
            wanted = float | int if entry.name.endswith("_s") else int
            if not isinstance(number, wanted) or isinstance(number, bool) or number <= 0:
                kind = "seconds" if entry.name.endswith("_s") else "a whole number"
                raise ConfigError(f"judge {entry.name}", got=repr(number), expected=f"{kind} above 0")


class Judge:
    """Asks one model on one server; threads may share it.

    Raises:
        ConfigError: the environment variable for the key is not set.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        url = settings.url
        self._server = HTTPClient(
            url if url.endswith("/chat/completions") else f"{url.rstrip('/')}/chat/completions",
            RewardError,
            setting="reward_model.reward_kwargs.url",
            headers=_authorization(settings.api_key_env),
            use_proxies=True,
        )
        self._limit = RateLimit(
            requests_per_minute=settings.requests_per_minute, tokens_per_minute=settings.tokens_per_minute
        )
        self._places = threading.BoundedSemaphore(settings.max_concurrency)

    def ask(self, messages: Sequence[Message]) -> str:
        """The judge's answer.

        Args:
            messages: dicts with "role" and "content".

        Raises:
            TimeoutError: no answer within `timeout_s`.
            RewardError: the server refuses, no attempt brought an answer, or the answer holds no text.
        """
        settings = self.settings
        deadline = time.monotonic() + settings.timeout_s
        estimate = sum(len(message["content"]) for message in messages) // _CHARS_PER_TOKEN
        estimate += settings.max_tokens
        entries: list[list[float]] = []

        def before_attempt() -> None:
            # Each attempt counts with the server, so each is counted here; only the last is settled.
            entries.append(self._limit.acquire(estimate, deadline))

        with self._place(deadline):
            body = {
                "model": settings.model,
                "messages": list(messages),
                "max_tokens": settings.max_tokens,
                "temperature": settings.temperature,
            }
            left_s = max(0.0, deadline - time.monotonic())
            answer = self._server.call_until(
                body,
                timeout_s=left_s,
                max_attempts=settings.max_attempts,
                backoff_s=settings.backoff_s,
                before_attempt=before_attempt,
            )
        used = (answer.get("usage") or {}).get("total_tokens")
        if isinstance(used, int):
            self._limit.settle(entries[-1], used)
        return self._text(answer)

    @contextmanager
    def _place(self, deadline: float) -> Iterator[None]:
        if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError(
                f"{self._server.url}: no free place within {self.settings.timeout_s:g} s (max_concurrency)"
            )
        try:
            yield
        finally:
            self._places.release()

    def _text(self, answer: dict[str, Any]) -> str:
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise RewardError(
                self._server.url,
                got=f"the keys {sorted(answer)} without choices[0].message.content",
                expected="a chat completion",
            )
        return text


def read_score(answer: str, pattern: str) -> float:
    """The number in the first group of the last match of a regular expression in a judge's answer.

    Raises:
        ValueError: nothing matches, or the group is no number.
    """
    matches = list(re.finditer(pattern, answer))
    if not matches:
        raise ValueError(f"judge's answer: got ...{answer[-200:]!r}, expected a match of {pattern!r}")
    return float(matches[-1].group(1))


def _authorization(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ConfigError(
            "judge api_key_env",
            got=f"{api_key_env}, which is not set",
            expected="an environment variable that holds the server's key",
            fix=f"export {api_key_env}=...",
        )
    return {"Authorization": f"Bearer {key}"}
