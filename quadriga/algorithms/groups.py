# SPDX-License-Identifier: Apache-2.0
"""Groups of responses to the same prompt, and statistics of a response relative to its group.

Groups may have any size, and their rows may stand in any order. A group of one has no other
response to compare with: its mean is taken as 0 and its standard deviation as 1, so that its score
passes through unchanged.

Shapes: B sequences, T response positions, G groups.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Groups:
    """Partition of B rows by `uid`.

    The methods take one value per row, [B], and return the statistic of its group for each row,
    [B]. `sum` and `smallest` also take [B, T] and treat each position separately.
    """

    member: Tensor  # [B] int64: number of the row's group, 0 to G - 1
    size: Tensor  # [B] int64: number of rows in the row's group
    num_groups: int

    @classmethod
    def of(cls, uid: Iterable[Hashable], scores: Tensor) -> "Groups":
        """Group rows that have the same `uid`.

        Args:
            uid: array, list or tensor of B names or numbers.
            scores: [B] or [B, T]; read for its length and device.

        Returns:
            The groups, numbered in the order of their first rows.

        Raises:
            ProtocolError: `uid` does not have B entries.
        """
        # Numbered in the order of first occurrence, so that the result is deterministic.
        group_numbers: dict[Hashable, int] = {}
        names = uid.tolist() if isinstance(uid, Tensor) else uid
        numbers = [group_numbers.setdefault(name, len(group_numbers)) for name in names]
        if len(numbers) != len(scores):
            raise ProtocolError(
                "uid",
                got=f"{len(numbers)} entries",
                expected=f"{len(scores)}, one per sequence",
                fix="Give every row a uid.",
            )

        num_groups = len(group_numbers)
        member = torch.tensor(numbers, dtype=torch.int64, device=scores.device)
        group_sizes = torch.bincount(member, minlength=num_groups)  # [G]
        return cls(member, group_sizes[member], num_groups)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the group of each row: [B] to [B], or [B, T] to [B, T]."""
        zeros = values.new_zeros(self.num_groups, *values.shape[1:])
        return zeros.index_add(0, self.member, values)[self.member]

    def smallest(self, values: Tensor) -> Tensor:
        """Smallest value in the group of each row: [B] to [B], or [B, T] to [B, T]."""
        zeros = values.new_zeros(self.num_groups, *values.shape[1:])
        index = self.member
        if values.dim() > 1:
            # Unlike `index_add`, `scatter_reduce` wants an index for every element.
            index = index[:, None].expand_as(values)
        minima = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
        return minima[self.member]

    def centered(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Subtract the mean of the group from each value.

        Args:
            values: [B].
            weights: weights of the rows in the mean, [B]; their sum must not be 0 in any group.
                None weighs all rows equally.

        Returns:
            The differences, [B]. Values that are all equal give exactly 0; a group of one keeps
            its value.
        """
        if weights is None:
            weights = torch.ones_like(values)
        # Subtracting the smallest value first makes equal values exactly 0. A rounding error here
        # would be amplified when it is divided by a tiny standard deviation.
        distance = values - self.smallest(values)
        mean = self.sum(distance * weights) / self.sum(weights)
        return torch.where(self.size > 1, distance - mean, values)

    def deviation(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation of each row's group: [B] to [B]; 1 for a group of one."""
        degrees_of_freedom = (self.size - 1).clamp(min=1)
        variance = self.sum(self.centered(values).square()) / degrees_of_freedom
        return torch.where(self.size > 1, variance.sqrt(), 1.0)
