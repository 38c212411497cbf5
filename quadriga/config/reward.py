# SPDX-License-Identifier: Apache-2.0
"""`reward_model` and `custom_reward_function`: who grades the responses."""

from typing import Any

from pydantic import Field

from quadriga.config.base import Count, Name, PathText, PositiveFloat, Section, Share


class RewardModelConfig(Section):
    """The reward manager (the section has verl's name; a model that grades is not part of it)."""

    reward_manager: Name = "naive"
    """Name of a registered reward manager."""
    num_workers: Count = 2
    """Processes that grade."""
    timeout_s: PositiveFloat = 10.0
    """Seconds that grading one response may take; then it is stopped and counted as an error."""
    max_error_rate: Share = 0.5
    """Share of a batch whose grading raised or ran out of time above which the run stops, in [0, 1]."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: options of the reward manager."""


class CustomRewardFunctionConfig(Section):
    """A reward function of your own, loaded from a file."""

    path: PathText | None = None
    """Python file that holds the function. null: the built-in grader of the row's data source."""
    name: Name = "compute_score"
    """Name of the function in that file: `f(data_source, solution_str, ground_truth, extra_info=None)`."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: further keyword arguments for the function."""
