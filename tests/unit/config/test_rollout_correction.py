# SPDX-License-Identifier: Apache-2.0
"""`algorithm.rollout_correction`: thresholds as they are written, presets, and what is refused."""

from typing import get_args

import pytest
from pydantic import ValidationError

from quadriga.config.rollout_correction import Preset, RolloutCorrectionConfig


def test_off_by_default() -> None:
    """Nothing is corrected, and no pass is asked for."""
    settings = RolloutCorrectionConfig()
    assert not settings.is_active and not settings.needs_old_log_probs and settings.rejections == ()


@pytest.mark.parametrize(
    ("threshold", "bounds"),
    [(2.0, (None, 2.0)), ("2.5", (None, 2.5)), ("0.5_5.0", (0.5, 5.0)), (" 0.5 _ 5 ", (0.5, 5.0))],
)
def test_bounds_of_weights(threshold: float | str, bounds: tuple) -> None:
    """One number truncates, two cut off."""
    assert RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=threshold).weight_bounds == bounds


@pytest.mark.parametrize(
    ("rules", "threshold", "expected"),
    [
        ("token_k1", "0.5_2.0", (("token", "k1", 0.5, 2.0),)),
        ("seq_mean_k1", 4.0, (("seq_mean", "k1", 0.25, 4.0),)),
        ("seq_sum_k3", 0.1, (("seq_sum", "k3", 0.0, 0.1),)),
        ("token_k1, seq_max_k2", "0.6_1.6, 3", (("token", "k1", 0.6, 1.6), ("seq_max", "k2", 0.0, 3.0))),
        ("token_k2,seq_mean_k3", 0.5, (("token", "k2", 0.0, 0.5), ("seq_mean", "k3", 0.0, 0.5))),
    ],
)
def test_rules(rules: str, threshold: float | str, expected: tuple) -> None:
    """One threshold for all of them, or one each."""
    assert RolloutCorrectionConfig(rollout_rs=rules, rollout_rs_threshold=threshold).rejections == expected


def test_presets() -> None:
    """Each can be read; a key that is given holds against its preset; they are what they are called."""
    for name in get_args(Preset):
        settings = RolloutCorrectionConfig(preset=name)
        assert settings.bypass_mode == name.startswith("bypass")
        assert (settings.loss_type == "reinforce") == name.startswith("bypass_pg")
        assert bool(settings.rejections) == ("_rs" in name)
        assert (settings.weight_bounds[0] is not None) == ("icepop" in name)
        assert settings.is_active == (name != "disabled")
    assert RolloutCorrectionConfig(preset="decoupled_token_is", rollout_is_threshold=5.0).weight_bounds == (None, 5.0)
    assert RolloutCorrectionConfig(preset="decoupled_seq_is", rollout_is="token").rollout_is == "token"


def test_passes() -> None:
    """The bypass form saves the pass, unless its weights are normalised over the batch."""
    assert RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=1.0).needs_old_log_probs
    bypass = {"preset": "bypass_pg_is"}
    assert not RolloutCorrectionConfig(**bypass).needs_old_log_probs
    assert RolloutCorrectionConfig(**bypass, rollout_is_batch_normalize=True).needs_old_log_probs
    assert not RolloutCorrectionConfig(preset="bypass_ppo_clip", rollout_is_batch_normalize=True).needs_old_log_probs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0}, "one or more of token_k1"),
        ({"rollout_rs": ",", "rollout_rs_threshold": 1.0}, "one or more of token_k1"),
        ({"rollout_rs": "token_k1"}, "one threshold, or 1"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "1,2"}, "one threshold, or 3"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "only k1 has a lower bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_0.5"}, "two ratios above 0"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "an upper one of at least 1"),
        ({"rollout_is_threshold": 0.0}, "a number above 0"),
        ({"rollout_is_threshold": "5_0.5"}, "a number above 0, or two"),
        ({"rollout_is_threshold": "much"}, "a number above 0, or two"),
        ({"preset": "decoupled"}, "decoupled_token_is"),
        ({"rollout_is": "answer"}, "token"),
    ],
)
def test_refused(given: dict, expected: str) -> None:
    """With what is understood."""
    with pytest.raises(ValidationError, match=expected):
        RolloutCorrectionConfig(**given)
