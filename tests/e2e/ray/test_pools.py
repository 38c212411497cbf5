# SPDX-License-Identifier: Apache-2.0
"""Resource pools and what runs on them, or does not. Pools over two nodes: test_failures.py has such a cluster."""

from types import SimpleNamespace

import pytest

from quadriga.errors import WorkerError
from quadriga.single_controller import Worker
from quadriga.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)

ray = pytest.importorskip("ray")


class Counter(Worker):
    """Only its name is read."""


def test_a_pool_gives_back_what_it_took(ray_cluster: str) -> None:
    for _ in range(6):
        pool = RayResourcePool([2], max_colocate_count=1)
        assert len(pool.bundles()) == 2 and len(pool.placement_groups) == 1
        pool.close()
        assert not pool.placement_groups


def test_no_place_for_one_more_group(ray_cluster: str) -> None:
    small = RayResourcePool([1], name_prefix="small", max_colocate_count=1)
    small.take_share("first")
    with pytest.raises(
        WorkerError,
        match=r"pool small: got second as one more group with first, expected at most 1",
    ):
        RayWorkerGroup(small, RayClassWithInitArgs(Counter), name="second")
    small.close()


def test_a_pool_larger_than_the_cluster(ray_cluster: str) -> None:
    with pytest.raises(
        WorkerError,
        match=r"pool big \[99\]: .* of 9 CPU free, expected 99 CPU on one node: 90 CPU missing",
    ):
        RayWorkerGroup(RayResourcePool([99], name_prefix="big"), RayClassWithInitArgs(Counter))
    with pytest.raises(
        WorkerError,
        match=r"of 0 GPU, \d of 9 CPU free, expected 1 GPU, 1 CPU on one node: 1 GPU missing",
    ):
        RayResourcePool([1], use_gpu=True, name_prefix="gpus").bundles()
    with pytest.raises(
        WorkerError, match=r"pool . \[5\] beside . \[5\]: got .* CPU free, expected 5 CPU free"
    ):
        ResourcePoolManager(
            {"a": [5], "b": [5]}, {"actor": "a", "critic": "b"}
        ).create_resource_pool()
    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert not states & {"PENDING", "PREPARED"}, "nothing was asked of Ray that it could not give"


def test_roles_and_pools(ray_cluster: str) -> None:
    manager = ResourcePoolManager(
        {"a": [2], "b": [1, 1]}, {"actor": "a", "rollout": "a", "critic": "b"}
    )
    assert (
        manager.get_resource_pool("rollout")
        is manager.get_resource_pool("actor")
        is manager.pools["a"]
    )
    assert manager.get_n_gpus() == 4
    wide = ResourcePoolManager(
        {"a": [2], "b": [1]}, {"actor": "a", "rollout": "b"}, devices={"b": 3}
    )
    assert (wide.get_n_gpus(), wide.pools["b"].world_size) == (5, 1)
    [bundle], share = wide.create_resource_pool()["b"].take_share("group")
    taken = ray.util.placement_group_table(bundle.placement_group)["bundles"][bundle.index]
    assert taken["CPU"] == 3.0 and share["num_cpus"] == pytest.approx(0.3)
    wide.close()
    with pytest.raises(WorkerError, match=r"role judge: got no pool.*actor, rollout, critic"):
        manager.get_resource_pool("judge")
    with pytest.raises(
        WorkerError, match=r"pool of the role critic: got 'c', expected one of the pools a, b"
    ):
        ResourcePoolManager({"a": [2], "b": [1]}, {"actor": "a", "critic": "c"})
    with pytest.raises(WorkerError, match="resource pool b: got no role on it; roles: actor"):
        ResourcePoolManager({"a": [2], "b": [1]}, {"actor": "a"})


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
