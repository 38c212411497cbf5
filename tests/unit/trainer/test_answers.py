# SPDX-License-Identifier: Apache-2.0
"""Which reward managers grade while a step goes on."""

import logging

import pytest

from quadriga.config import Config
from quadriga.protocol import DataProto
from quadriga.rewards import Grading, RewardOutput
from quadriga.trainer.answers import meanwhile_manager
from quadriga.trainer.model_reward import ModelReward

ON = {"reward_model": {"launch_reward_fn_async": True}}


class Waits:
    """A manager of a user's, as the protocol of all managers asks for it."""

    def __call__(self, data: DataProto) -> RewardOutput:
        raise AssertionError("nothing is graded in these tests")

    def close(self) -> None:
        return


class GoesOn(Waits):
    """One whose graders work elsewhere."""

    def __init__(self, has_grades: bool = True) -> None:
        self.has_grades = has_grades

    def start_grading(self, data: DataProto) -> Grading:
        raise AssertionError("nothing is graded in these tests")


def test_it_is_asked_for_and_the_manager_can() -> None:
    manager = GoesOn()
    assert meanwhile_manager(manager, Config(**ON)) is manager
    assert meanwhile_manager(manager, Config()) is None
    filtered = Config(**ON, algorithm={"filter_groups": {"enable": True, "metric": "score"}})
    assert meanwhile_manager(manager, filtered) is None


@pytest.mark.parametrize(
    ("manager", "is_possible"),
    [
        (Waits(), False),
        (GoesOn(has_grades=False), False),
        (ModelReward(None, Waits()), False),
        (ModelReward(None, GoesOn(has_grades=False)), False),
        (ModelReward(None, GoesOn()), True),
    ],
)
def test_the_manager_is_asked(manager: Waits, is_possible: bool, caplog: pytest.LogCaptureFixture) -> None:
    """By what it has, never by its name; a step that waits all the same says why."""
    config = Config(reward_model={"launch_reward_fn_async": True, "enable": isinstance(manager, ModelReward)})
    with caplog.at_level(logging.WARNING):
        assert (meanwhile_manager(manager, config) is manager) == is_possible
    assert ("no graders that work meanwhile" in caplog.text) != is_possible
    is_model = isinstance(manager, ModelReward) and not is_possible
    assert ("the reward model is called by the driver" in caplog.text) == is_model
