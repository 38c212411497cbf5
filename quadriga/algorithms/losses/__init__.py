# SPDX-License-Identifier: Apache-2.0
"""Losses per token [B, T]; `aggregate.agg_loss` reduces them to a scalar.

Common to all, with B sequences and T response positions: the fields of the batch are [B, T], and
gradients flow through `log_prob` alone. A loss returns losses, 0 outside the mask, and diagnostics
per token, [B, T] each. `quadriga/algorithms/losses/` has a file for each paper; to add a loss,
write such a file and import its function in `__init__.py`.
"""

from quadriga.algorithms.losses.bypass_mode import bypass_mode
from quadriga.algorithms.losses.cispo import cispo
from quadriga.algorithms.losses.covariance import clip_cov, kl_cov
from quadriga.algorithms.losses.dppo import dppo_kl, dppo_tv
from quadriga.algorithms.losses.dro import dro
from quadriga.algorithms.losses.geo_mean import geo_mean
from quadriga.algorithms.losses.gpg import gpg
from quadriga.algorithms.losses.gspo import gspo
from quadriga.algorithms.losses.luspo import luspo
from quadriga.algorithms.losses.sapo import sapo
from quadriga.algorithms.losses.value import clipped_value_loss
from quadriga.algorithms.losses.vanilla import vanilla
from quadriga.algorithms.losses.vespo import vespo
from quadriga.algorithms.registry import POLICY_LOSSES

POLICY_LOSSES.built_in = frozenset(POLICY_LOSSES)
