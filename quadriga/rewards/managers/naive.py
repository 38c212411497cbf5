# SPDX-License-Identifier: Apache-2.0
"""One call of the score function a sample, in a pool of processes, with a time limit each."""

from collections.abc import Sequence
from typing import Any

from quadriga.config import Config
from quadriga.protocol import DataProto
from quadriga.rewards.outcome import Outcome
from quadriga.rewards.pool import GradingPool, Round
from quadriga.rewards.registry import Grading, register
from quadriga.rewards.samples import SampleManager
from quadriga.rewards.scoring import WITHOUT_TRUTH, ScoreFunction, grader_name

NO_GRADE = Outcome(0.0, {}, "", "graded")
"""Of a sample that a reward model alone grades."""


@register("naive")
class NaiveRewardManager(SampleManager):
    """Grades each sample on its own.

    A user's score function is loaded at construction, so that a mistake in its file shows before a model is.
    """

    grades_early = True

    is_batch: bool = False
    """Whether one call of the score function grades all samples."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        custom = config.custom_reward_function
        self.function = ScoreFunction(custom.path, custom.name, dict(custom.reward_kwargs), is_batch=self.is_batch)
        # With a reward model and no function of the user's the model alone grades: the scores here are zero, but for
        # what a manager adds to them.
        self.has_grades = self.needs_truths = custom.path is not None or not self.settings.enable
        self._pool = GradingPool(self.function, num_workers=1 if self.is_batch else self.settings.num_workers)
        if self.function.path is not None:
            self._pool.start()

    def check_rows(self, rows: Sequence[tuple[str, Any, Any]]) -> None:
        if self.function.path is None and self.has_grades:
            for data_source, place in {source: place for place, source, _ in reversed(rows)}.items():
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
        for data_source in {row["data_source"]: None for row in rows} if self.function.path is None else ():
            grader_name(data_source)
        return self._pool.begin(rows, timeout_s=self.settings.timeout_s, max_failures=max_failures)

    def close(self) -> None:
        self._pool.close()
