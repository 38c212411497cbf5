# SPDX-License-Identifier: Apache-2.0
"""GDPO: several rewards, each normalised separately. Liu et al., arXiv:2601.05242.

GRPO on a sum of rewards cannot distinguish responses whose sums are equal. GDPO gives each reward
the advantage that GRPO would give it within its group, adds these with weights, and whitens the
sums over all responses of the batch:

    a_i = sum over k of weight_k (r_k,i - mean of group) / std of group
    A_i = (a_i - mean a) / std a

The mean and the standard deviation of the second step are over responses, not tokens; a response
without tokens is not counted.

Groups may have any size and order; a group of one keeps its rewards.

Shapes: B sequences, T response positions.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import masked_whiten, spread
from quadriga.algorithms.registry import register_adv_est
from quadriga.errors import ConfigError, did_you_mean

_KEYS = "algorithm.adv_options.gdpo_reward_keys"
# Name of the response's reward itself among the rewards of the grader.
SCORE = "score"


@register_adv_est("gdpo", compares_group=True)
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    reward_extra: Sequence[Mapping[str, Any]],
    *,
    gdpo_reward_keys: Sequence[str],
    gdpo_reward_weights: Sequence[float] | None = None,
    epsilon: float = 1e-6,
    rollout_id: Iterable[Hashable] | None = None,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages of several rewards, whitened over the responses of the batch.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T].
        uid: group of each response, [B].
        reward_extra: values by name that the grader returned beside each score, [B].
        gdpo_reward_keys: names of the rewards to use; `score` is the response's reward itself.
        gdpo_reward_weights: one factor per reward; None weighs all by 1.
        epsilon: added to the standard deviation of a group.
        rollout_id: rollout of each row, [B]. None: every row is a rollout.

    Returns:
        Advantages and returns, [B, T] each: the response's advantage on each of its tokens.

    Raises:
        ConfigError: `gdpo_reward_keys` is a string or empty, the number of weights does not fit,
            the grader does not return a reward, or a reward is not a finite number.
    """
    weights = gdpo_reward_weights
    if weights is None:
        weights = [1.0] * len(gdpo_reward_keys)
    # A string would be taken for a list of its characters.
    is_string = isinstance(gdpo_reward_keys, str)
    if is_string or not gdpo_reward_keys or len(weights) != len(gdpo_reward_keys):
        raise ConfigError(
            _KEYS,
            got=f"{gdpo_reward_keys!r} with gdpo_reward_weights={gdpo_reward_weights!r}",
            expected="a list of at least one name, and as many weights or none",
        )

    scores = token_level_rewards.sum(-1)  # [B]
    groups = Groups.of(uid, scores, rollout_id)
    total = torch.zeros_like(scores)
    # Step 1: the advantage of each reward within its group, as in GRPO.
    for key, weight in zip(gdpo_reward_keys, weights, strict=True):
        reward = scores if key == SCORE else _read_reward(key, reward_extra, scores)
        deviation = groups.deviation(reward) + epsilon
        total = total + weight * groups.centered(reward) / deviation

    # Step 2: whiten over the batch. One entry per response, [B, 1], so that a long response does
    # not count more than a short one.
    has_tokens = response_mask.bool().any(-1)
    row_weight = None if groups.row_weight is None else groups.row_weight[:, None]
    whitened = masked_whiten(total[:, None], has_tokens[:, None], weights=row_weight)
    advantages = spread(whitened[:, 0], response_mask)
    return advantages, advantages


def _read_reward(key: str, reward_extra: Sequence[Mapping[str, Any]], like: Tensor) -> Tensor:
    """Read a reward of each response from the values that the grader returned.

    Args:
        key: name of the reward.
        reward_extra: values by name, [B].
        like: gives the dtype and the device of the result.

    Returns:
        The rewards, [B].

    Raises:
        ConfigError: a response does not have the reward, or it is not a finite number.
    """
    try:
        values = [float(row[key]) for row in reward_extra]
    except KeyError as error:
        # All names that the grader returned for any response.
        names = {name for row in reward_extra for name in row}
        known = (SCORE, *sorted(names))
        raise ConfigError(
            _KEYS,
            got=f"{key!r}",
            expected=f"one of {', '.join(known)}, returned for every response",
            fix=did_you_mean(key, known),
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            _KEYS, got=f"{key!r}, which is not a number for every response ({error})"
        ) from error

    rewards = torch.tensor(values, dtype=like.dtype, device=like.device)
    num_bad = int((~torch.isfinite(rewards)).sum())
    if num_bad:
        raise ConfigError(
            _KEYS,
            got=f"{key!r}, which is not finite for {num_bad} responses",
            expected="finite numbers",
        )
    return rewards
