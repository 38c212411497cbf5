# SPDX-License-Identifier: Apache-2.0
"""GPG: plain policy gradient, without a ratio or a clip. Chu et al., arXiv:2504.02546.

    loss_t = -A_t log p_t

It is correct for one update from the policy that sampled; a second update on the same responses
would be biased. The estimator of the same name scales the advantages.

Shapes: [B, T] with B sequences and T response positions, or any other shape, element by element.
"""

from torch import Tensor

from quadriga.algorithms.masked import zero_outside
from quadriga.algorithms.registry import register_policy_loss


@register_policy_loss("gpg", needs_advantage=True)
def gpg(
    log_prob: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain policy gradient.

    Args:
        log_prob: log-probabilities under the policy in training, [B, T].
        advantages: [B, T].
        response_mask: [B, T].

    Returns:
        The loss of each token, [B, T], and no diagnostics.
    """
    # Both factors are filled: NaN outside the mask times 0 would still be NaN.
    advantages = zero_outside(advantages, response_mask)
    log_prob = zero_outside(log_prob, response_mask)
    return -advantages * log_prob, {}
