# SPDX-License-Identifier: Apache-2.0
"""Advantages and losses as pure functions on tensors, from rewards to the loss of each token.

`advantages/` and `losses/` hold one paper per file. Importing this package registers them by name.
"""

# These imports register all algorithms.
from quadriga.algorithms import advantages, losses
from quadriga.algorithms.aggregate import LossCounts, agg_loss
from quadriga.algorithms.registry import (
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
