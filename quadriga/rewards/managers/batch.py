# SPDX-License-Identifier: Apache-2.0
"""One call of the score function for the whole batch, for functions that are quicker on many samples at once.

The function is called with the lists `data_sources, solution_strs, ground_truths, extra_infos` and returns a list
of scores or dicts. It runs in one process of its own; its time limit is `reward_model.timeout_s` for each sample of
the batch together.
"""

from contextlib import AbstractContextManager
from typing import Any

from quadriga.config import Config
from quadriga.errors import ConfigError
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto
from quadriga.rewards.base import Grading, RewardOutput
from quadriga.rewards.collect import collect
from quadriga.rewards.custom import ScoreFunction
from quadriga.rewards.managers.naive import check_options
from quadriga.rewards.outcome import Outcome
from quadriga.rewards.registry import register
from quadriga.rewards.samples import Samples, read_samples
from quadriga.rewards.sandbox import GradingPool


@register("batch")
class BatchRewardManager:
    """Grades all samples of a batch in one call of the user's function.

    Args:
        config: the run's; read are `reward_model`, `custom_reward_function`, `data.reward_fn_key`.
        tokenizer: decodes the responses; anything with `batch_decode`.
    """

    has_grades = True

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.settings = config.reward_model
        check_options(self.settings.reward_manager, self.settings.reward_kwargs, ())
        custom = config.custom_reward_function
        if custom.path is None:
            raise ConfigError(
                "custom_reward_function.path",
                got="null",
                expected="a file with a function that grades lists, since reward_model.reward_manager=batch",
                fix="Set it, or use reward_model.reward_manager=naive.",
            )
        self.function = ScoreFunction(custom.path, custom.name, dict(custom.reward_kwargs), is_batch=True)
        self._tokenizer = tokenizer
        self._reward_fn_key = config.data.reward_fn_key
        self._pool = GradingPool(self.function, num_workers=1)
        self._pool.start()

    def __call__(self, data: DataProto) -> RewardOutput:
        """Grade a batch, see `RewardManager`."""
        samples = read_samples(data, self._tokenizer, self._reward_fn_key)
        return collect(samples, self._graded(samples), self.settings.max_error_rate)

    def start_grading(self, data: DataProto) -> Grading:
        """See `MeanwhileRewardManager.start_grading`."""
        samples = read_samples(data, self._tokenizer, self._reward_fn_key)
        begun = self._pool.begin(self._calls(samples), timeout_s=self._limit_s(samples))

        def result() -> RewardOutput:
            with self._telling(samples):
                replies = begun.result()
            return collect(samples, self._of_samples(samples, replies), self.settings.max_error_rate)

        return Grading(result, begun.cancel)

    def close(self) -> None:
        """End the grading process."""
        self._pool.close()

    def _graded(self, samples: Samples) -> list[Outcome]:
        with self._telling(samples):
            replies = self._pool.grade(self._calls(samples), timeout_s=self._limit_s(samples))
        return self._of_samples(samples, replies)

    def _calls(self, samples: Samples) -> list[dict[str, Any]]:
        """The arguments of the one call; none for an empty batch."""
        rows = samples.rows
        return [{f"{name}s": [row[name] for row in rows] for name in rows[0]}] if rows else []

    def _limit_s(self, samples: Samples) -> float:
        return self.settings.timeout_s * len(samples.rows)

    def _telling(self, samples: Samples) -> AbstractContextManager[None]:
        return waiting(f"the rewards of a batch of {len(samples.rows)} samples", detail=self._pool.progress)

    def _of_samples(self, samples: Samples, replies: list[Any]) -> list[Outcome]:
        if not replies:
            return []
        (reply,) = replies
        # A call that hung or crashed its process has one outcome, which is that of every sample.
        return [reply] * len(samples.rows) if isinstance(reply, Outcome) else reply
