# SPDX-License-Identifier: Apache-2.0
"""The naive manager for slow graders, programs above all: as many processes as cores, and "acc" with the score.

Options (`reward_model.reward_kwargs`): `num_processes`, samples graded at the same time (all cores of the machine if it
is not given), and `timeout_s`, seconds for one of them (`reward_model.timeout_s` if it is not given).

A sample that cannot be graded is an error, counted and stored with it, as under every manager; it is never a silent 0.
"""

import os
from typing import Any

from quadriga.config import Config
from quadriga.errors import ConfigError
from quadriga.rewards.managers.naive import NaiveRewardManager
from quadriga.rewards.outcome import Outcome
from quadriga.rewards.registry import register
from quadriga.rewards.samples import Samples

_WHERE = "reward_model.reward_kwargs"


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Grades each sample on its own, many at the same time."""

    options = ("num_processes", "timeout_s")

    def __init__(self, config: Config, tokenizer: Any) -> None:
        kwargs = config.reward_model.reward_kwargs
        num_processes = kwargs.get("num_processes", os.cpu_count() or 1)
        timeout_s = kwargs.get("timeout_s", config.reward_model.timeout_s)
        if not isinstance(num_processes, int) or num_processes < 1:
            raise ConfigError(f"{_WHERE}.num_processes", got=repr(num_processes), expected="a number of at least 1")
        if not isinstance(timeout_s, int | float) or timeout_s <= 0:
            raise ConfigError(f"{_WHERE}.timeout_s", got=repr(timeout_s), expected="seconds above 0")
        settings = config.reward_model.model_copy(update={"num_workers": num_processes, "timeout_s": timeout_s})
        super().__init__(config.model_copy(update={"reward_model": settings}), tokenizer)

    def shaped(self, outcomes: list[Outcome], samples: Samples) -> list[Outcome]:
        """The outcomes, with the score as "acc" where a grader brings no "acc" of its own."""
        graded = [one._replace(extra={"acc": one.score, **one.extra}) if not one.error else one for one in outcomes]
        return graded if self.has_grades else outcomes
