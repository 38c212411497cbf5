# SPDX-License-Identifier: Apache-2.0
"""Pure functions on tensors: what an answer was worth, what follows for its tokens, and the loss that says so.

`advantages/` and `losses/` hold one algorithm per file; importing this package makes them all known by name.
"""

from quadriga.algorithms import advantages, covariance, losses
from quadriga.algorithms.aggregate import LOSS_AGG_MODES, LossCounts, agg_loss, token_weights
from quadriga.algorithms.choice import Algorithm, choose_estimator, choose_policy_loss
from quadriga.algorithms.correction import correct_rollout
from quadriga.algorithms.estimate import estimate_advantages
from quadriga.algorithms.groups import Groups
from quadriga.algorithms.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    KLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from quadriga.algorithms.losses.value import clipped_value_loss
from quadriga.algorithms.masked import masked_mean, masked_sum, masked_whiten, spread
from quadriga.algorithms.pf_ppo import pf_ppo_rows
from quadriga.algorithms.registry import (
    AdvantageEstimator,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_batch_column,
    register_policy_loss,
)
from quadriga.algorithms.signature import bind_options, options, required_fields

__all__ = [
    "KL_PENALTIES",
    "LOSS_AGG_MODES",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "Algorithm",
    "FixedKLController",
    "Groups",
    "KLController",
    "LossCounts",
    "advantages",
    "agg_loss",
    "apply_kl_penalty",
    "bind_options",
    "choose_estimator",
    "choose_policy_loss",
    "clipped_value_loss",
    "correct_rollout",
    "covariance",
    "estimate_advantages",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "losses",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "options",
    "pf_ppo_rows",
    "register_adv_est",
    "register_batch_column",
    "register_policy_loss",
    "required_fields",
    "spread",
    "token_weights",
]
