# SPDX-License-Identifier: Apache-2.0
"""Managers of score functions, which are the built-in graders or a function in a user's file.

    naive        one call per sample, in a pool of processes, with a time limit for each
    batch        one call for all samples of a batch, for functions that are faster on many at once
    prime        naive with as many processes as cores, for slow graders such as those of programs
    dapo         naive with a soft penalty for over-long responses
    in_process   in the trainer's own process: for a function that other processes cannot load, and
                 for a debugger

If a sample cannot be graded, the error is counted and stored with the sample.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from quadriga.config import Config
from quadriga.config.reward import BUFFER_DEFAULTS, check_overlong
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto
from quadriga.rewards.by_name import OPTIONAL_ARGUMENTS, ROW
from quadriga.rewards.outcome import Outcome, error_outcome, read_outcome, read_outcomes
from quadriga.rewards.pool import GradingPool, GradingRound
from quadriga.rewards.process import select_arguments
from quadriga.rewards.registry import Grading, register
from quadriga.rewards.samples import SampleManager, Samples
from quadriga.rewards.scoring import WITHOUT_TRUTH, ScoreFunction, grader_name

# The outcome of a sample that a reward model or the environment grades instead of a score function.
NO_GRADE = Outcome(0.0, {}, "", "graded")
_WHERE = "reward_model.reward_kwargs"
# Built-in graders limit their own CPU time. By the clock they get this many times
# `reward_model.timeout_s`, because a score must not depend on how busy the machine is.
BUILT_IN_PATIENCE = 10
_MAX_SHOWN_TOKENS = 5


def special_token_notice(tokenizer: Any, accepted: Collection[str]) -> tuple[str, ...]:
    """Make a notice if a score function does not see special tokens that may matter to it.

    Args:
        tokenizer: tokenizer of the policy.
        accepted: names of the arguments that the function is called with.

    Returns:
        One sentence. Empty if the function also takes the texts with special tokens, or if the
        tokenizer has no special tokens other than those for beginning, end and padding.
    """
    if not {*OPTIONAL_ARGUMENTS, *OPTIONAL_ARGUMENTS.values()}.isdisjoint(accepted):
        return ()
    ends = {getattr(tokenizer, name, None) for name in ("eos_token", "pad_token", "bos_token")}
    special_tokens = sorted(set(getattr(tokenizer, "all_special_tokens", ())) - ends)
    if not special_tokens:
        return ()
    shown = ", ".join(special_tokens[:_MAX_SHOWN_TOKENS])
    if len(special_tokens) > _MAX_SHOWN_TOKENS:
        shown += ", ..."
    return (
        f"solution_str leaves out special tokens ({shown}); a function that names the argument "
        "solution_with_special_tokens gets them too",
    )


@register("naive", is_built_in=True)
class NaiveRewardManager(SampleManager):
    """Grades each sample on its own, in a pool of processes.

    A user's score function is loaded at once, so that a mistake in it is reported before a model is
    loaded.

    Attributes:
        function: the score function.
        has_grades: whether the score function is used. If not, a reward model or the environment
            grades, and the scores of this manager are 0 plus what `shaped` adds.
        is_batch: whether one call of the score function grades all samples of a batch.
    """

    grades_early = True
    is_batch: bool = False

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        custom = config.custom_reward_function
        self.function = ScoreFunction(
            custom.path, custom.name, dict(custom.reward_kwargs), is_batch=self.is_batch
        )
        # A reward model or the environment may grade instead.
        grades_elsewhere = self.settings.enable or config.env.name is not None
        self.has_grades = custom.path is not None or not grades_elsewhere
        self.needs_truths = self.has_grades
        num_workers = 1 if self.is_batch else self.settings.num_workers
        self._pool = GradingPool(self.function, num_workers=num_workers)
        if self.function.path is not None:
            self._pool.start()
            self.notices = special_token_notice(tokenizer, self._pool.accepted)
            self.reads_rows = ROW in self._pool.accepted

    def check_rows(self, rows: Sequence[tuple[str, Any, Any]]) -> None:
        if self.function.path is None and self.has_grades:
            # Check each data source once, for the error with its first row: in reversed order,
            # later entries of the dictionary overwrite earlier ones.
            first_places = {data_source: place for place, data_source, _ in reversed(rows)}
            for data_source, place in first_places.items():
                grader_name(data_source, f"{place}, its data source")
        super().check_rows(rows)

    def begin(self, data: DataProto, outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        # Without a score function, every sample has an outcome already, so none is graded.
        if not self.has_grades:
            early_outcomes = [None] * len(data) if outcomes is None else outcomes
            outcomes = [outcome or NO_GRADE for outcome in early_outcomes]
        return super().begin(data, outcomes)

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        return await super().grade_one(row) if self.has_grades else NO_GRADE

    def grades_without_truth(self, data_source: Any) -> bool:
        return self.function.path is not None or grader_name(data_source) in WITHOUT_TRUTH

    def submit(self, rows: list[dict[str, Any]], max_failures: int | None = None) -> GradingRound:
        timeout_s = self.settings.timeout_s
        if self.function.path is None:
            timeout_s *= BUILT_IN_PATIENCE
            # Called for its error about an unknown data source, before a process is started.
            for data_source in dict.fromkeys(row["data_source"] for row in rows):
                grader_name(data_source)
        arguments = [self.function.arguments_of(row) for row in rows]
        return self._pool.begin(arguments, timeout_s=timeout_s, max_failures=max_failures)

    def close(self) -> None:
        self._pool.close()


@register("batch", is_built_in=True)
class BatchRewardManager(NaiveRewardManager):
    """Grades all samples of a batch in one call of the user's function, in a single process.

    The function gets the lists `data_sources, solution_strs, ground_truths, extra_infos` and
    returns a list of scores or dicts. Its time limit is `reward_model.timeout_s` times the number
    of samples.
    """

    grades_early = False
    is_batch = True

    def __init__(self, config: Config, tokenizer: Any) -> None:
        if config.custom_reward_function.path is None:
            raise ConfigError(
                "custom_reward_function.path",
                got="null",
                expected="a file with a function that grades lists, "
                "since reward_model.reward_manager=batch",
                fix="Set it, or use reward_model.reward_manager=naive.",
            )
        super().__init__(config, tokenizer)


@register("prime", is_built_in=True)
class PrimeRewardManager(NaiveRewardManager):
    """Grades each sample on its own, many at the same time, and adds the score as "acc".

    Options (`reward_model.reward_kwargs`): `num_processes`, samples to grade at the same time (by
    default the number of cores), and `timeout_s`, seconds for one of them (by default
    `reward_model.timeout_s`).
    """

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
        """Add the score as "acc" if the grader returned no "acc" itself.

        Args:
            outcomes: [B] outcome of each sample.
            samples: the samples.

        Returns:
            [B] outcomes.
        """
        if not self.has_grades:
            return outcomes
        adjusted = []
        for outcome in outcomes:
            if not outcome.error:
                outcome = outcome._replace(extra={"acc": outcome.score, **outcome.extra})
            adjusted.append(outcome)
        return adjusted


def overlong_penalty(
    length: int, max_length: Any, buffer_config: Mapping[str, Any]
) -> tuple[float, dict[str, Any]]:
    """Compute DAPO's soft penalty for an over-long response (`DapoRewardManager`).

    Args:
        length: length of the response in tokens.
        max_length: option `max_resp_len`, in tokens.
        buffer_config: option `overlong_buffer_cfg`.

    Returns:
        The penalty, 0 or negative, and the entries to log, by name.

    Raises:
        ConfigError: an option is wrong.
    """
    problem = next(check_overlong(_WHERE, max_length, buffer_config), None)
    if isinstance(problem, ConfigError):
        raise problem
    options = {**BUFFER_DEFAULTS, **buffer_config}
    if not options["enable"]:
        return 0.0, {}
    buffer_length = options["len"]
    # Tokens beyond `max_length - buffer_length`, where the penalty begins; negative for short
    # responses.
    excess = length - (max_length - buffer_length)
    penalty = min(0.0, -excess / buffer_length * options["penalty_factor"])
    if not options["log"]:
        return penalty, {}
    return penalty, {"overlong_reward": penalty, "overlong": penalty < 0}


@register("dapo", is_built_in=True)
class DapoRewardManager(NaiveRewardManager):
    """Grades each sample on its own, with a soft penalty for over-long responses.

    arXiv:2503.14476, eq. 13. There is no penalty up to `max_resp_len - len` tokens. From there the
    reward falls linearly, by `penalty_factor` at `max_resp_len`. For a response of `length` tokens:

        reward = score + min(0, (max_resp_len - len - length) / len * penalty_factor)

    Options (`reward_model.reward_kwargs`): `max_resp_len`, in tokens, and `overlong_buffer_cfg`
    with `enable`, `len` (tokens), `penalty_factor`, and `log` (whether the penalty is logged, as
    "overlong_reward" and "overlong").
    """

    options = ("overlong_buffer_cfg", "max_resp_len")

    def __init__(self, config: Config, tokenizer: Any) -> None:
        kwargs = config.reward_model.reward_kwargs
        self._max_length = kwargs.get("max_resp_len")
        self._buffer_config = kwargs.get("overlong_buffer_cfg") or {}
        # Called for its error if an option is wrong.
        overlong_penalty(0, self._max_length, self._buffer_config)
        super().__init__(config, tokenizer)

    def shaped(self, outcomes: list[Outcome], samples: Samples) -> list[Outcome]:
        """Add the penalty to the scores, and the score without the penalty as "acc".

        Args:
            outcomes: [B] outcome of each sample.
            samples: the samples, with their lengths.

        Returns:
            [B] outcomes.
        """
        adjusted = []
        for outcome, length in zip(outcomes, samples.lengths.tolist(), strict=True):
            if not outcome.error:
                penalty, entries = overlong_penalty(length, self._max_length, self._buffer_config)
                extra = {}
                # Without a score function there is no accuracy.
                if self.has_grades:
                    extra = {**outcome.extra, "acc": outcome.extra.get("acc", outcome.score)}
                outcome = outcome._replace(score=outcome.score + penalty, extra=extra | entries)
            adjusted.append(outcome)
        return adjusted


@register("in_process", is_built_in=True)
class InProcessRewardManager(SampleManager):
    """Grades in the trainer's process, when the rewards are needed, without a time limit.

    There is a call for each sample, or with `reward_model.reward_kwargs={is_batch: true}` one call
    for the whole batch. Workers in other processes continue meanwhile.
    """

    options = ("is_batch",)

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        custom = config.custom_reward_function
        self._is_batch = bool(self.settings.reward_kwargs.get("is_batch"))
        self.function = ScoreFunction(
            custom.path, custom.name, dict(custom.reward_kwargs), is_batch=self._is_batch
        )
        self._compute_score = self.function.load()
        self._accepted = self.function.accepted_names(self._compute_score)
        if custom.path is not None:
            self.notices = special_token_notice(tokenizer, self._accepted)
            self.reads_rows = ROW in self._accepted

    def begin(self, data: DataProto, outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        # `submit` grades before it returns, so all of it is put off until the result is taken.
        begin = partial(super().begin, data, outcomes)
        return Grading(lambda: begin().result(), lambda: None)

    def submit(self, rows: list[dict[str, Any]], max_failures: int | None = None) -> GradingRound:
        round_ = GradingRound(len(rows), max_failures)
        # The rows of each call. `map` is lazy, so no call is made after the end of the round.
        calls = [rows] if self._is_batch and rows else [[row] for row in rows]
        for key, outcome in enumerate(chain.from_iterable(map(self._grade, calls))):
            round_.record(key, outcome)
            # The round may end early, after too many failures.
            if round_.done.done():
                break
        return round_

    def _grade(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        """Grade rows in one call of the score function; without `is_batch` there is a single row.

        Returns:
            The outcome of each row. An error of the score function is the outcome of all rows.
        """
        sample_arguments = [self.function.arguments_of(row) for row in rows]
        arguments = sample_arguments[0]
        if self._is_batch:
            arguments = self.function.batch_arguments_of(sample_arguments)
        try:
            returned = self._compute_score(**select_arguments(arguments, self._accepted))
            if self._is_batch:
                return read_outcomes(returned, len(rows))
            return [read_outcome(returned)]
        except Exception as error:
            return [error_outcome(error)] * len(rows)
