# SPDX-License-Identifier: Apache-2.0
"""Groups of responses to the same prompt, and a score relative to its group.

Groups may have any size and their rows any order. A group of one has nothing to be compared with: its mean is taken
as 0 and its standard deviation as 1, so that its score passes unchanged.

Shapes: B sequences, T response positions, G groups.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Groups:
    """The partition of B rows by `uid`; every method takes [B] and gives each row the value of its group, [B].

    `sum` and `smallest` take [B, T] as well and treat each position on its own.
    """

    member: Tensor  # [B] int64: the number of the row's group, from 0 to G - 1
    size: Tensor  # [B] int64: how many rows the row's group has
    num_groups: int

    @classmethod
    def of(cls, uid: Iterable[Hashable], scores: Tensor) -> "Groups":
        """Group the rows of `scores` [B] by equal `uid` (an array, list or tensor of B names or numbers)."""
        numbers: dict[Hashable, int] = {}
        names = uid.tolist() if isinstance(uid, Tensor) else uid
        rows = [numbers.setdefault(name, len(numbers)) for name in names]
        if len(rows) != len(scores):
            expected = f"{len(scores)}, one per sequence"
            raise ProtocolError(
                "uid", got=f"{len(rows)} entries", expected=expected, fix="Give every row a uid."
            )
        member = torch.tensor(rows, dtype=torch.int64, device=scores.device)
        return cls(member, torch.bincount(member, minlength=len(numbers))[member], len(numbers))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the group: [B] or [B, T]."""
        blank = values.new_zeros(self.num_groups, *values.shape[1:])
        return blank.index_add(0, self.member, values)[self.member]

    def smallest(self, values: Tensor) -> Tensor:
        """The smallest value of the group: [B] or [B, T]."""
        blank = values.new_zeros(self.num_groups, *values.shape[1:])
        rows = self.member if values.dim() == 1 else self.member[:, None].expand_as(values)
        return blank.scatter_reduce(0, rows, values, "amin", include_self=False)[self.member]

    def centered(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Each value [B] minus the mean of its group, weighted if `weights` [B] are given (their sums must not be 0).

        Values that are all alike give exactly 0: distances are taken from the group's smallest value first, so
        that no rounding error is left for a later division by a tiny deviation to blow up.
        """
        weights = torch.ones_like(values) if weights is None else weights
        distance = values - self.smallest(values)
        mean = self.sum(distance * weights) / self.sum(weights)
        return torch.where(self.size > 1, distance - mean, values)

    def deviation(self, values: Tensor) -> Tensor:
        """The unbiased standard deviation of the group, [B]; 1 for a group of one."""
        variance = self.sum(self.centered(values).square()) / (self.size - 1).clamp(min=1)
        return torch.where(self.size > 1, variance.sqrt(), 1.0)
