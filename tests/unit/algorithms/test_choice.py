# SPDX-License-Identifier: Apache-2.0
"""What is found out about a chosen algorithm before anything runs: names, options, fields, columns."""

from pathlib import Path

import pytest
import torch

from quadriga.algorithms.registry import (
    BATCH_COLUMNS,
    POLICY_LOSSES,
    bind_options,
    choose_estimator,
    choose_policy_loss,
)
from quadriga.errors import ConfigError

ACTOR = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "entropy_coeff": 0.0}


def test_options_go_where_they_belong() -> None:
    """Those of the loss's column are the loss's own in the configuration."""
    loss = choose_policy_loss("clip_cov", {"clip_cov_lb": 0.1, "clip_cov_ratio": 1.0}, ACTOR)
    assert set(loss.columns) == {"covariance_clipped"}
    assert loss.column_fields == {"old_log_prob", "advantages", "response_mask"}
    values = torch.tensor([[-1.0, -3.0]])
    columns = loss.compute_columns({"old_log_prob": values, "advantages": values, "response_mask": torch.ones(1, 2)})
    assert columns["covariance_clipped"].tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("gpso", {}, r"policy_loss.loss_mode: got 'gpso'.* Did you mean 'gspo'"),
        ("sapo", {"tau_poss": 1.0}, r"policy_loss \(sapo\): got the option 'tau_poss', .*Did you mean 'tau_pos'"),
        ("vanilla", {"tau_pos": 1.0}, r"policy_loss \(vanilla\): got the option 'tau_pos', expected one of clip_ratio"),
        ("gpg", {"tau_pos": 1.0}, "this algorithm has none"),
        ("clip_cov", {"clip_cov_up": 1.0}, "Did you mean 'clip_cov_ub'"),
    ],
)
def test_bad_choices_of_a_loss(name: str, given: dict, message: str) -> None:
    """Each with the nearest name, where there is one."""
    with pytest.raises(ConfigError, match=message):
        choose_policy_loss(name, given, ACTOR)


def test_bad_choices_of_an_estimator() -> None:
    """The same; an option without a default must be given."""
    with pytest.raises(ConfigError, match=r"adv_estimator: got 'gropo'.*'grpo'"):
        choose_estimator("gropo", {}, {})
    with pytest.raises(ConfigError, match=r"adv_options \(gpg\): got the option 'f_nrom', .*'f_norm'"):
        choose_estimator("gpg", {"f_nrom": 1}, {})
    with pytest.raises(ConfigError, match="no value for the option 'gdpo_reward_keys'"):
        choose_estimator("gdpo", {}, {})


def test_given_goes_before_shared() -> None:
    """The section's setting is a default for the option."""
    estimator = choose_estimator("grpo", {"epsilon": 0.0}, {"norm_adv_by_std_in_grpo": False, "gamma": 1.0})
    advantages, _ = estimator.function(torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), ["a", "a"])
    assert advantages.tolist() == [[0.5], [-0.5]]


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    """From a file, with options of its own; nothing is known of rows without an advantage, so all are computed."""
    file = tmp_path / "mine.py"
    file.write_text("def mine(log_prob, advantages, *, scale=1.0):\n    return -scale * advantages * log_prob, {}\n")
    loss = choose_policy_loss(f"{file}:mine", {"scale": 2.0}, ACTOR)
    assert loss.fields == ("log_prob", "advantages") and not loss.needs_advantage
    assert loss.function(torch.ones(1), torch.ones(1))[0].item() == -2
    with pytest.raises(ConfigError, match="'scale'"):
        choose_policy_loss(f"{file}:mine", {"sacle": 2.0}, ACTOR)


@pytest.mark.parametrize("name", list(BATCH_COLUMNS))
def test_columns_of_the_batch(name: str) -> None:
    """0 outside the mask, whatever stands there; finite where nothing differs; the inputs are left alone."""
    column = bind_options(BATCH_COLUMNS[name])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    values = torch.tensor([[-1.0, -2.0, float("nan")], [float("nan")] * 3])
    for gains in (values, values * 0 - 1):
        marks = column(values.clone(), gains, mask)
        assert marks.shape == mask.shape and not marks[~mask.bool()].any() and torch.isfinite(marks).all()


def test_traits() -> None:
    """A loss whose penalty does not ask for an advantage must see every row."""
    assert {name for name in POLICY_LOSSES if not choose_policy_loss(name, {}, ACTOR).needs_advantage} == {
        "dro",
        "kl_cov",
    }
