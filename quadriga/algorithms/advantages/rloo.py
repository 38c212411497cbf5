# SPDX-License-Identifier: Apache-2.0
"""RLOO: REINFORCE, leave one out. Ahmadian et al., arXiv:2402.14740; Kool et al. (2019).

The score of a response minus the mean score of the *other* responses to the same prompt. A
baseline that does not depend on the response itself leaves the gradient unbiased. With n responses
this equals n / (n - 1) times the distance from the mean of all n.

`rloo_vectorized` is a second name; neither name loops over groups.

Groups may have any size and order; a group of one keeps its score.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("rloo_vectorized", compares_group=True)
@register_adv_est("rloo", compares_group=True)
def rloo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    *,
    rollout_id: Iterable[Hashable] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages over the mean score of the other responses to the prompt.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T].
        uid: group of each response, [B].
        rollout_id: rollout of each row, [B]. None: every row is a rollout.

    Returns:
        Advantages and returns, [B, T] each: the response's advantage on each of its tokens.
    """
    scores = token_level_rewards.sum(-1)  # [B]
    groups = Groups.of(uid, scores, rollout_id)
    # With n responses of mean m, the mean of the others is (n m - s) / (n - 1), so that
    # s - (mean of the others) = (s - m) n / (n - 1). A group of one has no others: its advantage is
    # its score, which `centered` leaves as it is.
    num_others = (groups.size - 1).clamp(min=1)
    advantage = groups.centered(scores) * (groups.size / num_others)
    advantages = spread(advantage, response_mask)
    return advantages, advantages
