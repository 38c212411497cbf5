# SPDX-License-Identifier: Apache-2.0
"""Pure functions on tensors: from the reward of a response to the advantage of its tokens and the loss on them.

`advantages/` and `losses/` hold one paper per file; importing this package makes them all known by name.
"""

from quadriga.algorithms import advantages, losses
from quadriga.algorithms.aggregate import LOSS_AGG_MODES, LossCounts, agg_loss, token_weights
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
    Algorithm,
    bind_options,
    choose_estimator,
    choose_policy_loss,
    estimate_advantages,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    options,
    register_adv_est,
    register_batch_column,
    register_policy_loss,
    required_fields,
)
from quadriga.algorithms.rollout_correction import correct_rollout
