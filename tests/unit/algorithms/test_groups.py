# SPDX-License-Identifier: Apache-2.0
"""Groups by uid: sizes, sums, distances and deviations, in any order and for any kind of name."""

import numpy as np
import pytest
import torch

from quadriga.algorithms.groups import Groups
from quadriga.errors import ProtocolError

SCORES = torch.tensor([1.0, 10.0, 2.0, 20.0, 5.0])


@pytest.mark.parametrize(
    "uid",
    [
        ["x", "y", "x", "y", "z"],
        np.array(["x", "y", "x", "y", 3], dtype=object),
        torch.tensor([7, 1, 7, 1, 4]),
    ],
)
def test_values_by_hand(uid) -> None:
    """Two pairs and a lone row, named by strings, by mixed objects and by numbers."""
    groups = Groups.of(uid, SCORES)
    assert groups.size.tolist() == [2, 2, 2, 2, 1] and groups.num_groups == 3
    assert groups.sum(SCORES).tolist() == [3.0, 30.0, 3.0, 30.0, 5.0]
    assert groups.smallest(-SCORES).tolist() == [-2.0, -20.0, -2.0, -20.0, -5.0]
    assert groups.centered(SCORES).tolist() == [-0.5, -5.0, 0.5, 5.0, 5.0]
    torch.testing.assert_close(
        groups.deviation(SCORES), torch.tensor([0.5, 50.0, 0.5, 50.0, 1.0]).sqrt()
    )


def test_weighted_mean() -> None:
    """Weights 3 and 1 pull the mean of 10 and 20 to 12.5."""
    weights = torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0])
    assert Groups.of(["x", "y", "x", "y", "z"], SCORES).centered(SCORES, weights)[
        [1, 3]
    ].tolist() == [-2.5, 7.5]


def test_every_row_needs_a_name() -> None:
    """Too few names are an error that says so."""
    with pytest.raises(ProtocolError, match="uid: got 2 entries, expected 5"):
        Groups.of(["x", "y"], SCORES)
