# SPDX-License-Identifier: Apache-2.0
"""GPG: plain policy gradient, without a ratio or a clip. Chu et al., arXiv:2504.02546.

    loss_t = -A_t log p_t

It is right for one update from the policy that sampled; a second one on the same responses would be biased. Its
estimator of the same name scales the advantages.

Shapes: [B, T] with B sequences and T response positions, or any other, element by element.
"""

from torch import Tensor

from quadriga.algorithms.registry import register_policy_loss


@register_policy_loss("gpg", needs_advantage=True)
def gpg(
    log_prob: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, [B, T]; diagnostics none."""
    outside = ~response_mask.bool()
    return -advantages.masked_fill(outside, 0) * log_prob.masked_fill(outside, 0), {}
