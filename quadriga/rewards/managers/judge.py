# SPDX-License-Identifier: Apache-2.0
"""A model on another server grades: it gets a prompt, and the number in its reply is the score.

Any server with OpenAI's chat completions will do. Options (`reward_model.reward_kwargs`): those of `Judge`
(`url`, `model`, `api_key_env`, `requests_per_minute`, `max_concurrency`, `timeout_s`, ...) and what is asked:

    prompt      text with {solution_str} (or {solution_with_special_tokens}), {ground_truth}, {data_source} and
                {extra_info.NAME} to be filled in
    range       [least, most] that a score may be, [0, 1] by default
    pattern     regular expression; its first group is the number, and all its matches must have the same one. Without a
                pattern the judge is asked to end with a line "Score: X", and only a last line of this form counts
    components  instead of one prompt, several named ones, each a request: {NAME: {prompt, range, pattern, weight}}

With components the score is their weighted sum, and each is logged as reward/extra/NAME.

    driver     one thread a sample, `max_concurrency` of them; a sample waits for all its questions
    judge.ask  waits for requests and tokens of the last minute to fall below their limits, then for the server;
               unblocked by its reply or by `timeout_s`, whichever is first
    a sample   whose judge does not reply, or replies without a number within its range, is an error: counted, stored,
               never a silent 0

One `Judge` holds one account's limits. Several processes (with `rollout.mode=async` each that generates) have several
judges, and must share the limits out among them.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from quadriga.config import Config
from quadriga.errors import ConfigError, RewardError
from quadriga.http_client import HTTPClient
from quadriga.rewards.components import weighted
from quadriga.rewards.outcome import raised, read_outcome
from quadriga.rewards.pool import Round
from quadriga.rewards.registry import register
from quadriga.rewards.samples import SampleManager

WINDOW_S = 60.0
_LAST_LINE = re.compile(r"(?:^|\n)Score: (-?\d+(?:\.\d+)?)\s*$")
_ENDING = "\n\nEnd your reply with one line of exactly this form, X being a number from {:g} to {:g}:\nScore: X"
_QUESTION_KEYS = ("prompt", "range", "pattern")
# Of text in most tokenizers; used for an estimate until the server has counted.
_CHARS_PER_TOKEN = 3
_WHERE = "reward_model.reward_kwargs"
_PLACE = re.compile(
    r"\{(solution_str|solution_with_special_tokens|ground_truth|data_source|extra_info\.\w+)\}"
)


@dataclass(kw_only=True)
class RateLimit:
    """At most so many requests, and so many tokens (prompts and replies together), in any 60 seconds. Threads may share
    it. `wait` blocks for so many seconds of `clock`, or until `notify` of the condition it is given."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Condition, float], Any] = threading.Condition.wait

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        # One entry a request, the oldest first: [when, tokens].
        self._window: deque[list[float]] = deque()
        self._num_tokens = 0.0

    def acquire(self, num_tokens: int, deadline: float) -> list[float]:
        """Wait for room for a request of about so many tokens; TimeoutError at the deadline, a time of the clock."""
        with self._changed:
            while True:
                now = self.clock()
                while self._window and self._window[0][0] <= now - WINDOW_S:
                    self._num_tokens -= self._window.popleft()[1]
                has_requests = (
                    self.requests_per_minute is None or len(self._window) < self.requests_per_minute
                )
                has_tokens = (
                    self.tokens_per_minute is None
                    or self._num_tokens + num_tokens <= self.tokens_per_minute
                )
                # A request larger than a minute's tokens goes alone: it would never fit.
                if not self._window or (has_requests and has_tokens):
                    break
                if now >= deadline:
                    raise TimeoutError(
                        "the judge's limit on requests or tokens per minute left no room in time"
                    )
                self.wait(self._changed, min(self._window[0][0] + WINDOW_S, deadline) - now)
            entry = [now, float(num_tokens)]
            self._window.append(entry)
            self._num_tokens += num_tokens
            return entry

    def settle(self, entry: list[float], num_tokens: int) -> None:
        """Put the number of tokens that the server has counted in the place of the estimate."""
        with self._changed:
            if any(entry is other for other in self._window):
                self._num_tokens += num_tokens - entry[1]
                entry[1] = float(num_tokens)
                self._changed.notify_all()


@dataclass
class Judge:
    """One model on one server, to which questions are put; threads may share it.
    Raises ConfigError: a number is out of range, or the environment variable for the key is not set."""

    url: str  # of the API, as in "http://host:8000/v1"; "/chat/completions" is added if it is not there
    model: str  # as the server names it
    api_key_env: str | None = (
        None  # environment variable that holds the key. None: the server wants none
    )
    requests_per_minute: int | None = None  # None: any number
    tokens_per_minute: int | None = None  # of prompts and replies together. None: any number
    max_concurrency: int = 8  # samples judged at the same time
    timeout_s: float = 120.0  # for one question, with all its waits and retries
    max_attempts: int = 5  # requests for one question
    backoff_s: float = 1.0  # pause after the first failure; it doubles with each
    max_tokens: int = 512  # longest reply, in tokens
    temperature: float = 0.0  # of the judge's sampling

    def __post_init__(self) -> None:
        for entry in fields(self):
            number = getattr(self, entry.name)
            if entry.name in ("url", "model", "api_key_env", "temperature") or (
                number is None is entry.default
            ):
                continue
            wanted = float | int if entry.name.endswith("_s") else int
            if not isinstance(number, wanted) or isinstance(number, bool) or number <= 0:
                kind = "seconds" if entry.name.endswith("_s") else "a whole number"
                raise ConfigError(
                    f"judge {entry.name}", got=repr(number), expected=f"{kind} above 0"
                )
        headers: dict[str, str] = {}
        if self.api_key_env is not None:
            if not (key := os.environ.get(self.api_key_env)):
                got = f"{self.api_key_env}, which is not set"
                expected = "an environment variable that holds the server's key"
                raise ConfigError(
                    "judge api_key_env",
                    got=got,
                    expected=expected,
                    fix=f"export {self.api_key_env}=...",
                )
            headers["Authorization"] = f"Bearer {key}"
        path = "" if self.url.endswith("/chat/completions") else "/chat/completions"
        url = self.url.rstrip("/") + path
        self._server = HTTPClient(
            url, RewardError, setting=f"{_WHERE}.url", headers=headers, use_proxies=True
        )
        self._limit = RateLimit(
            requests_per_minute=self.requests_per_minute, tokens_per_minute=self.tokens_per_minute
        )

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The judge's reply to messages with "role" and "content".
        Raises TimeoutError: no reply within `timeout_s`.
        Raises RewardError: the server refuses, no attempt brought a reply, or the reply holds no text."""
        deadline = time.monotonic() + self.timeout_s
        estimate = (
            sum(len(message["content"]) for message in messages) // _CHARS_PER_TOKEN
            + self.max_tokens
        )
        entries: list[list[float]] = []

        def before_attempt() -> None:
            # Each attempt counts with the server, so each is counted here; only the last is settled.
            entries.append(self._limit.acquire(estimate, deadline))

        body = {"model": self.model, "messages": list(messages)}
        body |= {"max_tokens": self.max_tokens, "temperature": self.temperature}
        limits = {
            "timeout_s": self.timeout_s,
            "max_attempts": self.max_attempts,
            "backoff_s": self.backoff_s,
        }
        reply = self._server.call_until(body, **limits, before_attempt=before_attempt)
        used = (reply.get("usage") or {}).get("total_tokens")
        if isinstance(used, int):
            self._limit.settle(entries[-1], used)
        try:
            text = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            got = f"the keys {sorted(reply)} without choices[0].message.content"
            raise RewardError(self._server.url, got=got, expected="a chat completion")
        return text


class Question(NamedTuple):
    """One prompt about a sample, for the judge."""

    name: str
    prompt: str
    pattern: str | None = None  # None: the judge is asked for a last line with its score
    weight: float = 1.0
    least: float = 0.0
    most: float = 1.0

    def asked_of(self, row: dict[str, Any]) -> str:
        """The text that the judge gets about a sample."""
        text = _PLACE.sub(lambda match: _value(row, match[1]), self.prompt)
        return text if self.pattern is not None else text + _ENDING.format(self.least, self.most)

    def read_score(self, reply: str) -> float:
        """The score in a judge's reply.

        Raises:
            ValueError: the reply has no score, several, or one that is out of range.
        """
        got = f"judge's reply: got ...{reply[-200:]!r}"
        if self.pattern is None:
            numbers = _LAST_LINE.findall(reply.rstrip()[-100:])
            expected = "a last line 'Score: X'"
        else:
            numbers = [match[1] for match in re.finditer(self.pattern, reply)]
            expected = f"a match of {self.pattern!r}"
        scores = {float(number) for number in numbers}
        if not scores:
            raise ValueError(f"{got}, expected {expected}")
        if len(scores) > 1:
            raise ValueError(f"{got} with the scores {sorted(scores)}, expected one")
        score = scores.pop()
        if not self.least <= score <= self.most:
            raise ValueError(
                f"{got}, expected a score from {self.least:g} to {self.most:g} ({_WHERE}, range)"
            )
        return score


@register("judge")
class JudgeRewardManager(SampleManager):
    """Grades each sample by a model on another server, within that server's limits. When a grading is cancelled,
    questions under way end with their replies or their time limits."""

    grades_early = True
    options = (*(entry.name for entry in fields(Judge)), *_QUESTION_KEYS, "components")

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        kwargs = dict(self.settings.reward_kwargs)
        if missing := [name for name in ("url", "model") if name not in kwargs]:
            raise ConfigError(
                _WHERE, got=f"no {' and no '.join(missing)}", expected="the judge's url and model"
            )
        self._questions = _questions(kwargs)
        ranges = ", ".join(
            f"{question.name} from {question.least:g} to {question.most:g}"
            for question in self._questions
        )
        self.notices = (
            f"judge {kwargs['model']}: {ranges}; a score beyond its range is an error ({_WHERE}, range)",
        )
        self.needs_truths = any("{ground_truth}" in question.prompt for question in self._questions)
        of_judge = {entry.name for entry in fields(Judge)} & kwargs.keys()
        self._judge = Judge(**{name: kwargs[name] for name in of_judge})
        self._threads = ThreadPoolExecutor(self._judge.max_concurrency, "judge")

    def submit(self, rows: list[dict[str, Any]], max_failures: int | None = None) -> Round:
        round_ = Round(len(rows), max_failures)
        for key, row in enumerate(rows):
            self._threads.submit(self._grade, round_, key, row)
        return round_

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _grade(self, round_: Round, key: int, row: dict[str, Any]) -> None:
        if round_.done.done():
            return
        found: dict[str, float] = {}
        try:
            for question in self._questions:
                reply = self._judge.ask([{"role": "user", "content": question.asked_of(row)}])
                found[question.name] = question.read_score(reply)
            weights = {question.name: question.weight for question in self._questions}
            round_.record(key, read_outcome(weighted(found, weights)))
        except (RewardError, TimeoutError, ValueError) as error:
            round_.record(key, raised(error))
        except BaseException as error:
            round_.end(error)
            raise


def _value(row: dict[str, Any], place: str) -> str:
    column, _, name = place.partition(".")
    if not name:
        return str(row.get(column, row["solution_str"]))
    if name not in row[column]:
        raise ValueError(
            f"{_WHERE}: the prompt wants {place}, and the row's extra_info has {sorted(row[column])}"
        )
    return str(row[column][name])


def _questions(kwargs: dict[str, Any]) -> list[Question]:
    components = kwargs.get("components")
    if (components is None) == (kwargs.get("prompt") is None):
        got = "neither" if components is None else "both"
        raise ConfigError(_WHERE, got=f"{got} of prompt and components", expected="one of them")
    if components is None:
        components = {
            "judge_score": {name: kwargs[name] for name in _QUESTION_KEYS if name in kwargs}
        }
    if not isinstance(components, Mapping) or not components:
        raise ConfigError(
            f"{_WHERE}.components", got=repr(components), expected="names, each with a prompt"
        )
    questions = []
    for name, settings in components.items():
        where = f"{_WHERE}.components.{name}"
        if not isinstance(settings, Mapping) or not set(settings) <= {*_QUESTION_KEYS, "weight"}:
            raise ConfigError(
                where,
                got=repr(settings),
                expected="prompt, and if wanted range, pattern and weight",
            )
        pattern = settings.get("pattern")
        try:
            has_number = pattern is None or re.compile(pattern).groups > 0
        except re.error as error:
            raise ConfigError(
                f"{where}.pattern", f"{pattern!r}: {error}", "a regular expression"
            ) from error
        if not has_number:
            raise ConfigError(
                f"{where}.pattern", got=f"{pattern!r}", expected="a group (...) around the number"
            )
        prompt, weight = settings.get("prompt"), settings.get("weight", 1.0)
        if not isinstance(prompt, str) or not re.search(
            r"\{solution_(str|with_special_tokens)\}", prompt
        ):
            raise ConfigError(
                f"{where}.prompt", got=repr(prompt), expected="text with {solution_str} in it"
            )
        if not isinstance(weight, int | float):
            raise ConfigError(f"{where}.weight", got=repr(weight), expected="a number")
        bounds = settings.get("range", [0.0, 1.0])
        is_pair = isinstance(bounds, list | tuple) and len(bounds) == 2
        if (
            not is_pair
            or not all(isinstance(bound, int | float) for bound in bounds)
            or not bounds[0] < bounds[1]
        ):
            raise ConfigError(
                f"{where}.range", got=repr(bounds), expected="two numbers, as in [0, 10]"
            )
        questions.append(
            Question(str(name), prompt, pattern, float(weight), float(bounds[0]), float(bounds[1]))
        )
    return questions
