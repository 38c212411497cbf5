# SPDX-License-Identifier: Apache-2.0
"""KL divergence of the policy from the reference, per token, and the coefficient of its penalty in the reward.

Each kind estimates KL(policy || reference) from the sampled tokens alone; d = log-prob - reference log-prob:

    kl, k1           d                      unbiased, may be negative
    abs              |d|
    mse, k2          d^2 / 2                its gradient is unbiased
    low_var_kl, k3   exp(-d) + d - 1        never negative; its value is unbiased, its gradient is not

A `+` behind a kind (`k3+`) takes its value and the gradient of k2 (straight-through), the one that is unbiased.
From John Schulman, "Approximating KL Divergence" (2020), joschu.net/blog/kl-approx.html; on the gradients,
arXiv:2506.09477.

Shapes: B sequences, T response positions.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from quadriga.algorithms.masked import MAX_LOG_RATIO, masked_mean
from quadriga.errors import CheckpointError, ConfigError, did_you_mean

MAX_LOW_VARIANCE_KL = 10.0
PENALTY_FIELDS = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")


def _low_variance(difference: Tensor) -> Tensor:
    log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1).clamp(-MAX_LOW_VARIANCE_KL, MAX_LOW_VARIANCE_KL)


def _half_square(difference: Tensor) -> Tensor:
    return difference.square() / 2


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda difference: difference,
    "k1": lambda difference: difference,
    "abs": lambda difference: difference.abs(),
    "mse": _half_square,
    "k2": _half_square,
    "low_var_kl": _low_variance,
    "k3": _low_variance,
}
KL_PENALTIES = (*_ESTIMATES, *(f"{kind}+" for kind in _ESTIMATES))


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """The estimated divergence of each token.
    Returns one value per token, of the given shape. Raises ConfigError: an unknown kind.
    `logprob`: log-probabilities under the policy, any shape.
    `ref_logprob`: the same tokens under the reference, the same shape.
    `kl_penalty`: one of KL_PENALTIES."""
    kind = kl_penalty
    if kind not in KL_PENALTIES:
        expected = f"one of {', '.join(_ESTIMATES)}, each also with a +"
        raise ConfigError(
            "kl_penalty", got=repr(kind), expected=expected, fix=did_you_mean(kind, KL_PENALTIES)
        )
    difference = logprob - ref_logprob
    value = _ESTIMATES[kind.removesuffix("+")](difference)
    if not kind.endswith("+"):
        return value
    carrier = _half_square(difference)
    return value.detach() + (carrier - carrier.detach())


class KLController:
    """Holds the coefficient of a KL penalty, in reward per nat; this one keeps it fixed."""

    kind = "fixed"

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient to the mean divergence just measured over `n_steps` sequences."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; a fixed coefficient is the configuration's."""
        return {"type": self.kind}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a state of another kind of controller is an error."""
        if state.get("type") != self.kind:
            got = f"the state of type {state.get('type')!r}"
            fix = "Resume with the algorithm.kl_ctrl.type that the checkpoint was written with."
            raise CheckpointError("KL controller", got=got, expected=repr(self.kind), fix=fix)


FixedKLController = KLController


class AdaptiveKLController(KLController):
    """A coefficient that rises while the divergence is above its target and falls while it is below.

    Multiplied after each batch by 1 + e * n_steps / horizon, where e is the relative error current / target - 1, cut
    to [-0.2, 0.2]. Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593, section 2.2.

    `init_kl_coef`: the coefficient to start from.
    `target_kl`: the divergence to hold, in nats per token.
    `horizon`: in sequences; the larger, the slower."""

    kind = "adaptive"

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        for name, number in (("target_kl", target_kl), ("horizon", horizon)):
            if not number > 0:
                raise ConfigError(
                    f"algorithm.kl_ctrl.{name}", got=str(number), expected="a number above 0"
                )
        super().__init__(init_kl_coef)
        self.target, self.horizon = target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.value = float(state["value"])


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """The controller that the section `algorithm.kl_ctrl` describes: its `type`, `kl_coef`, `target_kl`, `horizon`."""
    if kl_ctrl.type == "fixed":
        return KLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ConfigError(
        "algorithm.kl_ctrl.type", got=repr(kl_ctrl.type), expected="fixed or adaptive"
    )


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kl_ctrl: KLController,
    kind: str,
) -> tuple[Tensor, dict[str, float]]:
    """Subtract a KL penalty from the reward of each token, and update the controller.
    Returns token_level_rewards [B, T], scores minus coefficient times divergence; and the metrics
    `actor/reward_kl_penalty` (mean over sequences of their mean per token, 0 for one without tokens) and
    `actor/reward_kl_penalty_coeff`.
    `token_level_scores`, `old_log_probs`, `ref_log_prob`, `response_mask`: [B, T].
    `kl_ctrl`: gives the coefficient for this batch; updated afterwards.
    `kind`: one of KL_PENALTIES."""
    divergence = kl_penalty(old_log_probs, ref_log_prob, kind).masked_fill(~response_mask.bool(), 0)
    coefficient = kl_ctrl.value
    current = masked_mean(divergence, response_mask, dim=-1).mean().item()
    kl_ctrl.update(current_kl=current, n_steps=len(divergence))
    metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coefficient}
    return token_level_scores - coefficient * divergence, metrics
