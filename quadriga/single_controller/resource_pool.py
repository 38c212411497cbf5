# SPDX-License-Identifier: Apache-2.0
"""Processes by node: the shape of what a worker group runs on."""

from collections.abc import Sequence

from quadriga.errors import WorkerError


class ResourcePool:
    """Numbers of processes on each node.

    Args:
        process_on_nodes: one number per node; [4, 4] is eight processes on two nodes.
    """

    def __init__(self, process_on_nodes: Sequence[int]) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise WorkerError(
                "ResourcePool.process_on_nodes", got=str(list(process_on_nodes)), expected="at least 1 process per node"
            )
        self.process_on_nodes = list(process_on_nodes)

    @property
    def world_size(self) -> int:
        """Processes on all nodes together."""
        return sum(self.process_on_nodes)

    def local_world_size_list(self) -> list[int]:
        """For each rank, how many ranks its node has: [4, 2] gives 4 4 4 4 2 2."""
        return [count for count in self.process_on_nodes for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number on its node: [4, 2] gives 0 1 2 3 0 1."""
        return [local_rank for count in self.process_on_nodes for local_rank in range(count)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process_on_nodes={self.process_on_nodes})"
