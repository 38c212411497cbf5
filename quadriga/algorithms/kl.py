# SPDX-License-Identifier: Apache-2.0
"""KL divergence from the reference policy per token, and the coefficient of its reward penalty.

Each kind estimates KL(policy || reference) from the sampled tokens alone. With d the log-prob
under the policy minus the log-prob under the reference:

    kl, k1           d                      unbiased, may be negative
    abs              |d|
    mse, k2          d^2 / 2                its gradient is unbiased
    low_var_kl, k3   exp(-d) + d - 1        never negative; the value is unbiased, the gradient not

A `+` after a kind (`k3+`) takes its value with the unbiased gradient of k2 (straight-through).
John Schulman, "Approximating KL Divergence" (2020), joschu.net/blog/kl-approx.html; on the
gradients, arXiv:2506.09477.

Shapes: B sequences, T response positions.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quadriga.algorithms.masked import MAX_LOG_RATIO, masked_mean, zero_outside
from quadriga.errors import CheckpointError, ConfigError, did_you_mean

# Largest estimate of k3 for one token, in nats.
MAX_LOW_VARIANCE_KL = 10.0
# Batch fields that `apply_kl_penalty` reads, in its order.
PENALTY_FIELDS = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")

_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_PENALTIES = (*_KINDS, *(f"{kind}+" for kind in _KINDS))


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate the KL divergence from the reference for each token.

    Args:
        logprob: log-probabilities under the policy, any shape.
        ref_logprob: log-probabilities of the same tokens under the reference, same shape.
        kl_penalty: one of `KL_PENALTIES`.

    Returns:
        One estimate per token in nats, of the same shape.

    Raises:
        ConfigError: the kind is unknown.
    """
    kind = kl_penalty
    if kind not in KL_PENALTIES:
        raise ConfigError(
            "kl_penalty",
            got=repr(kind),
            expected=f"one of {', '.join(_KINDS)}, each also with a +",
            fix=did_you_mean(kind, KL_PENALTIES),
        )

    difference = logprob - ref_logprob
    half_square = difference.square() / 2  # k2
    value_kind = kind.removesuffix("+")
    if value_kind in ("kl", "k1"):
        value = difference
    elif value_kind == "abs":
        value = difference.abs()
    elif value_kind in ("mse", "k2"):
        value = half_square
    else:
        # k3, which is never negative. Two clamps keep a single outlier from dominating: of the
        # argument of exp(), and of the result.
        log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        estimate = log_ratio.exp() - log_ratio - 1
        value = estimate.clamp(max=MAX_LOW_VARIANCE_KL)
    if not kind.endswith("+"):
        return value
    # Straight-through: the second term is 0 in value, and has the gradient of k2.
    return value.detach() + (half_square - half_square.detach())


class KLController:
    """Coefficient of the KL penalty, in reward per nat. This class keeps it fixed."""

    kind = "fixed"

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient to the divergence of a batch. A fixed coefficient stays as it is.

        Args:
            current_kl: mean divergence of the batch, in nats per token.
            n_steps: number of sequences in the batch.
        """

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint. A fixed coefficient comes from the configuration instead."""
        return {"type": self.kind}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            CheckpointError: the state is that of another type of controller.
        """
        if state.get("type") != self.kind:
            raise CheckpointError(
                "KL controller",
                got=f"the state of type {state.get('type')!r}",
                expected=repr(self.kind),
                fix="Resume with the algorithm.kl_ctrl.type that the checkpoint was written with.",
            )


FixedKLController = KLController


class AdaptiveKLController(KLController):
    """Coefficient that rises while the divergence is above a target and falls while it is below.

    After each batch it is multiplied by 1 + e * n_steps / horizon, where e is the relative error
    current / target - 1, clamped to [-0.2, 0.2]. Ziegler et al., "Fine-Tuning Language Models from
    Human Preferences", arXiv:1909.08593, section 2.2.

    Args:
        init_kl_coef: initial coefficient.
        target_kl: divergence to hold, in nats per token.
        horizon: in sequences; a larger one adapts more slowly.

    Raises:
        ConfigError: `target_kl` or `horizon` is not above 0.
    """

    kind = "adaptive"

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        for name, number in (("target_kl", target_kl), ("horizon", horizon)):
            if not number > 0:
                key = f"algorithm.kl_ctrl.{name}"
                raise ConfigError(key, got=str(number), expected="a number above 0")
        super().__init__(init_kl_coef)
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient after a batch.

        Args:
            current_kl: mean divergence of the batch, in nats per token.
            n_steps: number of sequences in the batch.
        """
        # The clamp bounds the relative change by a batch to 0.2 * n_steps / horizon.
        relative_error = current_kl / self.target - 1
        error = min(max(relative_error, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.value = float(state["value"])


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """Build the controller for the section `algorithm.kl_ctrl`.

    Args:
        kl_ctrl: the section; `type`, `kl_coef`, `target_kl` and `horizon` are read.

    Raises:
        ConfigError: the type is unknown.
    """
    if kl_ctrl.type == "fixed":
        return KLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    key = "algorithm.kl_ctrl.type"
    raise ConfigError(key, got=repr(kl_ctrl.type), expected="fixed or adaptive")


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kl_ctrl: KLController,
    kind: str,
) -> tuple[Tensor, dict[str, float]]:
    """Subtract a KL penalty from the reward of each token and update the controller.

    Args:
        token_level_scores: rewards before the penalty, [B, T].
        old_log_probs: log-probabilities under the policy, [B, T].
        ref_log_prob: log-probabilities under the reference, [B, T].
        response_mask: [B, T].
        kl_ctrl: provides the coefficient for this batch and is updated afterwards.
        kind: one of `KL_PENALTIES`.

    Returns:
        The token-level rewards, [B, T], and the metrics `actor/reward_kl_penalty` (mean over
        sequences of their mean per token, 0 for an empty sequence) and
        `actor/reward_kl_penalty_coeff`.
    """
    divergence = kl_penalty(old_log_probs, ref_log_prob, kind)
    divergence = zero_outside(divergence, response_mask)
    # Read before `update`, which changes the coefficient for the next batch.
    coefficient = kl_ctrl.value
    mean_per_sequence = masked_mean(divergence, response_mask, dim=-1)  # [B]
    current_kl = mean_per_sequence.mean().item()
    kl_ctrl.update(current_kl=current_kl, n_steps=len(divergence))
    metrics = {
        "actor/reward_kl_penalty": current_kl,
        "actor/reward_kl_penalty_coeff": coefficient,
    }
    return token_level_scores - coefficient * divergence, metrics
