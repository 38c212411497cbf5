# SPDX-License-Identifier: Apache-2.0
"""What the steps of an update and an engine hand to each other.

Legend: M predicted tokens of a packed micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Outputs = Mapping[str, torch.Tensor]
"""Outputs for each predicted token, float32 [M] each: `values`, or `log_probs` and what else the question names."""

LossFunction = Callable[[Outputs], torch.Tensor]
"""From outputs to a scalar that is already normalised over the whole mini-batch."""


@dataclass(frozen=True)
class OptimizerStep:
    """The outcome of an optimizer step: `grad_norm` before clipping, and whether it was finite and so applied."""

    grad_norm: float
    is_applied: bool
