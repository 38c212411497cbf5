# SPDX-License-Identifier: Apache-2.0
"""Resource pools and who runs on them: on one node and on two, beyond the end of a driver, or not at all."""

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
    merge_resource_pool,
    split_resource_pool,
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


def test_split_and_merge(ray_cluster: str) -> None:
    pool = RayResourcePool([4])
    first, second = split_resource_pool(pool, [1, 3])
    assert (first.process_on_nodes, second.process_on_nodes) == ([1], [3])
    merged = merge_resource_pool(second, first)
    assert merged.process_on_nodes == [4] and merged.local_rank_list() == [0, 1, 2, 3]
    assert set(merged.placement_groups) == set(pool.placement_groups)
    assert [part.world_size for part in split_resource_pool(pool, 2)] == [2, 2]
    with pytest.raises(WorkerError, match="processes in common"):
        merge_resource_pool(pool, first)
    with pytest.raises(WorkerError, match=r"sizes \[3, 3\], expected positive sizes that add up to 4"):
        split_resource_pool(pool, [3, 3])
    with pytest.raises(WorkerError, match="max_colocate_count"):
        merge_resource_pool(first, RayResourcePool([1], max_colocate_count=5))
    first.close()
    assert not first.is_placed and second.is_placed and pool.is_placed, "the whole pool gives the resources back"
    pool.close()


def test_a_pool_gives_back_what_it_took(ray_cluster: str) -> None:
    for _ in range(6):
        pool = RayResourcePool([2], max_colocate_count=1)
        assert len(pool.bundles()) == 2 and pool.is_placed
        pool.close()
        assert not pool.is_placed


def test_no_place_for_one_more_group(ray_cluster: str) -> None:
    small = RayResourcePool([1], name_prefix="small", max_colocate_count=1)
    small.take_share("first")
    with pytest.raises(WorkerError, match=r"pool small: got second as one more group beside first, expected at most 1"):
        RayWorkerGroup(small, RayClassWithInitArgs(Counter), name="second")
    small.close()


def test_a_pool_larger_than_the_cluster(ray_cluster: str) -> None:
    with pytest.raises(
        WorkerError, match=r"pool big \[99\]: .* of 8 CPU free, expected 99 CPU on one node: 91 CPU missing"
    ):
        RayWorkerGroup(RayResourcePool([99], name_prefix="big"), RayClassWithInitArgs(Counter))
    with pytest.raises(
        WorkerError, match=r"of 0 GPU, \d of 8 CPU free, expected 1 GPU, 1 CPU on one node: 1 GPU missing"
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
    assert lines[3] == "without bin_pack: [1, 1]"
    assert "pool big [5]" in lines[4] and lines[4].count("of 4 CPU free") == 2 and "1 CPU missing" in lines[4]


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
print("master is", "rank 0's node" if group.master_address == places[0][1] == places[2][0].master_addr else "wrong")
group.shutdown()
pool.close()
spread = RayResourcePool([2])
spread.spread()
spread.bundles()
print("without bin_pack:", spread.process_on_nodes)
try:
    RayResourcePool([5], name_prefix="big").bundles()
except WorkerError as error:
    print(error)
"""


def test_attach_from_another_driver(ray_cluster: str, drive: Callable[..., str]) -> None:
    """A first driver starts a group and goes; this one finds its processes as they were left."""
    program = DETACHED.format(address=ray_cluster)
    names = drive(program, ray_cluster).split()
    assert names == ["left.behind.counter:0", "left.behind.counter:1"]
    entry = RayClassWithInitArgs(Counter)
    group = RayWorkerGroup.from_detached(name_prefix="left.behind", ray_cls_with_init=entry)
    again = RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=entry)
    assert group.worker_names == names and group.name == "counter"
    assert group.execute_all("count") == again.execute_all("count") == [3, 3]
    assert again.where()[1].master_port == group.master_port
    group.shutdown()
    with pytest.raises(WorkerError, match=r"name_prefix='left.behind'\): got no process with it"):
        RayWorkerGroup.from_detached(name_prefix="left.behind", ray_cls_with_init=entry)
    with pytest.raises(WorkerError, match=r"'left.behind.counter:0': got no such name.*detached=True"):
        RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=entry)
    left = RayResourcePool.from_detached("left")
    assert left.world_size == 2 and left.detached
    left.close()
    with pytest.raises(WorkerError, match=r"from_detached\('left'\): got no placement group"):
        RayResourcePool.from_detached("left")


DETACHED = """
import ray
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.single_controller.ray import *

class Counter(Worker):
    num_steps = 0
    def count(self):
        return self.num_steps
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self):
        return self.place
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self):
        self.num_steps += 1

ray.init(address="{address}", logging_level="ERROR", log_to_driver=False)
pool = RayResourcePool([2], name_prefix="left", detached=True)
entry = RayClassWithInitArgs(Counter)
group = RayWorkerGroup(pool, entry, name_prefix="left.behind", detached=True, name="counter")
for _ in range(3):
    group.step()
print(*group.worker_names)
"""


def test_classes_and_options() -> None:
    entry = RayClassWithInitArgs(ray.remote(runtime_env={"env_vars": {"A": "1"}})(Counter), "x")
    assert entry.cls is Counter and entry.options == {"runtime_env": {"env_vars": {"A": "1"}}}
    entry.set_additional_resource({"licence": 1})
    both = create_colocated_worker_cls({"a": entry, "b": RayClassWithInitArgs(Counter)})
    assert both.options == entry.options and both.additional_resource == {"licence": 1}
    other = RayClassWithInitArgs(Counter)
    other.update_options({"runtime_env": {}})
    with pytest.raises(WorkerError, match="option runtime_env"):
        create_colocated_worker_cls({"a": entry, "b": other})
    with pytest.raises(WorkerError, match="num_cpus"):
        entry.update_options({"num_cpus": 1})
    with pytest.raises(WorkerError, match="got SimpleNamespace, expected a class of workers"):
        RayClassWithInitArgs(SimpleNamespace)
    with pytest.raises(WorkerError, match="no roles"):
        create_colocated_worker_cls({})


def test_names(ray_cluster: str) -> None:
    with pytest.raises(WorkerError, match="no colon in either, and no dot in the name"):
        RayWorkerGroup(ray_cls_with_init=RayClassWithInitArgs(Counter), name="actor.0")
    with pytest.raises(WorkerError, match="ray_cls_with_init: got None"):
        RayWorkerGroup(RayResourcePool([1]))
