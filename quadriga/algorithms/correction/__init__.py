# SPDX-License-Identifier: Apache-2.0
"""Rollout correction: answers that another policy wrote than the one that learns from them, made good again.

The engine that generates computes with other kernels, and perhaps with older weights, than the one that trains. In all
of these files the log-ratio of a token is log p_train - log p_rollout; `train` is the policy that the update starts
from, or the one being trained where there is no pass of its own for it (`losses.bypass_mode`).

    weights       how much a token or an answer counts
    rejection     which tokens or answers do not count at all
    divergence    how far apart the two policies are, as metrics
    decoupled     all of it for a batch, before the advantages
"""

from quadriga.algorithms.correction.decoupled import Correction, correct_rollout
from quadriga.algorithms.correction.divergence import divergence_metrics
from quadriga.algorithms.correction.rejection import Rejection, keep_mask
from quadriga.algorithms.correction.weights import importance_weights, weight_metrics

__all__ = [
    "Correction",
    "Rejection",
    "correct_rollout",
    "divergence_metrics",
    "importance_weights",
    "keep_mask",
    "weight_metrics",
]
