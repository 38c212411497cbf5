# SPDX-License-Identifier: Apache-2.0
"""One call of the score function for the whole batch, for functions that are quicker on many samples at once.

The function is called with the lists `data_sources, solution_strs, ground_truths, extra_infos` and returns a list
of scores or dicts. It runs in one process of its own; its time limit is `reward_model.timeout_s` for each sample of
the batch together.
"""

from typing import Any

from quadriga.config import Config
from quadriga.errors import ConfigError
from quadriga.rewards.managers.naive import NaiveRewardManager
from quadriga.rewards.registry import register


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Grades all samples of a batch in one call of the user's function."""

    grades_early = False
    is_batch = True

    def __init__(self, config: Config, tokenizer: Any) -> None:
        if config.custom_reward_function.path is None:
            expected = "a file with a function that grades lists, since reward_model.reward_manager=batch"
            fix = "Set it, or use reward_model.reward_manager=naive."
            raise ConfigError("custom_reward_function.path", got="null", expected=expected, fix=fix)
        super().__init__(config, tokenizer)
