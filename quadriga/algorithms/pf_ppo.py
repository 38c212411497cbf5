# SPDX-License-Identifier: Apache-2.0
"""PF-PPO: resampling that favours informative responses. Shen and Zhang, arXiv:2409.06957.

A reward model is most reliable on very good and very bad responses. Therefore a new batch of the
same size is drawn from a batch, with replacement, with these weights of the responses:

    pow           |score| ^ weight_pow
    max_min       1 for the best and the worst score of the batch, 0 for the others
    max_random    0.4 for the best score, 0.1 for the others

Shapes: B sequences.
"""

import torch
from torch import Tensor

from quadriga.errors import ConfigError, did_you_mean

REWEIGHT_METHODS = ("pow", "max_min", "max_random")
# Weights of `max_random`.
_BEST_WEIGHT = 0.4
_OTHER_WEIGHT = 0.1


def pf_ppo_weights(scores: Tensor, reweight_method: str, weight_pow: float = 2.0) -> Tensor:
    """Unnormalised probability of drawing each response.

    Args:
        scores: score of each response, [B].
        reweight_method: one of `REWEIGHT_METHODS`.
        weight_pow: exponent for `pow`, 0 or more.

    Returns:
        The weights, [B]; all 1 if every weight would be 0.

    Raises:
        ConfigError: the method is unknown.
    """
    is_best = scores == scores.amax()
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        is_worst = scores == scores.amin()
        weights = (is_best | is_worst).to(scores.dtype)
    elif reweight_method == "max_random":
        weights = torch.where(is_best, _BEST_WEIGHT, _OTHER_WEIGHT).to(scores.dtype)
    else:
        raise ConfigError(
            "algorithm.pf_ppo.reweight_method",
            got=repr(reweight_method),
            expected=f"one of {', '.join(REWEIGHT_METHODS)}",
            fix=did_you_mean(reweight_method, REWEIGHT_METHODS),
        )
    # `multinomial` refuses weights that are all 0.
    return weights if weights.any() else torch.ones_like(weights)


def pf_ppo_rows(
    scores: Tensor, reweight_method: str, weight_pow: float = 2.0, *, seed: int
) -> Tensor:
    """Draw the rows to train on, with replacement.

    Args:
        scores: score of each response, [B].
        reweight_method: one of `REWEIGHT_METHODS`.
        weight_pow: exponent for `pow`, 0 or more.
        seed: seed of the draw.

    Returns:
        Row numbers, [B] int64 on the CPU.
    """
    # On the CPU and in double precision, so that every device draws the same rows.
    weights = pf_ppo_weights(scores.double().cpu(), reweight_method, weight_pow)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, len(scores), replacement=True, generator=generator)
