# SPDX-License-Identifier: Apache-2.0
"""`algorithm`: the advantage estimator and the divergence inside the reward."""

from typing import Literal

from pydantic import Field

from quadriga.config.base import Count, KLKind, Name, NonNegativeFloat, PositiveFloat, Section, Share


class KLControlConfig(Section):
    """The coefficient of the divergence inside the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Whether the coefficient stays or follows `target_kl`."""
    kl_coef: NonNegativeFloat = 0.001
    """The coefficient (adaptive: its first value), reward per nat."""
    horizon: Count = 10000
    """Adaptive: samples over which the coefficient adapts."""
    target_kl: PositiveFloat = 0.1
    """Adaptive: divergence to hold, in nats."""


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: Name = "grpo"
    """Name of a registered advantage estimator."""
    gamma: Share = 1.0
    """Discount of a later reward, per token, in [0, 1]."""
    lam: Share = 1.0
    """Lambda of generalised advantage estimation, in [0, 1]."""
    norm_adv_by_std_in_grpo: bool = True
    """Whether GRPO divides by the standard deviation of the group (false: Dr. GRPO)."""
    use_kl_in_reward: bool = False
    """Whether the divergence from the reference model is taken off the reward, token by token."""
    kl_penalty: KLKind = "kl"
    """Estimator of that divergence."""
    kl_ctrl: KLControlConfig = Field(default_factory=KLControlConfig)
