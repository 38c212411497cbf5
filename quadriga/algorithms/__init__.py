# SPDX-License-Identifier: Apache-2.0
"""Pure functions on tensors: from the reward of a response to the advantage of its tokens and the loss on them.

`advantages/` and `losses/` hold one paper per file; importing this package makes them all known by name.
"""

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
