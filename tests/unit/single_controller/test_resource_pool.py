# SPDX-License-Identifier: Apache-2.0
"""Pools of processes, and the share of the cores that each process gets."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.errors import WorkerError
from quadriga.single_controller import ResourcePool
from quadriga.single_controller.resource_pool import (
    NodeResources,
    address_order,
    choose_nodes,
    share_of_cores,
)


def test_nodes_of_unequal_size() -> None:
    pool = ResourcePool(process_on_nodes=[4, 2])
    assert pool.world_size == 6
    assert repr(pool) == "ResourcePool(process_on_nodes=[4, 2])"


@pytest.mark.parametrize("nodes", [[], [4, 0]])
def test_a_node_needs_a_process(nodes: list[int]) -> None:
    with pytest.raises(WorkerError, match="process_on_nodes"):
        ResourcePool(nodes)


def node(address: str, free: float, total: float = 8, gpus: float = 0) -> NodeResources:
    return NodeResources(
        f"id-{address}", address, {"CPU": total, "GPU": gpus}, {"CPU": free, "GPU": gpus}
    )


def addresses(
    pools: dict[str, list[int]], nodes: list[NodeResources], each: dict[str, float] | None = None
):
    chosen = choose_nodes(pools, each or {"CPU": 1}, nodes)
    return {name: [node.address for node in row] for name, row in chosen.items()}


def test_addresses_sort_as_numbers() -> None:
    names = ["node-b", "10.0.0.10", "fd00::2", "10.0.0.9", "node-a", "2.0.0.1"]
    assert sorted(names, key=address_order) == [
        "2.0.0.1",
        "10.0.0.9",
        "10.0.0.10",
        "fd00::2",
        "node-a",
        "node-b",
    ]


def test_nodes_of_a_pool_are_different_nodes() -> None:
    nodes = [node("10.0.0.10", 8), node("10.0.0.9", 8)]
    assert addresses({"a": [4, 4]}, nodes) == {"a": ["10.0.0.9", "10.0.0.10"]}
    assert addresses({"a": [2, 2]}, [node("10.0.0.9", 8)]) == {"a": ["10.0.0.9", "10.0.0.9"]}, (
        "unless there are none"
    )


def test_a_pool_goes_where_the_least_is_left_over() -> None:
    nodes = [node("10.0.0.1", 8), node("10.0.0.2", 3)]
    assert addresses({"a": [2]}, nodes) == {"a": ["10.0.0.2"]}
    assert addresses({"a": [1], "b": [7], "c": [3]}, nodes) == {
        "a": ["10.0.0.1"],
        "b": ["10.0.0.1"],
        "c": ["10.0.0.2"],
    }


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
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
            sum(count for count, place in zip(counts, chosen, strict=True) if place == each.address)
            <= each.free["CPU"]
        )


def test_what_is_missing_is_said() -> None:
    gpu = {"GPU": 1.0, "CPU": 1.0}
    with pytest.raises(
        WorkerError,
        match=r"pool a \[2\]: got 10.0.0.1 has 1 of 1 GPU, 4 of 8 CPU free, .* 1 GPU missing",
    ):
        choose_nodes({"a": [2]}, gpu, [node("10.0.0.1", 4, gpus=1)])
    with pytest.raises(
        WorkerError,
        match=r"pool b \[3\] beside a \[3\]: .*expected 3 CPU free on one node: 1 CPU miss",
    ):
        choose_nodes({"a": [3], "b": [3]}, {"CPU": 1}, [node("10.0.0.1", 5)])
    with pytest.raises(
        WorkerError, match=r"got a cluster without nodes, expected 1 CPU on one node: 1 CPU missing"
    ):
        choose_nodes({"a": [1]}, {"CPU": 1}, [])


@pytest.mark.parametrize(
    ("cores", "processes", "threads"),
    [(8, 1, 8), (8, 2, 4), (8, 3, 2), (8, 8, 1), (2, 5, 1), (1, 1, 1)],
)
def test_the_processes_of_a_pool_never_have_more_threads_than_cores_unless_there_are_too_few(
    cores, processes, threads
):
    share = share_of_cores(cores, processes)

    assert share.num_threads == threads
    assert share.num_threads * processes <= max(cores, processes)


def test_a_process_alone_on_its_node_may_spin():
    share = share_of_cores(4, 1)

    assert share.environment() == {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    assert share.reason == "4 threads a process: alone on 4 cores"


def test_processes_that_share_a_node_sleep_while_they_wait():
    share = share_of_cores(2, 2)

    assert share.environment() == {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    assert share.reason == (
        "1 thread a process: 2 processes of the pool share 2 cores; "
        "waiting threads sleep, since 2 processes are on the node"
    )


def test_pools_take_turns_so_another_one_changes_the_waiting_and_not_the_threads():
    alone, together = share_of_cores(8, 2), share_of_cores(8, 2, processes_on_node=6)

    assert (alone.num_threads, together.num_threads) == (4, 4)
    assert share_of_cores(8, 1, processes_on_node=2).is_passive
    assert "6 processes are on the node" in together.reason


def test_more_processes_than_cores_are_said():
    assert (
        "3 processes of the pool share 2 cores, which is more than there are"
        in share_of_cores(2, 3).reason
    )


@pytest.mark.parametrize(("cores", "processes"), [(0, 1), (4, 0)])
def test_a_share_of_nothing_is_an_error(cores, processes):
    with pytest.raises(WorkerError, match=f"got {cores} cores for {processes} processes"):
        share_of_cores(cores, processes)


def test_torch_computes_with_the_share():
    """It does not show what the wait policy does: that is a matter of time on a loaded machine."""
    environment = share_of_cores(2, 2).environment()

    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads())"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == "1"
