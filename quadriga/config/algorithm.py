# SPDX-License-Identifier: Apache-2.0
"""`algorithm`: the advantage estimator, dynamic sampling, and the KL penalty in the reward."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from quadriga.config.base import (
    Count,
    Finding,
    KLKind,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Section,
    Share,
)
from quadriga.config.rollout_correction import RolloutCorrectionConfig


class KLControlConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Whether the coefficient stays or follows `target_kl`."""
    kl_coef: NonNegativeFloat = 0.001
    """The coefficient (adaptive: its first value), reward per nat."""
    horizon: Count = 10000
    """Adaptive: sequences over which the coefficient adapts."""
    target_kl: PositiveFloat = 0.1
    """Adaptive: KL divergence to hold, in nats."""


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO, arXiv:2503.14476): groups without differences in reward have no gradient."""

    enable: bool = False
    """Whether groups of equal responses are left out, and more prompts are generated until the batch is full."""
    metric: Name = "score"
    """What is compared: `score`, `seq_final_reward` or `seq_reward` (all the score), or a number that graders add."""
    max_num_gen_batches: NonNegativeInt = 10
    """Batches of prompts that one step may generate for; with fewer full groups than the batch needs the run stops. 0:
    no limit."""

    def findings(self, at: str) -> Iterator[Finding]:
        if self.enable and self.max_num_gen_batches == 0:
            yield f"{at}.max_num_gen_batches: 0: a step generates until its batch is full, for ever if none differ."


class PFPPOConfig(Section):
    """How often each response is drawn for the update (PF-PPO, arXiv:2409.06957)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """`pow`: by the size of the score; `max_min`: the best and the worst; `max_random`: the best, and less the rest."""
    weight_pow: NonNegativeFloat = 2.0
    """Exponent of `pow`."""


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: Name = "grpo"
    """Name of a registered advantage estimator, or `path/to/file.py:function`."""
    adv_options: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: options of that estimator, under the names that it gives them."""
    gamma: Share = 1.0
    """Discount of a later reward, per token, in [0, 1]."""
    lam: Share = 1.0
    """Lambda of generalised advantage estimation (GAE), in [0, 1]."""
    norm_adv_by_std_in_grpo: bool = True
    """Whether GRPO divides by the standard deviation of the group (false: Dr. GRPO)."""
    use_kl_in_reward: bool = False
    """Whether the KL divergence from the reference model is taken off the reward, token by token."""
    kl_penalty: KLKind = "kl"
    """Estimator of that divergence."""
    kl_ctrl: KLControlConfig = Field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)
    use_pf_ppo: bool = False
    """Whether the batch of an update is drawn from the responses with replacement, by their scores."""
    pf_ppo: PFPPOConfig = Field(default_factory=PFPPOConfig)
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)

    def findings(self, at: str) -> Iterator[Finding]:
        if self.kl_ctrl.type == "adaptive" and not self.use_kl_in_reward:
            yield f"{at}.kl_ctrl.type: not used, for {at}.use_kl_in_reward is false."
        if self.use_kl_in_reward and self.kl_ctrl.kl_coef == 0:
            yield f"{at}.kl_ctrl.kl_coef: at 0 the reference model is computed only to report the KL divergence."
