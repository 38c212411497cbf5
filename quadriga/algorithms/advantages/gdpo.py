# SPDX-License-Identifier: Apache-2.0
"""GDPO: several rewards, each normalised on its own. Liu et al., arXiv:2601.05242.

GRPO of a sum of rewards cannot tell responses apart whose sums are equal. Here each reward gets the advantage that GRPO
gives it within its group; these are added with weights, and the sums are whitened over all responses of the batch:

    a_i = sum over k of weight_k (r_k,i - mean of group) / std of group            A_i = (a_i - mean a) / std a

The mean and the deviation of the second step are over responses, each counted once; one without a token is not counted.

Groups may have any size and order; a group of one keeps its rewards.
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
SCORE = "score"


@register_adv_est("gdpo")
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Iterable[Hashable],
    reward_extra: Sequence[Mapping[str, Any]],
    *,
    gdpo_reward_keys: Sequence[str],
    gdpo_reward_weights: Sequence[float] | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The same advantage on every token of a response, as advantages and as returns, [B, T] each.
    Raises ConfigError: a component that the grader does not give or that is not a number, or weights of another count.

    Args:
        reward_extra: [B], what the grader returned in addition to each score, by name; some of it numbers.
        gdpo_reward_keys: which of them count; `score` is the response's reward itself.
        gdpo_reward_weights: a factor for each; 1 by default.
        epsilon: added to the deviation of a group.
    """
    weights = [1.0] * len(gdpo_reward_keys) if gdpo_reward_weights is None else gdpo_reward_weights
    if (
        isinstance(gdpo_reward_keys, str)
        or len(weights) != len(gdpo_reward_keys)
        or not gdpo_reward_keys
    ):
        got = f"{gdpo_reward_keys!r} with gdpo_reward_weights={gdpo_reward_weights!r}"
        raise ConfigError(
            _KEYS, got=got, expected="a list of at least one name, and as many weights or none"
        )
    scores = token_level_rewards.sum(-1)
    groups = Groups.of(uid, scores)
    total = torch.zeros_like(scores)
    for key, weight in zip(gdpo_reward_keys, weights, strict=True):
        reward = scores if key == SCORE else _component(key, reward_extra, scores)
        total = total + weight * groups.centered(reward) / (groups.deviation(reward) + epsilon)
    has_tokens = response_mask.bool().any(-1)
    advantages = spread(masked_whiten(total[:, None], has_tokens[:, None])[:, 0], response_mask)
    return advantages, advantages


def _component(key: str, reward_extra: Sequence[Mapping[str, Any]], like: Tensor) -> Tensor:
    known = (SCORE, *sorted({name for row in reward_extra for name in row}))
    try:
        values = [float(row[key]) for row in reward_extra]
    except KeyError as error:
        expected = f"one of {', '.join(known)}, given for every response"
        raise ConfigError(
            _KEYS, got=f"{key!r}", expected=expected, fix=did_you_mean(key, known)
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            _KEYS, got=f"{key!r}, which is not a number everywhere ({error})"
        ) from error
    column = torch.tensor(values, dtype=like.dtype, device=like.device)
    if num_bad := int((~torch.isfinite(column)).sum()):
        raise ConfigError(
            _KEYS,
            got=f"{key!r}, which is not finite for {num_bad} responses",
            expected="finite numbers",
        )
    return column
