# SPDX-License-Identifier: Apache-2.0
"""A model on another server grades: it is asked in words, and the number that it gives is the score.

Options (`reward_model.reward_kwargs`): those of `quadriga.rewards.remote.JudgeSettings` (`url`, `model`, `api_key_env`,
`requests_per_minute`, `tokens_per_minute`, `max_concurrency`, `timeout_s`, `max_attempts`, ...) and what is asked:

    prompt      text with {solution_str}, {ground_truth}, {data_source} and {extra_info.NAME} to be filled in
    pattern     regular expression; its first group is the number, the last match counts ("Score: 0.8" by default)
    components  instead of one prompt, several named ones, each asked apart: {NAME: {prompt, pattern, weight}}

With components the score is their weighted sum, and each is logged as reward/extra/NAME.

    driver     one thread a question, `max_concurrency` of them; a sample waits for all its questions
    a sample   whose judge does not answer, or answers without a number, is an error: counted, stored, never a silent 0
"""

import re
from asyncio import get_running_loop
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import fields
from typing import Any, NamedTuple

from quadriga.config import Config
from quadriga.errors import ConfigError, RewardError
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto
from quadriga.rewards.base import Grading, RewardOutput
from quadriga.rewards.collect import allowed_failures, collect
from quadriga.rewards.components import weighted
from quadriga.rewards.managers.naive import check_options
from quadriga.rewards.outcome import Outcome, failure, raised, read_outcome
from quadriga.rewards.registry import register
from quadriga.rewards.remote import Judge, JudgeSettings, read_score
from quadriga.rewards.samples import Samples, read_samples

DEFAULT_PATTERN = r"[Ss]core:?\**\s*(-?\d+(?:\.\d+)?)"
_WHERE = "reward_model.reward_kwargs"
_PLACE = re.compile(r"\{(solution_str|ground_truth|data_source|extra_info\.\w+)\}")
_ASKED = ("prompt", "pattern", "components")


class _Question(NamedTuple):
    """One thing that the judge is asked about a sample."""

    name: str
    prompt: str
    pattern: str
    weight: float


@register("judge")
class JudgeRewardManager:
    """Grades each sample by asking a model elsewhere, within its server's limits.

    Args:
        config: the run's; read are `reward_model`, `data.reward_fn_key`.
        tokenizer: decodes the responses; anything with `batch_decode`.
    """

    has_grades = True

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.settings = config.reward_model
        kwargs = dict(self.settings.reward_kwargs)
        known = tuple(entry.name for entry in fields(JudgeSettings))
        check_options(self.settings.reward_manager, kwargs, (*known, *_ASKED))
        missing = [name for name in ("url", "model") if name not in kwargs]
        if missing:
            raise ConfigError(_WHERE, got=f"no {' and no '.join(missing)}", expected="the judge's url and model")
        self._questions = _questions(kwargs)
        self._needs_truths = any("{ground_truth}" in question.prompt for question in self._questions)
        self._judge = Judge(JudgeSettings(**{name: value for name, value in kwargs.items() if name in known}))
        self._tokenizer = tokenizer
        self._reward_fn_key = config.data.reward_fn_key
        self._threads = ThreadPoolExecutor(self._judge.settings.max_concurrency, "judge")

    def __call__(self, data: DataProto) -> RewardOutput:
        """Grade a batch, see `RewardManager`."""
        return self.start_grading(data).result()

    def start_grading(self, data: DataProto) -> Grading:
        """See `MeanwhileRewardManager.start_grading`. Questions under way end with their answers or their limits."""
        samples = self._samples(data)
        rows = {self._threads.submit(self._grade, row): index for index, row in enumerate(samples.rows)}

        def result() -> RewardOutput:
            return collect(samples, self._gathered(rows), self.settings.max_error_rate)

        return Grading(result, lambda: _cancel(rows))

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        """See `EarlyRewardManager.grade_one`."""
        return await get_running_loop().run_in_executor(self._threads, self._grade, row)

    def collect_graded(self, data: DataProto, outcomes: Sequence[Outcome]) -> RewardOutput:
        """See `EarlyRewardManager.collect_graded`."""
        return collect(self._samples(data), list(outcomes), self.settings.max_error_rate)

    def close(self) -> None:
        """Ask no more; questions under way end with their answers or their time limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _samples(self, data: DataProto) -> Samples:
        return read_samples(data, self._tokenizer, self._reward_fn_key, needs_truths=self._needs_truths)

    def _gathered(self, rows: Mapping[Future[Outcome], int]) -> list[Outcome]:
        allowed = allowed_failures(len(rows), self.settings.max_error_rate)
        outcomes: dict[int, Outcome] = {}
        with waiting(f"a judge's answers on {len(rows)} samples", detail=lambda: f"{len(outcomes)} have come"):
            for future in as_completed(rows):
                outcomes[rows[future]] = future.result()
                if sum(bool(outcome.error) for outcome in outcomes.values()) > allowed:
                    break
        _cancel(rows)
        skipped = failure("skipped", "not graded, since too many other samples had failed")
        return [outcomes.get(index, skipped) for index in range(len(rows))]

    def _grade(self, row: dict[str, Any]) -> Outcome:
        try:
            found = {question.name: self._ask(question, row) for question in self._questions}
        except (RewardError, TimeoutError, ValueError) as error:
            return raised(error)
        return read_outcome(weighted(found, {question.name: question.weight for question in self._questions}))

    def _ask(self, question: _Question, row: dict[str, Any]) -> float:
        text = _PLACE.sub(lambda match: _value(row, match[1]), question.prompt)
        return read_score(self._judge.ask([{"role": "user", "content": text}]), question.pattern)


def _cancel(rows: Iterable[Future[Outcome]]) -> None:
    for future in rows:
        future.cancel()


def _value(row: dict[str, Any], place: str) -> str:
    column, _, name = place.partition(".")
    if not name:
        return str(row[column])
    if name not in row[column]:
        raise ValueError(f"{_WHERE}: the prompt wants {place}, and the row's extra_info has {sorted(row[column])}")
    return str(row[column][name])


def _questions(kwargs: dict[str, Any]) -> list[_Question]:
    components = kwargs.get("components")
    if (components is None) == (kwargs.get("prompt") is None):
        got = "neither" if components is None else "both"
        raise ConfigError(_WHERE, got=f"{got} of prompt and components", expected="one of them")
    if components is None:
        return [_question("judge_score", {"prompt": kwargs["prompt"], "pattern": kwargs.get("pattern")})]
    if not isinstance(components, Mapping) or not components:
        raise ConfigError(f"{_WHERE}.components", got=repr(components), expected="names, each with a prompt")
    return [_question(str(name), settings) for name, settings in components.items()]


def _question(name: str, settings: Any) -> _Question:
    where = f"{_WHERE}.components.{name}"
    if not isinstance(settings, Mapping) or not set(settings) <= {"prompt", "pattern", "weight"}:
        raise ConfigError(where, got=repr(settings), expected="prompt, and if wanted pattern and weight")
    pattern = settings.get("pattern") or DEFAULT_PATTERN
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"{where}.pattern", got=f"{pattern!r}: {error}", expected="a regular expression") from error
    if num_groups < 1:
        raise ConfigError(f"{where}.pattern", got=f"{pattern!r}", expected="a group (...) around the number")
    prompt, weight = settings.get("prompt"), settings.get("weight", 1.0)
    if not isinstance(prompt, str) or "{solution_str}" not in prompt:
        raise ConfigError(f"{where}.prompt", got=repr(prompt), expected="text with {solution_str} in it")
    if not isinstance(weight, int | float):
        raise ConfigError(f"{where}.weight", got=repr(weight), expected="a number")
    return _Question(name, prompt, pattern, float(weight))
