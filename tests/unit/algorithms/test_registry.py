# SPDX-License-Identifier: Apache-2.0
"""Registries: names, nearest names, clashes, users' files, and the seeds' list of estimators."""

from pathlib import Path

import pytest

from quadriga.algorithms.registry import ADVANTAGES, POLICY_LOSSES, AdvantageEstimator, Registry, get_adv_estimator_fn
from quadriga.errors import ConfigError


def estimator(rewards):
    """Not yet known to anyone."""
    return rewards, rewards


def test_register_and_get() -> None:
    """The decorator gives the function back unchanged, and registering it again is no clash."""
    registry = Registry("key")
    assert registry.register("mine")(estimator) is estimator
    assert registry.register("mine")(estimator) is estimator
    assert registry.find("mine") is estimator and list(registry) == ["mine"]


def test_unknown_name() -> None:
    """The key, what there is, and the nearest name."""
    with pytest.raises(ConfigError, match=r"algorithm.adv_estimator: got 'grop', .*grpo.* Did you mean 'grpo'"):
        ADVANTAGES.find("grop")


def test_one_function_per_name() -> None:
    """Taking a name that is taken is an error that names both functions."""
    registry = Registry("key")
    registry.register("mine")(estimator)
    with pytest.raises(ConfigError, match="one function per name"):
        registry.register("mine")(lambda rewards: rewards)


def test_open_signature_is_refused_at_once() -> None:
    """Not when training has begun."""
    with pytest.raises(ConfigError, match=r"\*\*settings"):
        Registry("key").register("mine")(lambda rewards, **settings: rewards)


def test_names_of_the_enum_are_registered() -> None:
    """verl's users write members of it; each works as a name. An estimator need not be a member."""
    assert {member.value for member in AdvantageEstimator} <= set(ADVANTAGES)
    assert get_adv_estimator_fn(AdvantageEstimator.GRPO) is get_adv_estimator_fn("grpo")
    assert "vanilla" in set(POLICY_LOSSES)


def test_function_of_a_file(tmp_path: Path) -> None:
    """A file needs no decorator, may be loaded twice, and its signature is checked."""
    file = tmp_path / "own.py"
    file.write_text(
        "def plain(rewards):\n    return rewards, rewards\n"
        "def unclear(rewards, scale=1):\n    return rewards, rewards\n"
    )
    assert get_adv_estimator_fn(f"{file}:plain")(3) == (3, 3)
    assert get_adv_estimator_fn(f"{file}:plain")(3) == (3, 3)
    with pytest.raises(ConfigError, match="Say which function to take"):
        get_adv_estimator_fn(str(file))
    with pytest.raises(ConfigError, match=r"adv_estimator: got no function 'plane'.*Did you mean 'plain'"):
        get_adv_estimator_fn(f"{file}:plane")
    with pytest.raises(ConfigError, match="'scale' with a default"):
        get_adv_estimator_fn(f"{file}:unclear")
