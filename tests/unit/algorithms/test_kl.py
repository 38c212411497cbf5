# SPDX-License-Identifier: Apache-2.0
"""KL penalties: values by hand, gradients by hand, controllers, and the penalty inside the reward."""

import math
from types import SimpleNamespace

import pytest
import torch

from quadriga.algorithms.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from quadriga.errors import CheckpointError, ConfigError

REFERENCE = torch.tensor([-1.0, -2.0, -0.5, -30.0], dtype=torch.float64)
DIFFERENCE = torch.tensor([0.5, -0.25, 0.0, 2.0], dtype=torch.float64)

# Of each estimate: its value and its derivative as functions of d = log-prob - reference log-prob.
BY_HAND = {
    "kl": (lambda d: d, lambda d: 1.0),
    "abs": (lambda d: abs(d), lambda d: math.copysign(1.0, d) if d else 0.0),
    "mse": (lambda d: d * d / 2, lambda d: d),
    "low_var_kl": (lambda d: math.exp(-d) + d - 1, lambda d: 1 - math.exp(-d)),
}
SAME_AS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


@pytest.mark.parametrize("kind", KL_PENALTIES)
def test_values_and_gradients(kind: str) -> None:
    """With a `+` the value is that of the kind and the gradient that of k2, which is d."""
    log_prob = (REFERENCE + DIFFERENCE).requires_grad_()
    result = kl_penalty(log_prob, REFERENCE, kind)
    result.sum().backward()
    base = kind.removesuffix("+")
    value, slope = BY_HAND[SAME_AS.get(base, base)]
    slope = BY_HAND["mse"][1] if kind.endswith("+") else slope
    expected = torch.tensor(
        [[value(d), slope(d)] for d in DIFFERENCE.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(torch.stack([result.detach(), log_prob.grad], dim=1), expected)


def test_straight_through_value_is_exact() -> None:
    """Adding a carrier that is 0 must not disturb the value by a bit."""
    log_prob, reference = (
        torch.randn(100, generator=torch.Generator().manual_seed(0)),
        torch.zeros(100),
    )
    assert torch.equal(
        kl_penalty(log_prob, reference, "k3+"), kl_penalty(log_prob, reference, "k3")
    )


def test_low_variance_kl_is_bounded() -> None:
    """A token that the reference likes e^200 times better costs 10, and is finite in its gradient."""
    log_prob = torch.tensor([-200.0], requires_grad=True)
    result = kl_penalty(log_prob, torch.zeros(1), "k3")
    result.backward()
    assert result.item() == 10.0 and bool(torch.isfinite(log_prob.grad).all())


def test_estimates_on_average() -> None:
    """Under samples of the policy k1 and k3 average to the true divergence, and the gradient of k2 to its gradient."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(0)
    log_q = torch.tensor([-0.5, 0.4, 0.1], dtype=torch.float64).log_softmax(0)
    weight = log_p.exp().detach()
    true = (log_p.exp() * (log_p - log_q)).sum()
    for kind in ("k1", "k3"):
        assert (weight * kl_penalty(log_p, log_q, kind)).sum().item() == pytest.approx(
            true.item(), rel=1e-12
        )
    (true_gradient,) = torch.autograd.grad(true, logits, retain_graph=True)
    for kind in ("k2", "k1+", "k3+"):
        (gradient,) = torch.autograd.grad(
            (weight * kl_penalty(log_p, log_q, kind)).sum(), logits, retain_graph=True
        )
        torch.testing.assert_close(gradient, true_gradient)


def test_unknown_kind() -> None:
    """`full` needs all logits, which are never kept."""
    with pytest.raises(ConfigError, match="kl_penalty: got 'full', expected one of kl, k1, abs"):
        kl_penalty(REFERENCE, REFERENCE, "full")


def test_adaptive_controller() -> None:
    """Twice the target is an error of 1, cut to 0.2: x (1 + 0.2 * 50 / 100). Then 10% below: x (1 - 0.1 * 0.5)."""
    controller = AdaptiveKLController(init_kl_coef=1.0, target_kl=0.1, horizon=100)
    controller.update(current_kl=0.2, n_steps=50)
    assert controller.value == pytest.approx(1.1)
    controller.update(current_kl=0.09, n_steps=50)
    assert controller.value == pytest.approx(1.1 * 0.95)


def test_controllers_continue_from_a_state() -> None:
    """The moved coefficient survives; a fixed one is the configuration's; the kinds do not mix."""
    moved = AdaptiveKLController(1.0, 0.1, 100)
    moved.update(0.2, 50)
    fresh = AdaptiveKLController(1.0, 0.1, 100)
    fresh.load_state_dict(moved.state_dict())
    assert fresh.value == moved.value
    fixed = FixedKLController(0.5)
    fixed.update(9.0, 9)
    fixed.load_state_dict(FixedKLController(0.1).state_dict())
    assert fixed.value == 0.5
    with pytest.raises(CheckpointError, match="got the state of type 'adaptive'"):
        fixed.load_state_dict(moved.state_dict())


def test_controller_of_the_configuration() -> None:
    """By type; a horizon of 0 is refused before it divides anything."""
    keys = {"kl_coef": 0.3, "horizon": 100, "target_kl": 0.1}
    assert isinstance(get_kl_controller(SimpleNamespace(type="fixed", **keys)), FixedKLController)
    assert get_kl_controller(SimpleNamespace(type="adaptive", **keys)).value == 0.3
    with pytest.raises(ConfigError, match=r"algorithm\.kl_ctrl\.horizon: got 0"):
        get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.3, horizon=0, target_kl=0.1))
    with pytest.raises(ConfigError, match=r"algorithm\.kl_ctrl\.type"):
        get_kl_controller(SimpleNamespace(type="constant", **keys))


def test_penalty_in_the_reward() -> None:
    """By hand: means per sequence 0.3, 0.1 and, of the empty one, 0; coefficient 2 as it was before the update."""
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    old = torch.tensor([[0.2, 0.4], [0.1, 9.0], [9.0, 9.0]])
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    controller = AdaptiveKLController(2.0, target_kl=0.1, horizon=10)
    rewards, metrics = apply_kl_penalty(scores, old, torch.zeros(3, 2), mask, controller, "kl")
    torch.testing.assert_close(rewards, torch.tensor([[-0.4, 0.2], [0.8, 0.0], [0.0, 0.0]]))
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx(0.4 / 3),
        "actor/reward_kl_penalty_coeff": 2.0,
    }
    assert controller.value == pytest.approx(2.0 * (1 + 0.2 * 3 / 10))
