# SPDX-License-Identifier: Apache-2.0
"""Resource pools and what runs on them: on one node, on two, or not at all."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from quadriga.errors import WorkerError
from quadriga.single_controller import Dispatch, Worker, WorkerPlace, register
from quadriga.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)

ray = pytest.importorskip("ray")


class Counter(Worker):
    """Counts its steps."""

    num_steps = 0

    def count(self) -> int:
        """Steps so far."""
        return self.num_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> WorkerPlace:
        """Its place."""
        return self.place


def test_a_pool_gives_back_what_it_took(ray_cluster: str) -> None:
    for _ in range(6):
        pool = RayResourcePool([2], max_colocate_count=1)
        assert len(pool.bundles()) == 2 and len(pool.placement_groups) == 1
        pool.close()
        assert not pool.placement_groups


def test_no_place_for_one_more_group(ray_cluster: str) -> None:
    small = RayResourcePool([1], name_prefix="small", max_colocate_count=1)
    small.take_share("first")
    with pytest.raises(WorkerError, match=r"pool small: got second as one more group with first, expected at most 1"):
        RayWorkerGroup(small, RayClassWithInitArgs(Counter), name="second")
    small.close()


def test_a_pool_larger_than_the_cluster(ray_cluster: str) -> None:
    with pytest.raises(
        WorkerError, match=r"pool big \[99\]: .* of 9 CPU free, expected 99 CPU on one node: 90 CPU missing"
    ):
        RayWorkerGroup(RayResourcePool([99], name_prefix="big"), RayClassWithInitArgs(Counter))
    with pytest.raises(
        WorkerError, match=r"of 0 GPU, \d of 9 CPU free, expected 1 GPU, 1 CPU on one node: 1 GPU missing"
    ):
        RayResourcePool([1], use_gpu=True, name_prefix="gpus").bundles()
    with pytest.raises(WorkerError, match=r"pool . \[5\] beside . \[5\]: got .* CPU free, expected 5 CPU free"):
        ResourcePoolManager({"a": [5], "b": [5]}, {"actor": "a", "critic": "b"}).create_resource_pool()
    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert not states & {"PENDING", "PREPARED"}, "nothing was asked of Ray that it could not give"


def test_roles_and_pools() -> None:
    manager = ResourcePoolManager({"a": [2], "b": [1, 1]}, {"actor": "a", "rollout": "a", "critic": "b"})
    assert manager.get_resource_pool("rollout") is manager.get_resource_pool("actor") is manager.pools["a"]
    assert manager.get_n_gpus() == 4
    with pytest.raises(WorkerError, match=r"role judge: got no pool.*actor, rollout, critic"):
        manager.get_resource_pool("judge")
    with pytest.raises(WorkerError, match=r"pool of the role critic: got 'c', expected one of a, b"):
        ResourcePoolManager({"a": [2], "b": [1]}, {"actor": "a", "critic": "c"})
    with pytest.raises(WorkerError, match="resource pool b: got no role on it; roles: actor"):
        ResourcePoolManager({"a": [2], "b": [1]}, {"actor": "a"})


def test_two_nodes(two_nodes: str, drive: Callable[..., str]) -> None:
    """Ranks stand in the order of the nodes' addresses; local ranks count on each node; rank 0's node is the master."""
    lines = [line for line in drive(TWO_NODES, two_nodes).splitlines() if not line.startswith("waiting")]
    assert lines[0] == "[2, 1] over 2 nodes"
    assert lines[1].split() == ["0/3:0/2@1", "1/3:1/2@1", "2/3:0/1@2"]
    assert lines[2] == "master is rank 0's node"
    assert "pool big [5]" in lines[3] and lines[3].count("of 4 CPU free") == 2 and "1 CPU missing" in lines[3]
    assert lines[4].startswith(
        "notice: resource pool three [1, 1, 1]: 3 nodes wanted (trainer.nnodes), 2 used, with [2"
    )


TWO_NODES = """
import ray
from quadriga.errors import WorkerError
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.single_controller.resource_pool import address_order
from quadriga.single_controller.ray import *

class Where(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self):
        return self.place, ray.util.get_node_ip_address()

def seats(group):
    nodes = sorted({node["NodeManagerAddress"] for node in ray.nodes()}, key=address_order)
    for place, node in group.where():
        rank = f"{place.rank}/{place.world_size}:{place.local_rank}/{place.local_world_size}"
        yield f"{rank}@{nodes.index(node) + 1}"

ray.init(logging_level="ERROR", log_to_driver=False)
pool = RayResourcePool([2, 1])
group = RayWorkerGroup(pool, RayClassWithInitArgs(Where))
places = group.where()
print(pool.process_on_nodes, "over", len({node for _, node in places}), "nodes")
print(*seats(group))
is_first = group.processes.addresses[0].node == places[0][1] == places[2][0].master_addr
print("master is", "rank 0's node" if is_first else "wrong")
group.shutdown()
pool.close()
try:
    RayResourcePool([5], name_prefix="big").bundles()
except WorkerError as error:
    print(error)
RayResourcePool([1, 1, 1], name_prefix="three").bundles()
"""


def test_classes_and_options() -> None:
    entry = RayClassWithInitArgs(ray.remote(runtime_env={"env_vars": {"A": "1"}})(Counter), "x")
    assert entry.cls is Counter and entry.options == {"runtime_env": {"env_vars": {"A": "1"}}}
    both = create_colocated_worker_cls({"a": entry, "b": RayClassWithInitArgs(Counter)})
    assert both.options == entry.options
    other = RayClassWithInitArgs(ray.remote(runtime_env={"env_vars": {"A": "2"}})(Counter))
    with pytest.raises(WorkerError, match="option runtime_env"):
        create_colocated_worker_cls({"a": entry, "b": other})
    with pytest.raises(WorkerError, match="num_cpus"):
        RayClassWithInitArgs(ray.remote(num_cpus=1)(Counter))
    with pytest.raises(WorkerError, match="got SimpleNamespace, expected a class of workers"):
        RayClassWithInitArgs(SimpleNamespace)
    with pytest.raises(WorkerError, match="no roles"):
        create_colocated_worker_cls({})
