# SPDX-License-Identifier: Apache-2.0
"""Groups of responses to the same prompt, and statistics of a response relative to its group.

Groups may have any size, and their rows may be in any order. A group of one has no other response
to compare with: `centered` takes its mean as 0, and `deviation` is 1, so that its score is not
changed.

A rollout may have several rows: of several agents, or of the branches of a conversation. With
`rollout_id`, each rollout counts once in means and deviations, however many rows it has.

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
    size: Tensor  # [B] int64: number of rollouts in the row's group
    num_groups: int
    # [B] float32: 1 / rows of the row's rollout in its group. None: every row is a rollout.
    row_weight: Tensor | None = None

    @classmethod
    def of(
        cls,
        uid: Iterable[Hashable],
        scores: Tensor,
        rollout_id: Iterable[Hashable] | None = None,
    ) -> "Groups":
        """Group rows that have the same `uid`.

        Args:
            uid: array, list or tensor of B names or numbers.
            scores: [B] or [B, T]; read for its length and device.
            rollout_id: name of each row's rollout, [B]. None: every row is a rollout.

        Returns:
            The groups, numbered in the order of their first rows.

        Raises:
            ProtocolError: `uid` does not have B entries.
        """
        numbers = _number_names(uid)
        if len(numbers) != len(scores):
            raise ProtocolError(
                "uid",
                got=f"{len(numbers)} entries",
                expected=f"{len(scores)}, one per sequence",
                fix="Give every row a uid.",
            )

        num_groups = max(numbers, default=-1) + 1
        member = torch.tensor(numbers, dtype=torch.int64, device=scores.device)
        group_sizes = torch.bincount(member, minlength=num_groups)  # [G]
        groups = cls(member, group_sizes[member], num_groups)
        if rollout_id is None:
            return groups

        # Group the rows by group and rollout: a rollout with rows in several groups counts once in
        # each. The weights of a rollout's rows add up to 1 in a group, and those of all rows of the
        # group to its number of rollouts.
        rollout_numbers = _number_names(rollout_id)
        rollouts = cls.of(zip(numbers, rollout_numbers, strict=True), scores)
        row_weight = 1 / rollouts.size.float()
        size = groups.sum(row_weight).round().long()
        return cls(member, size, num_groups, row_weight)

    def count(self, is_chosen: Tensor) -> Tensor:
        """Count the rollouts of the chosen rows, over all groups: [B] bool to []."""
        if self.row_weight is None:
            return is_chosen.sum()
        return (is_chosen * self.row_weight).sum().round()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the group of each row: [B] to [B], or [B, T] to [B, T]."""
        zeros = values.new_zeros(self.num_groups, *values.shape[1:])
        return zeros.index_add(0, self.member, values)[self.member]

    def smallest(self, values: Tensor) -> Tensor:
        """Smallest value in the group of each row: [B] to [B], or [B, T] to [B, T]."""
        zeros = values.new_zeros(self.num_groups, *values.shape[1:])
        index = self.member
        if values.dim() > 1:
            # Unlike `index_add`, `scatter_reduce` needs an index for every element.
            index = index[:, None].expand_as(values)
        # Without `include_self`, the zeros themselves do not count.
        minima = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
        return minima[self.member]

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the rollouts of each row's group: [B] to [B].

        For a group of one it is the group's value, although `centered` takes the mean as 0.
        """
        weights = self._weights(values)
        return self.sum(values * weights) / self.sum(weights)

    def _weights(self, values: Tensor) -> Tensor:
        """Weight of each row in means over rollouts, [B]."""
        if self.row_weight is None:
            return torch.ones_like(values)
        return self.row_weight.to(values)

    def centered(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Subtract the mean of the group from each value.

        Args:
            values: [B].
            weights: weights of the rows in the mean, [B]; their sum must not be 0 in any group.
                None weighs all rollouts equally.

        Returns:
            The differences, [B]. Values that are all equal give exactly 0; a group of one keeps
            its value.
        """
        if weights is None:
            weights = self._weights(values)
        # Subtracting the smallest value first makes equal values exactly 0. Otherwise a rounding
        # error would remain, which the division by a tiny standard deviation would amplify.
        distance = values - self.smallest(values)
        mean = self.sum(distance * weights) / self.sum(weights)
        return torch.where(self.size > 1, distance - mean, values)

    def deviation(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation of each row's group: [B] to [B]; 1 for a group of one."""
        degrees_of_freedom = (self.size - 1).clamp(min=1)
        squares = self.centered(values).square()
        if self.row_weight is not None:
            squares = squares * self.row_weight
        variance = self.sum(squares) / degrees_of_freedom
        return torch.where(self.size > 1, variance.sqrt(), 1.0)


def _number_names(names: Iterable[Hashable]) -> list[int]:
    """Replace names by numbers, which count from 0 in the order of first occurrence."""
    numbers = {}
    values = names.tolist() if isinstance(names, Tensor) else names
    return [numbers.setdefault(name, len(numbers)) for name in values]
