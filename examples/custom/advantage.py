# SPDX-License-Identifier: Apache-2.0
"""An advantage estimator of your own: a tournament between the answers to the same prompt."""

import torch


def tournament(token_level_rewards, response_mask, uid):
    """Wins minus losses against each sibling, from -1 (lost to all) to 1 (beat all); how clearly does not matter."""
    scores = token_level_rewards.sum(-1)
    siblings = torch.from_numpy(uid[:, None] == uid[None, :])
    results = torch.sign(scores[:, None] - scores[None, :]) * siblings
    balance = results.sum(1) / (siblings.sum(1) - 1).clamp(min=1)
    advantages = balance[:, None] * response_mask
    return advantages, advantages
