# SPDX-License-Identifier: Apache-2.0
"""The managers of score functions: each calls the built-in graders, or the function of a user's file.

    naive        one call a sample, in a pool of processes, with a time limit each
    batch        one call for all samples of a batch, for functions that are quicker on many at once
    prime        naive with as many processes as cores, for slow graders, programs above all
    dapo         naive with a soft punishment of over-long responses
    in_process   in the trainer's own process: for a function that cannot travel to others, and for a debugger

A sample that cannot be graded is an error, counted and stored with it; it is never a silent 0.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from quadriga.config import Config
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto
from quadriga.rewards.outcome import Outcome, raised, read_outcome, read_outcomes
from quadriga.rewards.pool import GradingPool, Round
from quadriga.rewards.registry import Grading, register
from quadriga.rewards.samples import SampleManager, Samples
from quadriga.rewards.scoring import PLURALS, WITHOUT_TRUTH, ScoreFunction, grader_name

NO_GRADE = Outcome(0.0, {}, "", "graded")  # of a sample that a reward model alone grades
_WHERE = "reward_model.reward_kwargs"
# Built-in graders have limits of their own, of CPU time where they compute. By the clock they may take so many times
# `reward_model.timeout_s`, since a score must not depend on how busy the machine is.
BUILT_IN_PATIENCE = 10
_BUFFER_DEFAULTS = {"enable": False, "len": 0, "penalty_factor": 1.0, "log": False}


def special_token_notice(tokenizer: Any, accepted: Collection[str]) -> tuple[str, ...]:
    """What the start says where a function reads texts without special tokens that may matter to it."""
    if not {*PLURALS, *PLURALS.values()}.isdisjoint(accepted):
        return ()
    ends = {getattr(tokenizer, name, None) for name in ("eos_token", "pad_token", "bos_token")}
    special = sorted(set(getattr(tokenizer, "all_special_tokens", ())) - ends)
    if not special:
        return ()
    fix = "a function that names the argument solution_with_special_tokens gets them too"
    return (
        f"solution_str leaves out special tokens ({', '.join(special[:5])}{', ...' * (len(special) > 5)}); {fix}",
    )


@register("naive")
class NaiveRewardManager(SampleManager):
    """Grades each sample on its own. A user's score function is loaded at once: a mistake shows before a model is."""

    grades_early = True
    is_batch: bool = False  # whether one call of the score function grades all samples

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        custom = config.custom_reward_function
        self.function = ScoreFunction(
            custom.path, custom.name, dict(custom.reward_kwargs), is_batch=self.is_batch
        )
        # With a reward model and no function of the user's the model alone grades: the scores here are zero, but for
        # what a manager adds to them.
        self.has_grades = self.needs_truths = custom.path is not None or not self.settings.enable
        self._pool = GradingPool(
            self.function, num_workers=1 if self.is_batch else self.settings.num_workers
        )
        if self.function.path is not None:
            self._pool.start()
            self.notices = special_token_notice(tokenizer, self._pool.accepted)

    def check_rows(self, rows: Sequence[tuple[str, Any, Any]]) -> None:
        if self.function.path is None and self.has_grades:
            for data_source, place in {
                source: place for place, source, _ in reversed(rows)
            }.items():
                grader_name(data_source, f"{place}, its data source")
        super().check_rows(rows)

    def begin(self, data: DataProto, outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        return super().begin(data, outcomes if self.has_grades else [NO_GRADE] * len(data))

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        return await super().grade_one(row) if self.has_grades else NO_GRADE

    def grades_without_truth(self, data_source: Any) -> bool:
        return self.function.path is not None or grader_name(data_source) in WITHOUT_TRUTH

    def submit(self, rows: list[dict[str, Any]], max_failures: int | None = None) -> Round:
        # A data source that no grader knows stops the run before a process starts.
        for data_source in (
            {row["data_source"]: None for row in rows} if self.function.path is None else ()
        ):
            grader_name(data_source)
        timeout_s = self.settings.timeout_s * (
            BUILT_IN_PATIENCE if self.function.path is None else 1
        )
        facts = [self.function.facts_of(row) for row in rows]
        return self._pool.begin(facts, timeout_s=timeout_s, max_failures=max_failures)

    def close(self) -> None:
        self._pool.close()


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Grades all samples of a batch in one call of the user's function, in one process of its own. The function gets
    the lists `data_sources, solution_strs, ground_truths, extra_infos` and returns a list of scores or dicts. Its time
    limit is `reward_model.timeout_s` for each sample of the batch together."""

    grades_early = False
    is_batch = True

    def __init__(self, config: Config, tokenizer: Any) -> None:
        if config.custom_reward_function.path is None:
            expected = (
                "a file with a function that grades lists, since reward_model.reward_manager=batch"
            )
            fix = "Set it, or use reward_model.reward_manager=naive."
            raise ConfigError("custom_reward_function.path", got="null", expected=expected, fix=fix)
        super().__init__(config, tokenizer)


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Grades each sample on its own, many at the same time; a score is "acc" too, where a grader brings none.

    Options (`reward_model.reward_kwargs`): `num_processes`, samples graded at the same time (all cores of the machine
    if it is not given), and `timeout_s`, seconds for one of them (`reward_model.timeout_s` if it is not given)."""

    options = ("num_processes", "timeout_s")

    def __init__(self, config: Config, tokenizer: Any) -> None:
        kwargs = config.reward_model.reward_kwargs
        num_processes = kwargs.get("num_processes", os.cpu_count() or 1)
        timeout_s = kwargs.get("timeout_s", config.reward_model.timeout_s)
        if not isinstance(num_processes, int) or num_processes < 1:
            raise ConfigError(
                f"{_WHERE}.num_processes",
                got=repr(num_processes),
                expected="a number of at least 1",
            )
        if not isinstance(timeout_s, int | float) or timeout_s <= 0:
            raise ConfigError(
                f"{_WHERE}.timeout_s", got=repr(timeout_s), expected="seconds above 0"
            )
        settings = config.reward_model.model_copy(
            update={"num_workers": num_processes, "timeout_s": timeout_s}
        )
        super().__init__(config.model_copy(update={"reward_model": settings}), tokenizer)

    def shaped(self, outcomes: list[Outcome], samples: Samples) -> list[Outcome]:
        """The outcomes, with the score as "acc" where a grader brings no "acc" of its own."""
        graded = [
            one._replace(extra={"acc": one.score, **one.extra}) if not one.error else one
            for one in outcomes
        ]
        return graded if self.has_grades else outcomes


def punishment_of(
    length: int, max_length: Any, given: Mapping[str, Any]
) -> tuple[float, dict[str, Any]]:
    """What is added to the score of a response of `length` tokens, and what is told of it.
    Raises ConfigError: one of them is not as it must be.
    `max_length`: `max_resp_len`.
    `given`: `overlong_buffer_cfg`."""
    if unknown := ", ".join(key for key in given if key not in _BUFFER_DEFAULTS):
        raise ConfigError(
            f"{_WHERE}.overlong_buffer_cfg",
            got=unknown,
            expected=f"only {', '.join(_BUFFER_DEFAULTS)}",
        )
    buffer = {**_BUFFER_DEFAULTS, **given}
    if not buffer["enable"]:
        return 0.0, {}
    if not isinstance(max_length, int) or max_length < 1:
        expected = "a number of tokens, usually data.max_response_length"
        raise ConfigError(f"{_WHERE}.max_resp_len", got=repr(max_length), expected=expected)
    if not isinstance(buffer["len"], int) or not 0 < buffer["len"] <= max_length:
        expected = f"a number of tokens from 1 to max_resp_len={max_length}"
        raise ConfigError(
            f"{_WHERE}.overlong_buffer_cfg.len", got=repr(buffer["len"]), expected=expected
        )
    excess = length - (max_length - buffer["len"])
    punishment = min(0.0, -excess / buffer["len"] * buffer["penalty_factor"])
    return punishment, {"overlong_reward": punishment, "overlong": punishment < 0} if buffer[
        "log"
    ] else {}


@register("dapo")
class DapoRewardManager(NaiveRewardManager):
    """Grades each sample on its own, and punishes over-long responses softly (arXiv:2503.14476, eq. 13).

    Up to `max_resp_len - len` tokens nothing happens; from there the reward falls linearly, by `penalty_factor` at
    `max_resp_len`:

        reward = score + min(0, (max_resp_len - len - length) / len * penalty_factor)

    Options (`reward_model.reward_kwargs`): `max_resp_len`, in tokens, and `overlong_buffer_cfg` with `enable`, `len`
    (tokens), `penalty_factor`, and `log` (the punishment goes to the extras, as "overlong_reward" and "overlong")."""

    options = ("overlong_buffer_cfg", "max_resp_len")

    def __init__(self, config: Config, tokenizer: Any) -> None:
        kwargs = config.reward_model.reward_kwargs
        self._max_length, self._buffer = (
            kwargs.get("max_resp_len"),
            kwargs.get("overlong_buffer_cfg") or {},
        )
        punishment_of(0, self._max_length, self._buffer)
        super().__init__(config, tokenizer)

    def shaped(self, outcomes: list[Outcome], samples: Samples) -> list[Outcome]:
        """The outcomes with the punishment; "acc" keeps the score from before it, if there was one."""
        shaped = []
        for outcome, length in zip(outcomes, samples.lengths.tolist(), strict=True):
            if not outcome.error:
                extra = (
                    {**outcome.extra, "acc": outcome.extra.get("acc", outcome.score)}
                    if self.has_grades
                    else {}
                )
                punishment, told = punishment_of(length, self._max_length, self._buffer)
                outcome = outcome._replace(
                    score=outcome.score + punishment, extra={**extra, **told}
                )
            shaped.append(outcome)
        return shaped


@register("in_process")
class InProcessRewardManager(SampleManager):
    """Grades each sample, or with `reward_model.reward_kwargs={is_batch: true}` all of a batch in one call, where the
    rewards are joined, without a time limit; workers that are other processes go on meanwhile."""

    options = ("is_batch",)

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        custom, self._is_batch = (
            config.custom_reward_function,
            bool(self.settings.reward_kwargs.get("is_batch")),
        )
        self.function = ScoreFunction(
            custom.path, custom.name, dict(custom.reward_kwargs), is_batch=self._is_batch
        )
        self._compute_score = self.function.load()
        self._accepted = self.function.accepted_by(self._compute_score)
        if custom.path is not None:
            self.notices = special_token_notice(tokenizer, self._accepted)

    def begin(self, data: DataProto, outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        begin = partial(super().begin, data, outcomes)
        return Grading(lambda: begin().result(), lambda: None)

    def submit(self, rows: list[dict[str, Any]], max_failures: int | None = None) -> Round:
        round_ = Round(len(rows), max_failures)
        calls = [rows] if self._is_batch and rows else [[row] for row in rows]
        outcomes = (outcome for call in calls for outcome in self._grade(call))
        for key, outcome in enumerate(outcomes):
            round_.record(key, outcome)
            if round_.done.done():
                break
        return round_

    def _grade(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        facts = [self.function.facts_of(row) for row in rows]
        arguments = self.function.batch_of(facts) if self._is_batch else facts[0]
        arguments = {name: value for name, value in arguments.items() if name in self._accepted}
        try:
            returned = self._compute_score(**arguments)
            return (
                read_outcomes(returned, len(rows)) if self._is_batch else [read_outcome(returned)]
            )
        except Exception as error:
            return [raised(error)] * len(rows)
