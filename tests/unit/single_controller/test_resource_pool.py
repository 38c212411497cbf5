# SPDX-License-Identifier: Apache-2.0
"""Ranks by node."""

import pytest

from quadriga.errors import WorkerError
from quadriga.single_controller import ResourcePool


def test_nodes_of_unequal_size() -> None:
    pool = ResourcePool(process_on_nodes=[4, 2])
    assert pool.world_size == 6
    assert pool.local_world_size_list() == [4, 4, 4, 4, 2, 2]
    assert pool.local_rank_list() == [0, 1, 2, 3, 0, 1]
    assert repr(pool) == "ResourcePool(process_on_nodes=[4, 2])"


@pytest.mark.parametrize("nodes", [[], [4, 0]])
def test_a_node_needs_a_process(nodes: list[int]) -> None:
    with pytest.raises(WorkerError, match="process_on_nodes"):
        ResourcePool(nodes)
