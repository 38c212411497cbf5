# SPDX-License-Identifier: Apache-2.0
"""The correction of a whole batch, before the advantages: three policies, of which two are known here.

    rollout    wrote the answers
    old        the update starts from it; the loss holds the policy to it
    current    is being trained

What the rollout did differently is made good by weights old / rollout and by rejection, once for the batch; what the
update changes is the loss's own business (arXiv:2110.00641, the decoupled objective). Without a pass for the old policy
(`bypass_mode`) the loss takes the rollout as the old policy, and `losses.bypass_mode` corrects; what is left to do here
is batch normalisation, for which that pass is made after all.

Shapes: B sequences, T response positions.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quadriga.algorithms.correction.divergence import divergence_metrics
from quadriga.algorithms.correction.rejection import Rejection, keep_mask
from quadriga.algorithms.correction.weights import Bounds, Level, importance_weights, mean_weight, weight_metrics

PREFIX = "rollout_corr"


class Correction(Protocol):
    """The settings below `algorithm.rollout_correction`."""

    @property
    def bypass_mode(self) -> bool: ...
    @property
    def loss_type(self) -> str: ...
    @property
    def rollout_is(self) -> Level | None: ...
    @property
    def weight_bounds(self) -> Bounds: ...
    @property
    def rollout_is_batch_normalize(self) -> bool: ...
    @property
    def rejections(self) -> Sequence[tuple[str, str, float, float]]: ...


def correct_rollout(
    columns: Mapping[str, Tensor], correction: Correction
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights and mask of a batch.

    Args:
        columns: of the whole batch: `old_log_probs`, `rollout_log_probs`, `response_mask`, [B, T] each.
        correction: what to do.

    Returns:
        Columns to set, [B, T] each: `rollout_is_weights` where answers are weighted, which every loss is multiplied by,
        and `response_mask` where some are rejected; and metrics under `rollout_corr/`, of the batch before rejection.
        In bypass form: the weights of its losses' normalisation only, the same number everywhere.
    """
    mask, rollout = columns["response_mask"], columns["rollout_log_probs"]
    log_ratio = columns["old_log_probs"] - rollout
    metrics = divergence_metrics(columns["old_log_probs"], rollout, mask)
    changed: dict[str, Tensor] = {}
    if correction.rollout_is is not None:
        level, bounds = correction.rollout_is, correction.weight_bounds
        weights = importance_weights(log_ratio, mask, level, bounds)
        metrics |= weight_metrics(log_ratio, mask, level, bounds)
        factor = torch.ones((), dtype=weights.dtype, device=weights.device)
        if correction.rollout_is_batch_normalize:
            factor = mean_weight(weights, mask, level)
            metrics["rollout_is_batch_norm_factor"] = float(factor)
        if correction.bypass_mode:
            weights = mask.to(weights.dtype)
        if not correction.bypass_mode or correction.rollout_is_batch_normalize:
            changed["rollout_is_weights"] = weights / factor
    if correction.rejections and not correction.bypass_mode:
        rules = [Rejection(*rule) for rule in correction.rejections]
        changed["response_mask"], rejected = keep_mask(log_ratio, mask, rules)
        metrics |= rejected
    return changed, {f"{PREFIX}/{name}": value for name, value in metrics.items()}
