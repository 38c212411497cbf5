# SPDX-License-Identifier: Apache-2.0
"""Grading by a model on another server, the judge: it gets a prompt, and replies with a number.

Any server with OpenAI's chat completions can be used. Options (`reward_model.reward_kwargs`) are
the fields of `Judge` (`url`, `model`, `api_key_env`, `requests_per_minute`, `max_concurrency`,
`timeout_s`, ...) and the question:

    prompt      text in which {solution_str} (or {solution_with_special_tokens}), {ground_truth},
                {data_source} and {extra_info.NAME} are filled in
    range       [lowest, highest] score, by default [0, 1]
    pattern     regular expression whose first group is the number; all matches in a reply must have
                the same number. Without a pattern the judge is asked to end with a line "Score: X",
                and only a last line of this form counts
    components  instead of one prompt, several named prompts, with one request each:
                {NAME: {prompt, range, pattern, weight}}

With components the score is their weighted sum, and each is logged as reward/extra/NAME.

    driver     has one thread per sample, at most `max_concurrency`, which asks all its questions
    judge.ask  waits until the requests and tokens of the last minute are below their limits, then
               for the server; unblocked by the reply or by `timeout_s`, whichever is first
    a sample   is an error if the judge does not reply, or replies without a number within the
               range. Errors are counted and stored

One `Judge` keeps the limits of one account. Several processes (with `rollout.mode=async` each one
that generates) have several judges and must divide the limits among them.
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
from quadriga.rewards.outcome import error_outcome, read_outcome
from quadriga.rewards.pool import GradingRound
from quadriga.rewards.registry import register
from quadriga.rewards.samples import SampleManager

WINDOW_S = 60.0
_SCORE_LINE = re.compile(r"(?:^|\n)Score: (-?\d+(?:\.\d+)?)\s*$")
_ENDING = (
    "\n\nEnd your reply with one line of exactly this form, "
    "X being a number from {:g} to {:g}:\nScore: X"
)
_QUESTION_KEYS = ("prompt", "range", "pattern")
# By this, the tokens of a request are estimated until the server has counted them.
_CHARS_PER_TOKEN = 3
_WHERE = "reward_model.reward_kwargs"
_ONLY_SCORE = "judge_score"  # name of the score of a single prompt
_PROMPT_PLACE = re.compile(
    r"\{(solution_str|solution_with_special_tokens|ground_truth|data_source|extra_info\.\w+)\}"
)


@dataclass(eq=False)  # compared by identity: two requests may have equal values
class WindowEntry:
    """A request that counts towards a rate limit.

    Attributes:
        sent_at: when the request was sent, in seconds of `RateLimit.clock`.
        num_tokens: number of tokens of prompt and reply, at first an estimate.
    """

    sent_at: float
    num_tokens: int


@dataclass(kw_only=True)
class RateLimit:
    """Limits the requests and tokens in any 60 seconds. Threads may share it.

    Attributes:
        requests_per_minute: largest number of requests. None: no limit.
        tokens_per_minute: largest number of tokens, of prompts and replies together. None: no
            limit.
        clock: returns the current time in seconds.
        wait: waits on a condition for some seconds of the clock, or until the condition is
            notified.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Condition, float], Any] = threading.Condition.wait

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        # The requests of the last minute, the oldest first, and their tokens together.
        self._window: deque[WindowEntry] = deque()
        self._num_tokens = 0

    def acquire(self, num_tokens: int, deadline: float) -> WindowEntry:
        """Wait until there is room for a request.

        Args:
            num_tokens: estimated number of tokens of the request.
            deadline: time of the clock at which to give up.

        Returns:
            The request's entry, for `settle`.

        Raises:
            TimeoutError: there was no room before the deadline.
        """
        with self._changed:
            while True:
                now = self.clock()
                # Drop the requests that are older than a minute.
                while self._window and self._window[0].sent_at <= now - WINDOW_S:
                    self._num_tokens -= self._window.popleft().num_tokens
                if self._has_room(num_tokens):
                    break
                if now >= deadline:
                    raise TimeoutError(
                        "the judge's limit on requests or tokens per minute left no room in time"
                    )
                # Wait until the oldest request is a minute old. `settle` may make room before that.
                next_room_at = self._window[0].sent_at + WINDOW_S
                self.wait(self._changed, min(next_room_at, deadline) - now)
            entry = WindowEntry(now, num_tokens)
            self._window.append(entry)
            self._num_tokens += num_tokens
            return entry

    def _has_room(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens may be sent now. The caller holds the lock."""
        if not self._window:
            # A request with more tokens than the limit would wait forever, so it is sent alone.
            return True
        if self.requests_per_minute is not None and len(self._window) >= self.requests_per_minute:
            return False
        total = self._num_tokens + num_tokens
        return self.tokens_per_minute is None or total <= self.tokens_per_minute

    def settle(self, entry: WindowEntry, num_tokens: int) -> None:
        """Replace the estimate of a request by the number of tokens that the server has counted.

        Args:
            entry: entry of the request, from `acquire`.
            num_tokens: the number that the server has counted.
        """
        with self._changed:
            # The request may have left the window already.
            if entry in self._window:
                self._num_tokens += num_tokens - entry.num_tokens
                entry.num_tokens = num_tokens
                self._changed.notify_all()


@dataclass
class Judge:
    """A model on a server that answers questions. Threads may share it.

    Attributes:
        url: address of the API, as in "http://host:8000/v1". "/chat/completions" is added if it is
            missing.
        model: name of the model on the server.
        api_key_env: environment variable that holds the key. None: the server needs none.
        requests_per_minute: largest number of requests. None: no limit.
        tokens_per_minute: largest number of tokens, of prompts and replies together. None: no
            limit.
        max_concurrency: number of samples judged at the same time.
        timeout_s: seconds for one question, including all waits and retries.
        max_attempts: most requests for one question.
        backoff_s: seconds to pause after the first failed request; doubled after each further one.
        max_tokens: most tokens of a reply.
        temperature: sampling temperature of the judge.

    Raises:
        ConfigError: a number is out of range, or the environment variable for the key is not set.
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
        # Check the numbers among the fields.
        for field in fields(self):
            value = getattr(self, field.name)
            is_unset = value is None and field.default is None
            if is_unset or field.name in ("url", "model", "api_key_env", "temperature"):
                continue
            is_time = field.name.endswith("_s")
            number_type = float | int if is_time else int
            # `True` would count as 1, so it is refused.
            if not isinstance(value, number_type) or isinstance(value, bool) or value <= 0:
                kind = "seconds" if is_time else "a whole number"
                raise ConfigError(
                    f"{_WHERE}.{field.name}", got=repr(value), expected=f"{kind} above 0"
                )
        headers = {}
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise ConfigError(
                    f"{_WHERE}.api_key_env",
                    got=f"{self.api_key_env}, which is not set",
                    expected="an environment variable that holds the server's key",
                    fix=f"export {self.api_key_env}=...",
                )
            headers["Authorization"] = f"Bearer {key}"
        base_url = self.url.rstrip("/").removesuffix("/chat/completions")
        url = f"{base_url}/chat/completions"
        self._server = HTTPClient(
            url, RewardError, setting=f"{_WHERE}.url", headers=headers, use_proxies=True
        )
        self._limit = RateLimit(
            requests_per_minute=self.requests_per_minute, tokens_per_minute=self.tokens_per_minute
        )

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Ask the judge a question.

        Args:
            messages: the chat, each message with "role" and "content".

        Returns:
            Text of the reply.

        Raises:
            TimeoutError: there was no reply within `timeout_s`.
            RewardError: the server refuses, no attempt had a reply, or the reply has no text.
        """
        deadline = time.monotonic() + self.timeout_s
        # Estimate the tokens of prompt and reply, until the server has counted them.
        num_chars = sum(len(message["content"]) for message in messages)
        num_tokens = num_chars // _CHARS_PER_TOKEN + self.max_tokens
        # Entries of all attempts in the window of the rate limit.
        entries = []

        def before_attempt() -> None:
            """Wait for room within the rate limit, since the server counts every attempt."""
            entries.append(self._limit.acquire(num_tokens, deadline))

        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        reply = self._server.call_until(
            body,
            timeout_s=self.timeout_s,
            max_attempts=self.max_attempts,
            backoff_s=self.backoff_s,
            before_attempt=before_attempt,
        )
        num_counted = (reply.get("usage") or {}).get("total_tokens")
        if isinstance(num_counted, int):
            # Only the last attempt had a reply. For the others the estimates remain.
            self._limit.settle(entries[-1], num_counted)
        try:
            text = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise RewardError(
                self._server.url,
                got=f"the keys {sorted(reply)} without choices[0].message.content",
                expected="a chat completion",
            )
        return text


class JudgeQuestion(NamedTuple):
    """A question to the judge about each sample, which gives one score.

    Attributes:
        name: name of the score.
        prompt: text with places such as {solution_str}.
        pattern: regular expression whose first group is the score in the reply. None: the judge is
            asked for a last line with the score.
        weight: weight of the score in the sum.
        min_score: lowest score.
        max_score: highest score.
    """

    name: str
    prompt: str
    pattern: str | None = None
    weight: float = 1.0
    min_score: float = 0.0
    max_score: float = 1.0

    def fill_in(self, row: dict[str, Any]) -> str:
        """Fill in the prompt for a sample.

        Args:
            row: facts of the sample, as an entry of `Samples.rows`.

        Returns:
            The question. Without a `pattern` it ends by asking for a last line with the score.
        """
        text = _PROMPT_PLACE.sub(lambda match: _value_of_place(row, match[1]), self.prompt)
        if self.pattern is None:
            text += _ENDING.format(self.min_score, self.max_score)
        return text

    def read_score(self, reply: str) -> float:
        """Read the score in a judge's reply.

        Raises:
            ValueError: the reply has no score, several different scores, or one out of range.
        """
        # For errors: the score is usually at the end of a reply.
        got = f"judge's reply: got ...{reply[-200:]!r}"
        if self.pattern is None:
            # The line is short, so only the end of the reply is searched.
            numbers = _SCORE_LINE.findall(reply.rstrip()[-100:])
            expected = "a last line 'Score: X'"
        else:
            # An optional group may have no part in a match.
            numbers = [match[1] for match in re.finditer(self.pattern, reply) if match[1]]
            expected = f"a match of {self.pattern!r}, with a number as its first group"
        scores = {float(number) for number in numbers}
        if not scores:
            raise ValueError(f"{got}, expected {expected}")
        if len(scores) > 1:
            raise ValueError(f"{got} with the scores {sorted(scores)}, expected one")
        score = scores.pop()
        if not self.min_score <= score <= self.max_score:
            raise ValueError(
                f"{got}, expected a score from {self.min_score:g} to {self.max_score:g} ({_WHERE}, range)"
            )
        return score


@register("judge", is_built_in=True)
class JudgeRewardManager(SampleManager):
    """Grades each sample by a model on another server, within that server's limits.

    When a grading is cancelled, questions that were sent already still wait for their replies or
    their time limits.
    """

    grades_early = True
    options = (*(field.name for field in fields(Judge)), *_QUESTION_KEYS, "components")

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        kwargs = dict(self.settings.reward_kwargs)
        # All other fields of `Judge` have defaults.
        missing = [name for name in ("url", "model") if name not in kwargs]
        if missing:
            raise ConfigError(
                _WHERE, got=f"no {' and no '.join(missing)}", expected="the judge's url and model"
            )
        self._questions = _read_questions(kwargs)
        ranges = ", ".join(
            f"{question.name} from {question.min_score:g} to {question.max_score:g}"
            for question in self._questions
        )
        self.notices = (
            f"judge {kwargs['model']}: {ranges}; "
            f"a score beyond its range is an error ({_WHERE}, range)",
        )
        # Without a place for the truth in any prompt, rows need none.
        self.needs_truths = any("{ground_truth}" in question.prompt for question in self._questions)
        judge_names = {field.name for field in fields(Judge)}
        self._judge = Judge(**{name: kwargs[name] for name in judge_names & kwargs.keys()})
        self._threads = ThreadPoolExecutor(self._judge.max_concurrency, "judge")

    def submit(self, rows: list[dict[str, Any]], max_failures: int | None = None) -> GradingRound:
        round_ = GradingRound(len(rows), max_failures)
        for key, row in enumerate(rows):
            self._threads.submit(self._grade, round_, key, row)
        return round_

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _grade(self, round_: GradingRound, key: int, row: dict[str, Any]) -> None:
        """Ask all questions about one sample and record its outcome; runs in a thread.

        Args:
            round_: the round of the sample.
            key: position of the sample in the round.
            row: entry of `Samples.rows`.
        """
        if round_.done.done():
            return
        scores = {}
        weights = {}
        try:
            for question in self._questions:
                reply = self._judge.ask([{"role": "user", "content": question.fill_in(row)}])
                scores[question.name] = question.read_score(reply)
                weights[question.name] = question.weight
            round_.record(key, read_outcome(weighted(scores, weights)))
        except (RewardError, TimeoutError, ValueError) as error:
            round_.record(key, error_outcome(error))
        except BaseException as error:
            # Nobody reads the result of this thread, so the error has to end the round.
            round_.end(error)
            raise


def _value_of_place(row: dict[str, Any], place: str) -> str:
    """Look up the text for a place in a prompt.

    Args:
        row: entry of `Samples.rows`.
        place: name of an entry of the row, or `extra_info.NAME`.

    Raises:
        ValueError: the row's `extra_info` lacks the entry.
    """
    column, _, name = place.partition(".")
    if not name:
        # Only the text with special tokens may be missing, if `grade_one` is called without it.
        # Then the text without them stands in for it.
        return str(row.get(column, row["solution_str"]))
    if name not in row[column]:
        raise ValueError(
            f"{_WHERE}: the prompt has {place}, and the row's extra_info has {sorted(row[column])}"
        )
    return str(row[column][name])


def _read_questions(kwargs: dict[str, Any]) -> list[JudgeQuestion]:
    """Read the questions from the manager's options: one, or one for each component.

    Raises:
        ConfigError: an option is missing or wrong.
    """
    components = kwargs.get("components")
    if (components is None) == (kwargs.get("prompt") is None):
        got = "neither" if components is None else "both"
        raise ConfigError(_WHERE, got=f"{got} of prompt and components", expected="one of them")
    if components is None:
        settings = {name: kwargs[name] for name in _QUESTION_KEYS if name in kwargs}
        return [_read_question(_ONLY_SCORE, settings, _WHERE)]
    if not isinstance(components, Mapping) or not components:
        raise ConfigError(
            f"{_WHERE}.components", got=repr(components), expected="names, each with a prompt"
        )
    return [
        _read_question(str(name), settings, f"{_WHERE}.components.{name}")
        for name, settings in components.items()
    ]


def _read_question(name: str, settings: Any, where: str) -> JudgeQuestion:
    """Read one question from its options.

    Args:
        name: name of the score.
        settings: prompt, and optionally range, pattern and weight.
        where: configuration key of the options, for errors.

    Raises:
        ConfigError: an option is wrong.
    """
    if not isinstance(settings, Mapping) or not set(settings) <= {*_QUESTION_KEYS, "weight"}:
        raise ConfigError(
            where,
            got=repr(settings),
            expected="a dict with prompt, and optionally range, pattern and weight",
        )
    # Options are checked here, at the start: later, the error would occur with every sample.
    pattern = settings.get("pattern")
    try:
        has_group = pattern is None or re.compile(pattern).groups > 0
    except re.error as error:
        raise ConfigError(
            f"{where}.pattern", got=f"{pattern!r}: {error}", expected="a regular expression"
        ) from error
    if not has_group:
        raise ConfigError(
            f"{where}.pattern", got=f"{pattern!r}", expected="a group (...) around the number"
        )
    # A prompt without the response would give all samples the same question.
    prompt = settings.get("prompt")
    if not isinstance(prompt, str) or not re.search(
        r"\{solution_(str|with_special_tokens)\}", prompt
    ):
        raise ConfigError(
            f"{where}.prompt", got=repr(prompt), expected="text with {solution_str} in it"
        )
    weight = settings.get("weight", 1.0)
    if not isinstance(weight, int | float):
        raise ConfigError(f"{where}.weight", got=repr(weight), expected="a number")
    bounds = settings.get("range", [0.0, 1.0])
    is_range = (
        isinstance(bounds, list | tuple)
        and len(bounds) == 2
        and all(isinstance(bound, int | float) for bound in bounds)
        and bounds[0] < bounds[1]
    )
    if not is_range:
        raise ConfigError(f"{where}.range", got=repr(bounds), expected="two numbers, as in [0, 10]")
    return JudgeQuestion(name, prompt, pattern, float(weight), float(bounds[0]), float(bounds[1]))
