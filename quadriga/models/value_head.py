# SPDX-License-Identifier: Apache-2.0
"""The head of a value function.

Legend: D hidden size.
"""

import torch
from torch import nn
from torch.nn.functional import linear


class ValueHead(nn.Module):
    """One number per hidden state, in float32: [..., D] -> [...]. It starts at zero, so the first values are zero."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden.float(), self.linear.weight.float(), self.linear.bias.float())[..., 0]
