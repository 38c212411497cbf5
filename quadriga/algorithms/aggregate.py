# SPDX-License-Identifier: Apache-2.0
"""From a loss per token to one number, independent of how the batch is cut.

All modes are weighted sums: each token's weight follows from the mask, the mode and two counts of the whole
mini-batch. With these counts taken over all micro-batches and all ranks before the first backward pass, the sum of the
parts is the whole, exactly.

    token-mean                1 / tokens of the batch
    token-sum                 1
    seq-mean-token-sum        1 / sequences of the batch
    seq-mean-token-mean       1 / (sequences of the batch x tokens of this sequence)
    seq-mean-token-sum-norm   1 / (sequences of the batch x loss_scale_factor)       Dr. GRPO, arXiv:2503.20783

A sequence without a single token under the mask is not a sequence of the batch: it adds nothing and counts nowhere.

Shapes: B sequences, T response positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import ConfigError, did_you_mean

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True, slots=True)
class LossCounts:
    """What a loss is divided by. Counts of parts add up: `LossCounts.of(a) + LossCounts.of(b)`."""

    batch_num_tokens: int  # tokens under the mask
    global_batch_size: int  # sequences with at least one such token

    @classmethod
    def of(cls, loss_mask: Tensor) -> "LossCounts":
        """Count a mask [B, T]."""
        mask = loss_mask.bool()
        return cls(int(mask.sum()), int(mask.any(-1).sum()))

    def __add__(self, other: "LossCounts") -> "LossCounts":
        num_tokens, num_sequences = other.batch_num_tokens, other.global_batch_size
        return LossCounts(
            self.batch_num_tokens + num_tokens, self.global_batch_size + num_sequences
        )


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Turn a loss per token into a scalar.
    Returns a scalar; 0, with a gradient of 0, if the mask is empty. A backend that averages gradients over R ranks
    needs R times this value on each. Raises ConfigError: an unknown mode.

    Args:
        loss_mat: [B, T]; what stands outside the mask is not read.
        loss_mask: [B, T], 0/1 or bool.
        loss_agg_mode: one of LOSS_AGG_MODES.
        batch_num_tokens: tokens of the whole mini-batch over all ranks; None: those of this mask.
        global_batch_size: non-empty sequences of the whole mini-batch over all ranks; None: those of this mask.
        loss_scale_factor: the constant length of `seq-mean-token-sum-norm`; None: T, the longest possible response.
    """
    if batch_num_tokens is None or global_batch_size is None:
        counts = LossCounts.of(loss_mask)
        batch_num_tokens = counts.batch_num_tokens if batch_num_tokens is None else batch_num_tokens
        global_batch_size = (
            counts.global_batch_size if global_batch_size is None else global_batch_size
        )
    counted = {"batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size}
    scale, dtype = loss_scale_factor, loss_mat.dtype
    weights = token_weights(
        loss_mask, loss_agg_mode, **counted, loss_scale_factor=scale, dtype=dtype
    )
    return (loss_mat * weights).masked_fill(~loss_mask.bool(), 0).sum()


def token_weights(
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    batch_num_tokens: float,
    global_batch_size: float,
    loss_scale_factor: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The factor of each token's loss in the total, [B, T]; 0 outside the mask. Arguments as for `agg_loss`.

    An engine that packs its sequences packs these weights along, and sums.
    """
    mask = loss_mask.to(dtype)
    if loss_agg_mode == "token-mean":
        return mask / max(batch_num_tokens, 1)
    if loss_agg_mode == "token-sum":
        return mask
    per_sequence = mask / max(global_batch_size, 1)
    if loss_agg_mode == "seq-mean-token-sum":
        return per_sequence
    if loss_agg_mode == "seq-mean-token-mean":
        return per_sequence / mask.sum(-1, keepdim=True).clamp(min=1)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return per_sequence / (
            loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
        )
    fix = did_you_mean(loss_agg_mode, LOSS_AGG_MODES)
    raise ConfigError(
        "loss_agg_mode",
        got=repr(loss_agg_mode),
        expected=f"one of {', '.join(LOSS_AGG_MODES)}",
        fix=fix,
    )
