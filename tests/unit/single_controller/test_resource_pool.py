# SPDX-License-Identifier: Apache-2.0
"""Ranks by node, and which node of a cluster takes which part of a pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.errors import WorkerError
from quadriga.single_controller import ResourcePool
from quadriga.single_controller.resource_pool import NodeResources, address_order, choose_nodes


def test_nodes_of_unequal_size() -> None:
    pool = ResourcePool(process_on_nodes=[4, 2])
    assert pool.world_size == 6
    assert repr(pool) == "ResourcePool(process_on_nodes=[4, 2])"


@pytest.mark.parametrize("nodes", [[], [4, 0]])
def test_a_node_needs_a_process(nodes: list[int]) -> None:
    with pytest.raises(WorkerError, match="process_on_nodes"):
        ResourcePool(nodes)


def node(address: str, free: float, total: float = 8, gpus: float = 0) -> NodeResources:
    return NodeResources(f"id-{address}", address, {"CPU": total, "GPU": gpus}, {"CPU": free, "GPU": gpus})


def addresses(pools: dict[str, list[int]], nodes: list[NodeResources], each: dict[str, float] | None = None):
    chosen = choose_nodes(pools, each or {"CPU": 1}, nodes)
    return {name: [node.address for node in row] for name, row in chosen.items()}


def test_addresses_sort_as_numbers() -> None:
    names = ["node-b", "10.0.0.10", "fd00::2", "10.0.0.9", "node-a", "2.0.0.1"]
    assert sorted(names, key=address_order) == ["2.0.0.1", "10.0.0.9", "10.0.0.10", "fd00::2", "node-a", "node-b"]


def test_nodes_of_a_pool_are_different_nodes() -> None:
    nodes = [node("10.0.0.10", 8), node("10.0.0.9", 8)]
    assert addresses({"a": [4, 4]}, nodes) == {"a": ["10.0.0.9", "10.0.0.10"]}
    assert addresses({"a": [2, 2]}, [node("10.0.0.9", 8)]) == {"a": ["10.0.0.9", "10.0.0.9"]}, "unless there are none"


def test_a_pool_goes_where_the_least_is_left_over() -> None:
    nodes = [node("10.0.0.1", 8), node("10.0.0.2", 3)]
    assert addresses({"a": [2]}, nodes) == {"a": ["10.0.0.2"]}
    assert addresses({"a": [1], "b": [7], "c": [3]}, nodes) == {"a": ["10.0.0.1"], "b": ["10.0.0.1"], "c": ["10.0.0.2"]}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_no_node_gives_more_than_it_has(counts: list[int], free: list[int]) -> None:
    """What is chosen fits; nothing is refused that one node could take whole."""
    nodes = [node(f"10.0.0.{number}", amount) for number, amount in enumerate(free)]
    try:
        chosen = addresses({"a": counts}, nodes)["a"]
    except WorkerError:
        assert sum(counts) > max(free)
        return
    for each in nodes:
        assert (
            sum(count for count, place in zip(counts, chosen, strict=True) if place == each.address) <= each.free["CPU"]
        )


def test_what_is_missing_is_said() -> None:
    gpu = {"GPU": 1.0, "CPU": 1.0}
    with pytest.raises(
        WorkerError, match=r"pool a \[2\]: got 10.0.0.1 has 1 of 1 GPU, 4 of 8 CPU free, .* 1 GPU missing"
    ):
        choose_nodes({"a": [2]}, gpu, [node("10.0.0.1", 4, gpus=1)])
    with pytest.raises(
        WorkerError, match=r"pool b \[3\] beside a \[3\]: .*expected 3 CPU free on one node: 1 CPU miss"
    ):
        choose_nodes({"a": [3], "b": [3]}, {"CPU": 1}, [node("10.0.0.1", 5)])
    with pytest.raises(WorkerError, match=r"got a cluster without nodes, expected 1 CPU on one node: 1 CPU missing"):
        choose_nodes({"a": [1]}, {"CPU": 1}, [])
