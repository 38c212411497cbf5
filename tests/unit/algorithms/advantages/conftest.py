# SPDX-License-Identifier: Apache-2.0
"""Random batches for slow references: groups of unequal size in shuffled order, gaps in the mask, an empty row."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch


@dataclass(frozen=True)
class Batch:
    """What an estimator may read, in float64, and the score of each row."""

    rewards: torch.Tensor
    mask: torch.Tensor
    uid: np.ndarray
    values: torch.Tensor
    baselines: torch.Tensor

    @property
    def scores(self) -> list[float]:
        """The sum of each row's rewards."""
        return self.rewards.sum(-1).tolist()

    def group(self, row: int) -> list[int]:
        """The rows that answer the same prompt as `row`, itself among them."""
        return [other for other in range(len(self.uid)) if self.uid[other] == self.uid[row]]


@pytest.fixture(params=range(4))
def batch(request: pytest.FixtureRequest) -> Batch:
    """Twelve rows in groups of 1, 2, 4 and 5."""
    generator = torch.Generator().manual_seed(request.param)
    names = ["lone"] + ["pair"] * 2 + ["four"] * 4 + ["five"] * 5
    order = torch.randperm(len(names), generator=generator).tolist()
    uid = np.array([names[row] for row in order], dtype=object)
    shape = (len(names), 6)
    mask = (torch.rand(shape, generator=generator) < 0.7).long()
    mask[:, 0] = 1
    mask[order.index(9)] = 0

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    return Batch(noise(*shape) * mask, mask, uid, noise(*shape), noise(len(names)))
