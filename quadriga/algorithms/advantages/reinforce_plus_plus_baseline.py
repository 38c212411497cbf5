# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ with a group baseline. Hu et al., arXiv:2501.03262.

The score of a response minus the mean score of its group, then whitened over all tokens of the batch: the group
says what to expect of a prompt, the whole batch says how large a difference is.

Groups may have any size and order; a group of one keeps its score.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import masked_whiten, spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Iterable[Hashable]
) -> tuple[Tensor, Tensor]:
    """The same advantage on every token of a response, as advantages and as returns, [B, T] each."""
    scores = token_level_rewards.sum(-1)
    centered = Groups.of(uid, scores).centered(scores)
    advantages = masked_whiten(spread(centered, response_mask), response_mask)
    return advantages, advantages
