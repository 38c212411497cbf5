# SPDX-License-Identifier: Apache-2.0
"""Losses per token [B, T], one paper per file; `aggregate.agg_loss` makes a scalar of them.

In all of them, with B sequences and T response positions, the fields of the batch are [B, T], and the gradient flows
through `log_prob` alone. They return losses, 0 outside the mask, and diagnostics per token, [B, T] each. A new one is a
file here and an import below.
"""

from quadriga.algorithms.losses.bypass_mode import bypass_mode
from quadriga.algorithms.losses.cispo import cispo
from quadriga.algorithms.losses.covariance import clip_cov, kl_cov
from quadriga.algorithms.losses.dppo import dppo_kl, dppo_tv
from quadriga.algorithms.losses.dro import dro
from quadriga.algorithms.losses.geo_mean import geo_mean
from quadriga.algorithms.losses.gpg import gpg
from quadriga.algorithms.losses.gspo import gspo
from quadriga.algorithms.losses.sapo import sapo
from quadriga.algorithms.losses.value import clipped_value_loss
from quadriga.algorithms.losses.vanilla import vanilla
