# SPDX-License-Identifier: Apache-2.0
"""Reward managers by name; every registry here is a fresh one."""

import pytest

from quadriga.errors import RewardError
from quadriga.rewards.registry import BUILT_IN, RewardManagerRegistry, get_reward_manager_cls


class Mine:
    pass


class Other:
    pass


def test_a_registered_class_is_found():
    registry = RewardManagerRegistry()
    assert registry.register("mine")(Mine) is Mine
    assert registry.get("mine") is Mine
    registry.register("mine")(Mine)


def test_a_taken_name_is_refused():
    registry = RewardManagerRegistry({"naive": "quadriga.rewards.managers.naive"})
    registry.register("mine")(Mine)
    with pytest.raises(RewardError, match=r"got Other, expected a free name, it is .*Mine's"):
        registry.register("mine")(Other)
    with pytest.raises(RewardError, match=r"managers\.naive's"):
        registry.register("naive")(Other)


def test_an_unknown_name_is_answered_with_those_there_are():
    registry = RewardManagerRegistry()
    registry.register("mine")(Mine)
    with pytest.raises(RewardError, match="got yours, expected one of mine"):
        registry.get("yours")


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_managers_need_no_import(name):
    assert get_reward_manager_cls(name).__module__ == f"quadriga.rewards.managers.{name}"
