# SPDX-License-Identifier: Apache-2.0
"""`algorithm.rollout_correction`: thresholds as they are written, presets, and what is refused."""

from typing import get_args

import pytest
from pydantic import ValidationError

from quadriga.config.algorithm import Preset, RolloutCorrectionConfig


def test_off_by_default() -> None:
    """Nothing is corrected, and no pass is asked for."""
    settings = RolloutCorrectionConfig()
    assert not settings.needs_old_log_probs and settings.rejections == ()


@pytest.mark.parametrize(
    ("threshold", "bounds"),
    [(2.0, (None, 2.0)), ("2.5", (None, 2.5)), ("0.5_5.0", (0.5, 5.0)), (" 0.5 _ 5 ", (0.5, 5.0))],
)
def test_bounds_of_weights(threshold: float | str, bounds: tuple) -> None:
    """One number truncates, two cut off."""
    assert (
        RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=threshold).weight_bounds
        == bounds
    )


@pytest.mark.parametrize(
    ("rules", "threshold", "expected"),
    [
        ("token_k1", "0.5_2.0", (("token", "k1", 0.5, 2.0),)),
        ("seq_mean_k1", 4.0, (("seq_mean", "k1", 0.25, 4.0),)),
        ("seq_sum_k3", 0.1, (("seq_sum", "k3", 0.0, 0.1),)),
        (
            "token_k1, seq_max_k2",
            "0.6_1.6, 3",
            (("token", "k1", 0.6, 1.6), ("seq_max", "k2", 0.0, 3.0)),
        ),
        ("token_k2,seq_mean_k3", 0.5, (("token", "k2", 0.0, 0.5), ("seq_mean", "k3", 0.0, 0.5))),
    ],
)
def test_rules(rules: str, threshold: float | str, expected: tuple) -> None:
    """One threshold for all of them, or one each."""
    assert (
        RolloutCorrectionConfig(rollout_rs=rules, rollout_rs_threshold=threshold).rejections
        == expected
    )


# What each preset stands for: bypass_mode, loss_type, rollout_is, its threshold, rollout_rs, its threshold.
GEO, K3, SUM = ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3", "0.01"), ("seq_sum_k1", "0.5_2.0")
NOTHING = (None, None)
PRESETS = {
    "decoupled_token_is": (False, "ppo_clip", "token", 2.0, *NOTHING),
    "decoupled_seq_is": (False, "ppo_clip", "sequence", 2.0, *NOTHING),
    "decoupled_token_icepop": (False, "ppo_clip", "token", "0.5_5.0", *NOTHING),
    "decoupled_seq_is_rs": (False, "ppo_clip", "sequence", 2.0, *SUM),
    "decoupled_geo_rs": (False, "ppo_clip", None, 2.0, *GEO),
    "decoupled_geo_rs_seq_tis": (False, "ppo_clip", "sequence", 2.0, *GEO),
    "decoupled_geo_rs_token_tis": (False, "ppo_clip", "token", 2.0, *GEO),
    "decoupled_k3_rs": (False, "ppo_clip", None, 2.0, *K3),
    "decoupled_k3_rs_seq_tis": (False, "ppo_clip", "sequence", 2.0, *K3),
    "decoupled_k3_rs_token_tis": (False, "ppo_clip", "token", 2.0, *K3),
    "bypass_ppo_clip": (True, "ppo_clip", None, 2.0, *NOTHING),
    "bypass_ppo_clip_geo_rs": (True, "ppo_clip", None, 2.0, *GEO),
    "bypass_ppo_clip_k3_rs": (True, "ppo_clip", None, 2.0, *K3),
    "bypass_pg_is": (True, "reinforce", "sequence", 2.0, *NOTHING),
    "bypass_pg_token_icepop": (True, "reinforce", "token", "0.5_5.0", *NOTHING),
    "bypass_pg_geo_rs": (True, "reinforce", None, 2.0, *GEO),
    "bypass_pg_geo_rs_seq_tis": (True, "reinforce", "sequence", 2.0, *GEO),
    "bypass_pg_geo_rs_token_tis": (True, "reinforce", "token", 2.0, *GEO),
    "disabled": (False, "ppo_clip", None, 2.0, *NOTHING),
}


@pytest.mark.parametrize("name", get_args(Preset))
def test_presets(name: str) -> None:
    """Each by its fields; no mean over the batch is among them, and only `disabled` does nothing."""
    settings = RolloutCorrectionConfig(preset=name)
    assert PRESETS[name] == (
        settings.bypass_mode,
        settings.loss_type,
        settings.rollout_is,
        settings.rollout_is_threshold,
        settings.rollout_rs,
        settings.rollout_rs_threshold,
    )
    assert not settings.rollout_is_batch_normalize
    assert any((settings.bypass_mode, settings.rollout_is, settings.rollout_rs)) == (
        name != "disabled"
    )


def test_a_key_holds_against_its_preset() -> None:
    """It is given as well, so it is meant."""
    assert len(PRESETS) == len(get_args(Preset))
    assert RolloutCorrectionConfig(
        preset="decoupled_token_is", rollout_is_threshold=5.0
    ).weight_bounds == (None, 5.0)
    assert (
        RolloutCorrectionConfig(preset="decoupled_seq_is", rollout_is="token").rollout_is == "token"
    )


@pytest.mark.parametrize(
    ("earlier", "name"),
    [
        ("token_tis", "decoupled_token_is"),
        ("seq_mis", "decoupled_seq_is_rs"),
        ("geo_mis", "decoupled_geo_rs"),
        ("ppo_is_bypass", "bypass_ppo_clip"),
        ("pure_is", "bypass_pg_is"),
        ("pg_rs", "bypass_pg_geo_rs"),
        ("decoupled_k1_rs_seq_tis", "decoupled_geo_rs_seq_tis"),
        ("bypass_ppo_clip_k1_rs", "bypass_ppo_clip_geo_rs"),
    ],
)
def test_names_of_earlier_times(earlier: str, name: str) -> None:
    """They are met with the name that is nearest, and what it leaves out."""
    with pytest.raises(ValidationError, match=f"now, {name}") as caught:
        RolloutCorrectionConfig(preset=earlier)
    assert ("veto on single tokens" in str(caught.value)) == ("geo_rs" in name)


def test_passes() -> None:
    """The bypass form saves the pass, unless its weights are normalised over the batch."""
    assert RolloutCorrectionConfig(
        rollout_rs="token_k2", rollout_rs_threshold=1.0
    ).needs_old_log_probs
    bypass = {"preset": "bypass_pg_is"}
    assert not RolloutCorrectionConfig(**bypass).needs_old_log_probs
    assert RolloutCorrectionConfig(**bypass, rollout_is_batch_normalize=True).needs_old_log_probs
    assert not RolloutCorrectionConfig(
        preset="bypass_ppo_clip", rollout_is_batch_normalize=True
    ).needs_old_log_probs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0}, "one or more of token_k1"),
        ({"rollout_rs": ",", "rollout_rs_threshold": 1.0}, "one or more of token_k1"),
        ({"rollout_rs": "token_k1"}, "one threshold, or 1"),
        (
            {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "1,2"},
            "one threshold, or 3",
        ),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "only k1 has a lower bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_0.5"}, "two ratios above 0"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "an upper one of at least 1"),
        ({"rollout_is_threshold": 0.0}, "a number above 0"),
        ({"rollout_is_threshold": "5_0.5"}, "a number above 0, or two"),
        ({"rollout_is_threshold": "much"}, "a number above 0, or two"),
        ({"preset": "decoupled"}, "decoupled_token_is"),
        ({"preset": "sequence_k1_rs"}, "decoupled_token_is"),
        ({"preset": 3}, "decoupled_token_is"),
        ({"rollout_is": "answer"}, "token"),
    ],
)
def test_refused(given: dict, expected: str) -> None:
    """With what is understood."""
    with pytest.raises(ValidationError, match=expected):
        RolloutCorrectionConfig(**given)
