# SPDX-License-Identifier: Apache-2.0
"""What a layer computes number by number: RMS norms, rotary positions, the gate of its MLP.

By torch's operators, which round to bfloat16 after each; the compiled loops of `kernels` do the same in one pass.

Legend: H heads, D hidden or head size, F width of the MLP.
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch.nn.functional import silu

from quadriga.models.fused import rms_scale
from quadriga.rollout.native.kernels import Kernels, kernels


class Elementwise(Protocol):
    """Either way to compute them; all tensors have the model's dtype."""

    def normalize(self, states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Root-mean-square norm of [..., D] over the last dim, times `weight` [D]."""
        ...

    def rotate(self, states: torch.Tensor, num_turned: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary positions of the first heads, perhaps in place: [..., H, D], by cos and sin [..., D]."""
        ...

    def gate(self, states: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up: [..., 2 * F], the gate first -> [..., F]."""
        ...


class TorchElementwise:
    """By torch's operators, as training computes it."""

    def normalize(self, states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """See `Elementwise.normalize`."""
        wide = states.float()
        return (wide * rms_scale(wide, epsilon)).to(states.dtype) * weight

    def rotate(self, states: torch.Tensor, num_turned: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See `Elementwise.rotate`."""
        turning, left = states.split((num_turned, states.shape[-2] - num_turned), -2)
        first, second = turning.chunk(2, -1)
        swapped = torch.cat((-second, first), -1).mul_(sin.unsqueeze(-2))
        return torch.cat(((turning * cos.unsqueeze(-2)).add_(swapped), left), -2)

    def gate(self, states: torch.Tensor) -> torch.Tensor:
        """See `Elementwise.gate`."""
        gate, up = states.chunk(2, -1)
        return silu(gate).mul_(up)


def elementwise_for(dtypes: Collection[torch.dtype], device: torch.device, *sizes: int) -> Elementwise:
    """The fastest way for a model.

    Args:
        dtypes, device: of its parameters.
        sizes: D of its hidden states and heads, F of its MLPs.
    """
    is_taken = device.type == "cpu" and set(dtypes) in ({torch.bfloat16}, {torch.float32})
    loops = kernels() if is_taken and Kernels.can_compute(*sizes) else None
    return TorchElementwise() if loops is None else loops
