# SPDX-License-Identifier: Apache-2.0
"""The score function is called in the trainer's own process: for one that cannot travel to others, and for a debugger.

There is no time limit, and nothing grades while training goes on. With `reward_model.reward_kwargs={is_batch: true}`
one call grades all samples, as with the manager `batch`.
"""

from typing import Any

from quadriga.config import Config
from quadriga.rewards.outcome import Outcome, raised, read_outcome, read_outcomes
from quadriga.rewards.pool import Round
from quadriga.rewards.registry import register
from quadriga.rewards.samples import SampleManager
from quadriga.rewards.scoring import ScoreFunction


@register("in_process")
class InProcessRewardManager(SampleManager):
    """Grades each sample, or each batch, before its caller goes on."""

    has_grades = False
    options = ("is_batch",)

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        custom, self._is_batch = config.custom_reward_function, bool(self.settings.reward_kwargs.get("is_batch"))
        function = ScoreFunction(custom.path, custom.name, dict(custom.reward_kwargs), is_batch=self._is_batch)
        self._compute_score = function.load()

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
        """The outcomes of one call of the score function."""
        try:
            if not self._is_batch:
                return [read_outcome(self._compute_score(**rows[0]))]
            lists = {f"{name}s": [row[name] for row in rows] for name in rows[0]}
            return read_outcomes(self._compute_score(**lists), len(rows))
        except Exception as error:
            return [raised(error)] * len(rows)
