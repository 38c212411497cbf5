# SPDX-License-Identifier: Apache-2.0
"""Aggregation of a loss per token into a scalar, independent of how the batch is split.

All modes are weighted sums. The weight of a token follows from the mask, the mode and two counts
of the whole mini-batch. When these counts are taken over all micro-batches and ranks before the
first backward pass, the losses of the parts add up to the loss of the whole, exactly.

    token-mean                1 / tokens of the batch
    token-sum                 1
    seq-mean-token-sum        1 / sequences of the batch
    seq-mean-token-mean       1 / (sequences of the batch x tokens of this sequence)
    seq-mean-token-sum-norm   1 / (sequences of the batch x loss_scale_factor)
                              (Dr. GRPO, arXiv:2503.20783)
    rollout-mean-token-mean   1 / (rollouts of the batch x tokens of this rollout)

A sequence or rollout without any token under the mask adds nothing and is not counted. A rollout
may have several sequences; by default each sequence is a rollout.

Shapes: B sequences, T response positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.algorithms.masked import zero_outside
from quadriga.errors import ConfigError, did_you_mean

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "rollout-mean-token-mean",
)


@dataclass(frozen=True, slots=True)
class LossCounts:
    """Counts that a loss is divided by.

    The counts of parts add up: `LossCounts.of(a) + LossCounts.of(b)`.
    """

    batch_num_tokens: int  # tokens under the mask
    global_batch_size: int  # sequences with at least one such token
    num_rollouts: float  # rollouts with at least one such token; a part of a rollout is a fraction
    num_echo_tokens: int = 0  # tokens of tools and users that have a separate loss

    @classmethod
    def of(cls, loss_mask: Tensor, rollout_num_tokens: Tensor | None = None) -> "LossCounts":
        """Count the tokens, the non-empty sequences and the rollouts of a mask.

        Args:
            loss_mask: [B, T], 0/1 or bool.
            rollout_num_tokens: for each sequence, the tokens under the mask in all sequences of its
                rollout, [B]; None: every sequence is a rollout.

        Returns:
            The counts. `num_echo_tokens` is 0, since it has a mask of its own.
        """
        mask = loss_mask.bool()
        num_tokens = int(mask.sum())
        num_sequences = int(mask.any(-1).sum())
        num_rollouts = float(num_sequences)
        if rollout_num_tokens is not None:
            # A sequence counts as a fraction of a rollout: its share of the rollout's tokens.
            shares = mask.sum(-1).double() / rollout_num_tokens.clamp(min=1)
            num_rollouts = float(shares.sum())
        return cls(num_tokens, num_sequences, num_rollouts)

    def __add__(self, other: "LossCounts") -> "LossCounts":
        return LossCounts(
            self.batch_num_tokens + other.batch_num_tokens,
            self.global_batch_size + other.global_batch_size,
            self.num_rollouts + other.num_rollouts,
            self.num_echo_tokens + other.num_echo_tokens,
        )


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    num_rollouts: float | None = None,
    rollout_num_tokens: Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregate a loss per token into a scalar.

    A backend that averages gradients over R ranks needs R times this value on each rank.

    Args:
        loss_mat: losses, [B, T]; values outside the mask are not read.
        loss_mask: [B, T], 0/1 or bool.
        loss_agg_mode: one of `LOSS_AGG_MODES`.
        batch_num_tokens: tokens of the whole mini-batch over all ranks; None counts this mask.
        global_batch_size: non-empty sequences of the whole mini-batch over all ranks; None counts
            this mask.
        num_rollouts: rollouts of the whole mini-batch over all ranks; None counts this mask.
        rollout_num_tokens: tokens of each sequence's rollout over the whole mini-batch, [B]; None:
            every sequence is a rollout.
        loss_scale_factor: constant length for `seq-mean-token-sum-norm`, in tokens; None takes T,
            the longest possible response.

    Returns:
        The loss, []. It is 0, with a gradient of 0, if the mask is empty.

    Raises:
        ConfigError: the mode is unknown.
    """
    # Count only if a number is missing, because counting makes the host wait for the accelerator.
    if batch_num_tokens is None or global_batch_size is None:
        counts = LossCounts.of(loss_mask)
        if batch_num_tokens is None:
            batch_num_tokens = counts.batch_num_tokens
        if global_batch_size is None:
            global_batch_size = counts.global_batch_size
    if num_rollouts is None and rollout_num_tokens is not None:
        num_rollouts = LossCounts.of(loss_mask, rollout_num_tokens).num_rollouts

    weights = token_weights(
        loss_mask,
        loss_agg_mode,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        num_rollouts=num_rollouts,
        rollout_num_tokens=rollout_num_tokens,
        loss_scale_factor=loss_scale_factor,
        dtype=loss_mat.dtype,
    )
    # The weights are 0 outside the mask, but a NaN there times 0 would still be NaN.
    return zero_outside(loss_mat * weights, loss_mask).sum()


def token_weights(
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    batch_num_tokens: float,
    global_batch_size: float,
    num_rollouts: float | None = None,
    rollout_num_tokens: Tensor | None = None,
    loss_scale_factor: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of each token's loss in the scalar loss.

    An engine that packs its sequences packs these weights with them, and sums the products.

    Args:
        loss_mask: [B, T], 0/1 or bool.
        loss_agg_mode: one of `LOSS_AGG_MODES`.
        batch_num_tokens: tokens of the whole mini-batch over all ranks.
        global_batch_size: non-empty sequences of the whole mini-batch over all ranks.
        num_rollouts: rollouts of the whole mini-batch over all ranks; None: as many as sequences.
        rollout_num_tokens: as for `agg_loss`.
        loss_scale_factor: as for `agg_loss`.
        dtype: type of the weights.

    Returns:
        The weights, [B, T], 0 outside the mask.

    Raises:
        ConfigError: the mode is unknown.
    """
    mask = loss_mask.to(dtype)
    # `max(..., 1)` and the clamps only matter for an empty mask, where all weights are 0.
    if loss_agg_mode == "token-mean":
        return mask / max(batch_num_tokens, 1)
    if loss_agg_mode == "token-sum":
        return mask
    if loss_agg_mode == "rollout-mean-token-mean":
        if rollout_num_tokens is None:
            rollout_num_tokens = loss_mask.sum(-1)
        if num_rollouts is None:
            num_rollouts = global_batch_size
        return mask / max(num_rollouts, 1) / rollout_num_tokens[:, None].clamp(min=1)

    per_sequence = mask / max(global_batch_size, 1)
    if loss_agg_mode == "seq-mean-token-sum":
        return per_sequence
    if loss_agg_mode == "seq-mean-token-mean":
        num_tokens = mask.sum(-1, keepdim=True)  # [B, 1]
        return per_sequence / num_tokens.clamp(min=1)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None:
            loss_scale_factor = loss_mask.shape[-1]
        return per_sequence / loss_scale_factor

    raise ConfigError(
        "loss_agg_mode",
        got=repr(loss_agg_mode),
        expected=f"one of {', '.join(LOSS_AGG_MODES)}",
        fix=did_you_mean(loss_agg_mode, LOSS_AGG_MODES),
    )
