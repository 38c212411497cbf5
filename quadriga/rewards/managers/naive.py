# SPDX-License-Identifier: Apache-2.0
"""One call of the score function a sample, in a pool of processes, with a time limit each."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from quadriga.config import Config
from quadriga.errors import ConfigError
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto
from quadriga.rewards.base import Grading, RewardOutput
from quadriga.rewards.collect import allowed_failures, collect
from quadriga.rewards.custom import ScoreFunction
from quadriga.rewards.early import SingleGrader
from quadriga.rewards.outcome import Outcome
from quadriga.rewards.registry import register
from quadriga.rewards.samples import Samples, read_samples
from quadriga.rewards.sandbox import GradingPool
from quadriga.rewards.scoring import grader_name

NO_GRADE = Outcome(0.0, {}, "", "graded")
"""Of a sample that a reward model alone grades."""


@register("naive")
class NaiveRewardManager:
    """Grades each sample on its own.

    A user's score function is loaded at construction, so that a mistake in its file shows before a model is.

    Args:
        config: the run's; read are `reward_model`, `custom_reward_function`, `data.reward_fn_key`.
        tokenizer: decodes the responses; anything with `batch_decode`.
    """

    options: tuple[str, ...] = ()
    """Names that `reward_model.reward_kwargs` may hold."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.settings = config.reward_model
        check_options(self.settings.reward_manager, self.settings.reward_kwargs, self.options)
        custom = config.custom_reward_function
        self.function = ScoreFunction(custom.path, custom.name, dict(custom.reward_kwargs))
        # With a reward model and no function of the user's the model alone grades: the scores here are zero, but for
        # what a manager adds to them.
        self.has_grades = custom.path is not None or not self.settings.enable
        self._tokenizer = tokenizer
        self._reward_fn_key = config.data.reward_fn_key
        self._pool = GradingPool(self.function, num_workers=self.settings.num_workers)
        self._single = SingleGrader(
            self.function, num_workers=self.settings.num_workers, timeout_s=self.settings.timeout_s
        )
        if self.function.path is not None:
            self._pool.start()

    def __call__(self, data: DataProto) -> RewardOutput:
        """Grade a batch, see `RewardManager`."""
        samples = read_samples(data, self._tokenizer, self._reward_fn_key, needs_truths=self.has_grades)
        return self._collect(samples, self._graded(samples))

    def start_grading(self, data: DataProto) -> Grading:
        """See `MeanwhileRewardManager.start_grading`."""
        assert self.has_grades, "where a model alone grades, nothing is begun here"
        samples = read_samples(data, self._tokenizer, self._reward_fn_key)
        self._require_graders(samples)
        begun = self._pool.begin(samples.rows, **self._limits(samples))

        def result() -> RewardOutput:
            with self._telling(samples):
                outcomes = begun.result()
            return self._collect(samples, outcomes)

        return Grading(result, begun.cancel)

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        """See `EarlyRewardManager.grade_one`."""
        if not self.has_grades:
            return NO_GRADE
        if self.function.path is None:
            grader_name(row["data_source"])
        return await self._single.grade(row)

    def collect_graded(self, data: DataProto, outcomes: Sequence[Outcome]) -> RewardOutput:
        """See `EarlyRewardManager.collect_graded`."""
        samples = read_samples(data, self._tokenizer, self._reward_fn_key, needs_truths=self.has_grades)
        return self._collect(samples, list(outcomes))

    def _collect(self, samples: Samples, outcomes: list[Outcome]) -> RewardOutput:
        return collect(samples, self.shaped(outcomes, samples), self.settings.max_error_rate)

    def shaped(self, outcomes: list[Outcome], samples: Samples) -> list[Outcome]:
        """The outcomes with what this manager adds to the grades; here nothing."""
        return outcomes

    def close(self) -> None:
        """End the grading processes."""
        self._pool.close()
        self._single.close()

    def _graded(self, samples: Samples) -> list[Outcome]:
        if not self.has_grades:
            return [NO_GRADE] * len(samples.rows)
        self._require_graders(samples)
        with self._telling(samples):
            return self._pool.grade(samples.rows, **self._limits(samples))

    def _telling(self, samples: Samples) -> AbstractContextManager[None]:
        return waiting(f"the rewards of {len(samples.rows)} samples", detail=self._pool.progress)

    def _require_graders(self, samples: Samples) -> None:
        if self.function.path is None:
            for data_source in dict.fromkeys(row["data_source"] for row in samples.rows):
                grader_name(data_source)

    def _limits(self, samples: Samples) -> dict[str, Any]:
        """Of the whole batch."""
        num_allowed = allowed_failures(len(samples.rows), self.settings.max_error_rate)
        return {"timeout_s": self.settings.timeout_s, "max_failures": num_allowed}


def check_options(manager: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raise ConfigError if `reward_model.reward_kwargs` holds what the manager does not know."""
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(
            "reward_model.reward_kwargs",
            got=", ".join(unknown),
            expected=f"options of the reward manager {manager} ({', '.join(known) or 'it has none'})",
            fix="Arguments of your own score function belong to custom_reward_function.reward_kwargs.",
        )
