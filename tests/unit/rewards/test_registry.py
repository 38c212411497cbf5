# SPDX-License-Identifier: Apache-2.0
"""Reward managers by name; every registry here is a fresh one."""

import pytest

from quadriga.config import Config
from quadriga.errors import ConfigError, RewardError
from quadriga.rewards import registry
from quadriga.rewards.registry import (
    BUILT_IN,
    get_reward_manager_cls,
    load_reward_manager,
    register,
)


class Mine:
    pass


class Other:
    pass


@pytest.fixture
def names(monkeypatch):
    """Those that are registered, none at first."""
    names = {}
    monkeypatch.setattr(registry, "_classes", names)
    return names


def test_a_registered_class_is_found(names):
    assert register("mine")(Mine) is Mine
    assert get_reward_manager_cls("mine") is Mine
    register("mine")(Mine)
    assert names == {"mine": Mine}


def test_a_taken_name_is_refused(names):
    register("mine")(Mine)
    with pytest.raises(RewardError, match=r"got Other, .*Mine"):
        register("mine")(Other)
    with pytest.raises(RewardError, match=r"managers\.naive"):
        register("naive")(Other)


def test_an_unknown_name_is_answered_with_those_there_are(names):
    register("mine")(Mine)
    with pytest.raises(
        RewardError,
        match="got yours, expected one of batch, dapo, in_process, judge, mine, naive, prime",
    ):
        get_reward_manager_cls("yours")


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_managers_need_no_import(name):
    assert get_reward_manager_cls(name).__module__ == BUILT_IN[name]


def test_a_class_of_a_file(tmp_path):
    """By its place, without a decorator."""
    file = tmp_path / "managers.py"
    file.write_text("class Mine:\n    def __init__(self, config, tokenizer):\n        pass\n")
    assert get_reward_manager_cls(f"{file}:Mine").__name__ == "Mine"
    with pytest.raises(
        ConfigError, match=r"reward_manager: got no class 'Yours', expected .*\(Mine\)"
    ):
        get_reward_manager_cls(f"{file}:Yours")


def test_a_manager_by_verls_contract_is_told(names):
    """It would take the configuration for its tokenizer."""

    @register("verls")
    class Verls:
        def __init__(self, tokenizer, num_examine, compute_score=None):
            pass

    config = Config.model_validate({"reward_model": {"reward_manager": "verls"}})
    with pytest.raises(
        RewardError,
        match=r"got Verls\(tokenizer, num_examine, .*expected Verls\(config, tokenizer\)",
    ):
        load_reward_manager(config, None)
