# SPDX-License-Identifier: Apache-2.0
"""PF-PPO: drawing informative responses more often. Shen and Zhang, arXiv:2409.06957.

A reward model is most reliable on very good and very bad responses. A batch of as many responses is drawn from the
batch, with replacement and with a weight for each:

    pow           |score| ^ weight_pow
    max_min       1 for the best and the worst score of the batch, 0 for the others
    max_random    0.4 for the best, 0.1 for the others

Shapes: B sequences.
"""

import torch
from torch import Tensor

from quadriga.errors import ConfigError, did_you_mean

REWEIGHT_METHODS = ("pow", "max_min", "max_random")
_OF_THE_BEST, _OF_OTHERS = 0.4, 0.1


def pf_ppo_weights(scores: Tensor, reweight_method: str, weight_pow: float = 2.0) -> Tensor:
    """How likely each response is to be drawn, [B], up to a factor; all 1 where every weight would be 0.
    Raises ConfigError: an unknown method.
    `scores`: [B].
    `reweight_method`: one of REWEIGHT_METHODS.
    `weight_pow`: the exponent of `pow`, 0 or more."""
    is_best = scores == scores.amax()
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = (is_best | (scores == scores.amin())).to(scores.dtype)
    elif reweight_method == "max_random":
        weights = torch.where(is_best, _OF_THE_BEST, _OF_OTHERS).to(scores.dtype)
    else:
        where, fix = (
            "algorithm.pf_ppo.reweight_method",
            did_you_mean(reweight_method, REWEIGHT_METHODS),
        )
        raise ConfigError(
            where,
            got=repr(reweight_method),
            expected=f"one of {', '.join(REWEIGHT_METHODS)}",
            fix=fix,
        )
    return weights if weights.any() else torch.ones_like(weights)


def pf_ppo_rows(
    scores: Tensor, reweight_method: str, weight_pow: float = 2.0, *, seed: int
) -> Tensor:
    """The rows to learn from, [B] int64: as many as there are, drawn with replacement.
    `scores`, `reweight_method`, `weight_pow`: as for `pf_ppo_weights`.
    `seed`: of the draw."""
    weights = pf_ppo_weights(scores.double().cpu(), reweight_method, weight_pow)
    return torch.multinomial(
        weights, len(scores), replacement=True, generator=torch.Generator().manual_seed(seed)
    )
