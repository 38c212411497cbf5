# SPDX-License-Identifier: Apache-2.0
"""What options of losses change, and values of them that are refused."""

import math
from dataclasses import dataclass

import pytest
import torch

from quadriga.algorithms.losses import bypass_mode, dppo_tv, dro, geo_mean, gspo, sapo
from quadriga.errors import ConfigError

ONE = torch.ones(1, 1, dtype=torch.float64)


@dataclass(frozen=True)
class Settings:
    """As the configuration gives them."""

    loss_type: str
    rollout_is: str | None
    rejections: tuple
    weight_bounds: tuple[float | None, float] = (None, 4.0)
    bypass_mode: bool = True
    rollout_is_batch_normalize: bool = False


CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}


@pytest.mark.parametrize(
    ("loss", "options", "key"),
    [
        (sapo, {"tau_pos": 0.0}, "tau_pos"),
        (sapo, {"tau_neg": -1.0}, "tau_neg"),
        (dro, {"dro_beta": 0.0}, "dro_beta"),
    ],
)
def test_refused(loss, options: dict[str, float], key: str) -> None:
    """The key is named as it is written."""
    with pytest.raises(ConfigError, match=rf"policy_loss.{key}: got .*, expected a number above 0"):
        loss(ONE, ONE, ONE, ONE, **options)


def test_cap_of_dppo() -> None:
    """A ratio of 8 counts as 2: a bad token that became likelier is never outside the region."""
    losses, told = dppo_tv(
        math.log(0.1) * ONE, math.log(0.8) * ONE, -ONE, ONE, clip_ratio_c=2.0, **CLIPS
    )
    assert (
        losses.item() == pytest.approx(2 * math.log(0.8)) and told["pg_clipfrac_lower"].item() == 1
    )


def test_cut_of_gspo() -> None:
    """Ratios of e^30 and e^-22 have a mean of e^4, which counts as it is; one of e^30 alone is cut to e^10."""
    new, old = torch.tensor([[30.0, -22.0], [30.0, 0.0]]), torch.zeros(2, 2)
    losses, _ = gspo(old, new, -torch.ones(2, 2), torch.tensor([[1, 1], [1, 0]]), **CLIPS)
    assert losses[:, 0].log().tolist() == pytest.approx([4, 10])


@pytest.mark.parametrize("loss", [gspo, geo_mean])
def test_gradient_is_that_of_the_answers_objective(loss) -> None:
    """With one advantage for an answer, d/d log p_t of -A s with s the geometric mean, averaged over T tokens: -A s /
    T.

    Autograd of the sequence's own objective, written as one number, gives the same.
    """
    old = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    new = (old + torch.tensor([[0.1, -0.05, 0.02]])).requires_grad_()
    mask, gain = torch.ones(1, 3), torch.full((1, 3), 1.5, dtype=torch.float64)
    loss(old, new, gain, mask, clip_ratio_low=0.4, clip_ratio_high=0.4)[0].mean().backward()
    ours = new.grad.clone()
    new.grad = None
    (-1.5 * (new - old).mean().exp()).backward()
    torch.testing.assert_close(ours, new.grad)


def test_reinforce_is_weighted_and_rejects() -> None:
    """Ratios over the rollout 2, 8 and 0.5; weights truncated at 4: 2, 4, 0.5; k1 within [1/4, 4] rejects the second.

    Losses -w A log p with A = 1 and p = 0.5, 0.8 and 0.25: -2 log 0.5, nothing, -0.5 log 0.25.
    """
    rollout = torch.tensor([[0.25, 0.1, 0.5]], dtype=torch.float64).log()
    log_prob = torch.tensor([[0.5, 0.8, 0.25]], dtype=torch.float64).log().requires_grad_()
    losses, told = bypass_mode(
        rollout,
        log_prob,
        torch.ones(1, 3),
        torch.ones(1, 3),
        **CLIPS,
        clip_ratio_c=3.0,
        correction=Settings("reinforce", "token", rejections=(("token", "k1", 0.25, 4.0),)),
    )
    losses.sum().backward()
    assert losses.tolist() == [pytest.approx([-2 * math.log(0.5), 0, -0.5 * math.log(0.25)])]
    assert log_prob.grad.tolist() == [pytest.approx([-2, 0, -0.5])]
    assert told["rollout_is_mean"].tolist() == [pytest.approx([2, 4, 0.5])]
    assert told["rollout_rs_masked_fraction"].tolist() == [[0, 1, 0]]
    assert told["rollout_kl"].tolist() == [pytest.approx([-math.log(2), -math.log(8), math.log(2)])]


def test_ppo_clip_rejects_too() -> None:
    """The clipped loss at ratio 1 is -A; a rejected answer adds nothing."""
    rollout = torch.tensor([[-1.0, -1.0], [-1.0, -2.0]])
    log_prob = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    losses, _ = bypass_mode(
        rollout, log_prob, torch.ones(2, 2), torch.ones(2, 2), **CLIPS, clip_ratio_c=3.0,
        correction=Settings("ppo_clip", None, rejections=(("seq_mean", "k3", 0.0, 0.1),)),
    )  # fmt: skip
    assert losses.tolist() == [[-1, -1], [0, 0]]
