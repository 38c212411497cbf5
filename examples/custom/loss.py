# SPDX-License-Identifier: Apache-2.0
"""A policy loss of your own: the gain from a likelier token levels off smoothly instead of being clipped."""

import torch


def soft_clip(log_prob, old_log_prob, advantages, *, softness=0.2):
    """Losses, a number per token, and diagnostics of the same shape; the trainer takes the mean."""
    ratio = torch.exp(log_prob - old_log_prob)
    change = softness * torch.tanh((ratio - 1) / softness)
    return -advantages * change, {"ratio_change": (ratio - 1).abs().detach()}
