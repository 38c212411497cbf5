# SPDX-License-Identifier: Apache-2.0
"""Worker groups on real Ray processes: how calls are split and collected, who runs where, and what is refused.

Two groups serve most tests: one of 4 processes with two roles in each, and one of 2 processes. What arguments
look like on their way is the business of test_transport.py, and what happens when a worker fails or cannot be built of
test_failures.py.
"""

import gc
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clumsy import is_gone
from quadriga.errors import WorkerError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.single_controller import (
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from quadriga.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

ray = pytest.importorskip("ray")


def reverse_split(
    group: Any, data: DataProto
) -> tuple[list[list[DataProto]], dict[str, list[Any]]]:
    """A mode of one's own: the last rank has the first rows."""
    return [data.chunk(group.world_size)[::-1]], {}


def reverse_collect(group: Any, outputs: list[DataProto]) -> DataProto:
    """The rows in their old order."""
    return DataProto.concat(outputs[::-1])


REVERSED = {"dispatch_fn": reverse_split, "collect_fn": reverse_collect}
ON_MESH = make_nd_compute_dataproto_dispatch_fn("train")


class Teller(Worker):
    """Tells what it was given, and where it is."""

    def __init__(self, name: str = "teller", model_parallel: int = 1) -> None:
        self.name, self.num_calls = name, 0
        self.register_mesh("train", self.rank // model_parallel, self.rank % model_parallel == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> dict[str, Any]:
        """Place, process and environment."""
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
        environment = {name: os.environ[name] for name in names} | {"collects": gc.isenabled()}
        return {
            "place": self.place,
            "pid": os.getpid(),
            "node": ray.util.get_node_ip_address(),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            **environment,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def told(self, value: object, *, more: object = None) -> tuple[Any, ...]:
        """Rank, name and arguments."""
        return self.rank, self.name, value, more

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def told_each(self, value: object, *, more: object = None) -> tuple[Any, ...]:
        """Rank and arguments."""
        return self.rank, value, more

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def computed_each(self, value: int) -> int:
        """One number for each rank."""
        return value * 10

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def told_first(self, data: DataProto) -> tuple[int, int]:
        """Rank and number of rows."""
        return self.rank, len(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def executed_first(self) -> int:
        """Rank."""
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data: DataProto, scale: int = 2) -> DataProto:
        """The rows, multiplied, and the rank that had them."""
        self.num_calls += 1
        seen = {"x": data.batch["x"] * scale, "rank": torch.full((len(data),), self.rank)}
        metrics = {"rows": len(data)}
        return DataProto.from_dict(
            seen, {"uid": data.non_tensor_batch["uid"]}, meta_info={"metrics": metrics}
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def rows_later(self, data: DataProto, scale: int = 2) -> DataProto:
        """The same as a future."""
        return self.rows(data, scale)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def kinds(self, data: object) -> DataProto:
        """Whether the argument is a future."""
        return DataProto.from_dict({"is_future": torch.tensor([isinstance(data, DataProtoFuture)])})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def nothing(self, data: DataProto) -> None:
        """No output."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def a_number(self, data: DataProto) -> int:
        """An output that cannot be concatenated."""
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def num_rows(self, data: DataProto) -> int:
        """How many rows this rank has."""
        return len(data)

    @register(dispatch_mode=ON_MESH)
    def rows_on_mesh(self, data: DataProto) -> DataProto:
        """As `rows`; every rank answers, one of each model-parallel group is heard."""
        return self.rows(data)

    @register(dispatch_mode=ON_MESH, blocking=False)
    def rows_on_mesh_later(self, data: DataProto) -> DataProto:
        """The same as a future."""
        return self.rows(data)

    @register(dispatch_mode=REVERSED)
    def rows_reversed(self, data: DataProto) -> DataProto:
        """As `rows`, split by functions of one's own."""
        return self.rows(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def think(self) -> int:
        """A coroutine."""
        return self.rank

    def count(self) -> int:
        """Not registered: reached by name."""
        return self.num_calls


class Heir(Teller):
    """Forgets to register its override."""

    def num_rows(self, data: DataProto) -> int:
        """Without @register."""
        return 0


@pytest.fixture(scope="module")
def together(ray_cluster: str) -> Iterator[RayWorkerGroup[Any]]:
    """4 processes with two roles in each; the second has two model-parallel ranks to each data-parallel one."""
    pool = RayResourcePool([4], name_prefix="shared", max_colocate_count=3)
    roles = {
        "actor": RayClassWithInitArgs(Teller, "a"),
        "critic": RayClassWithInitArgs(Teller, "c", model_parallel=2),
    }
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles))
    yield group
    group.shutdown()
    pool.close()


@pytest.fixture(scope="module")
def pair(ray_cluster: str) -> Iterator[RayWorkerGroup[Teller]]:
    """A group of 2 processes. What they have started ends with them."""
    pool = RayResourcePool([2])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Teller)), name="part2")
    yield group
    child = group.execute_func_rank_zero(
        lambda words: subprocess.Popen(words).pid, ["sleep", "600"]
    )
    group.shutdown()
    assert is_gone(child)
    pool.close()


@pytest.fixture(scope="module")
def groups(
    together: RayWorkerGroup[Any], pair: RayWorkerGroup[Teller]
) -> dict[str, RayWorkerGroup[Teller]]:
    """Both groups by their size."""
    return {"two": pair, "four": together.spawn({"actor"})["actor"]}


@pytest.fixture(params=["two", "four"])
def group(
    request: pytest.FixtureRequest, groups: dict[str, RayWorkerGroup[Teller]]
) -> RayWorkerGroup[Teller]:
    """Each of the groups in turn."""
    return groups[request.param]


@pytest.fixture
def critic(together: RayWorkerGroup[Any]) -> RayWorkerGroup[Teller]:
    """4 ranks as 2 data-parallel times 2 model-parallel ones."""
    return together.spawn({"critic"})["critic"]


def data(count: int, **options: Any) -> DataProto:
    """Rows that know their number."""
    return DataProto.from_dict(
        {"x": torch.arange(count)}, {"uid": [f"u{n}" for n in range(count)]}, **options
    )


def check_rows(result: DataProto, count: int, ranks: list[int], scale: int = 2) -> None:
    """All rows are there once, in order, and were computed by these ranks."""
    assert result.batch["x"].tolist() == [scale * n for n in range(count)]
    assert result.non_tensor_batch["uid"].tolist() == [f"u{n}" for n in range(count)]
    assert result.batch["rank"].tolist() == ranks


def owners(count: int, size: int) -> list[int]:
    """Which rank has which row: 7 rows on 4 ranks are 2 2 2 1."""
    sizes = [count // size + (rank < count % size) for rank in range(size)]
    return [rank for rank, rows in enumerate(sizes) for _ in range(rows)]


# ---- places -----------------------------------------------------------------------------------------


def test_every_process_knows_its_place(group: RayWorkerGroup[Teller]) -> None:
    answers, size, master = (
        group.as_worker().where(),
        group.world_size,
        group.processes.addresses[0],
    )
    for rank, answer in enumerate(answers):
        place = answer["place"]
        assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (
            rank,
            size,
            rank,
            size,
        )
        assert (answer["RANK"], answer["LOCAL_RANK"], answer["WORLD_SIZE"]) == (
            str(rank),
            str(rank),
            str(size),
        )
        assert (place.master_addr, place.master_port) == (master.node, master.port)
        assert (answer["MASTER_ADDR"], answer["MASTER_PORT"]) == (master.node, str(master.port))
    assert [answer["pid"] for answer in answers] == [
        address.pid for address in group.processes.addresses
    ]
    assert all(answer["collects"] for answer in answers), (
        "the garbage collector is on once modules are imported"
    )
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    assert {answer["priority"] for answer in answers} == {priority}, "other processes go first"


def test_roles_share_their_processes(together: RayWorkerGroup[Any]) -> None:
    roles = together.spawn({"actor", "critic"})
    pids = {role: [answer["pid"] for answer in group.where()] for role, group in roles.items()}
    assert pids["actor"] == pids["critic"] and len(set(pids["actor"])) == 4
    assert [roles[role].told(1)[2][:2] for role in ("actor", "critic")] == [(2, "a"), (2, "c")]
    assert together.actor_told(1) == roles["actor"].told(1), (
        "without spawn, methods bear the role in their name"
    )
    check_rows(together.critic_rows_on_mesh(data(4)), 4, [0, 0, 2, 2])
    assert together.execute_all("critic_count") == roles["critic"].execute_all("count")
    with pytest.raises(
        WorkerError, match=r"actor\+critic.spawn: got \['judge'\], expected roles among .*actor"
    ):
        together.spawn({"actor", "judge"})


# ---- dispatch and collect ---------------------------------------------------------------------------


def test_modes_that_send_everything(group: RayWorkerGroup[Teller]) -> None:
    size = group.world_size
    name = group.told(0)[0][1]
    assert group.told({"a": 1}, more=None) == [(rank, name, {"a": 1}, None) for rank in range(size)]
    assert group.told_first(data(5)) == (0, 5)
    assert group.executed_first() == 0
    assert group.think() == list(range(size))


def test_modes_that_send_each_rank_its_own(group: RayWorkerGroup[Teller]) -> None:
    size = group.world_size
    values = [f"v{rank}" for rank in range(size)]
    assert group.told_each(values, more=values) == [
        (rank, f"v{rank}", f"v{rank}") for rank in range(size)
    ]
    assert group.computed_each(list(range(size))) == [10 * rank for rank in range(size)]


@pytest.mark.parametrize("count", [7, 3])
def test_modes_that_split_rows(group: RayWorkerGroup[Teller], count: int) -> None:
    size = group.world_size
    result = group.rows(data(count), scale=3)
    check_rows(result, count, owners(count, size), scale=3)
    assert (
        sum(result.meta_info["metrics"]["rows"]) == count
        and len(result.meta_info["metrics"]["rows"]) == size
    )
    assert sum(group.num_rows(data(count))) == count
    assert group.nothing(data(count)) is None
    check_rows(
        group.rows_reversed(data(count)), count, [size - 1 - rank for rank in owners(count, size)]
    )
    padded = group.rows(data(count, auto_padding=True))
    assert len(padded) == count and len(set(padded.meta_info["metrics"]["rows"])) == 1
    # What comes back is the caller's own.
    padded.batch["x"] += 1
    padded.batch["rank"][0] = 9


def test_functions(group: RayWorkerGroup[Teller]) -> None:
    def label(worker: Teller, chunk: DataProto) -> DataProto:
        return worker.rows(chunk, scale=5)

    check_rows(
        group.execute_with_func_generator(label, data(7)), 7, owners(7, group.world_size), scale=5
    )
    assert group.execute_func_rank_zero(lambda text: text.upper(), "ray") == "RAY"


def test_calls_by_name(group: RayWorkerGroup[Teller]) -> None:
    size = group.world_size
    counts = group.execute_all("count")
    assert len(counts) == size
    assert group.execute_all("told", value="x")[0] == (0, group.told(0)[0][1], "x", None)


@pytest.mark.parametrize("count", [7, 3, 1])
def test_mesh(critic: RayWorkerGroup[Teller], count: int) -> None:
    """A chunk for each data-parallel rank, the same for its model-parallel ranks; one of them is collected."""
    collected = [2 * rank for rank in owners(count, 2)]
    before = critic.execute_all("count")
    check_rows(critic.rows_on_mesh(data(count)), count, collected)
    check_rows(critic.rows_on_mesh_later(data(count)).get(), count, collected)
    assert critic.execute_all("count") == [calls + 2 for calls in before], "every rank takes part"


def test_a_mode_registered_by_a_user(
    groups: dict[str, RayWorkerGroup[Teller]], monkeypatch
) -> None:
    """The mode is the driver's business: the processes do not know it."""
    monkeypatch.setattr(Dispatch, "members", dict(Dispatch.members))
    mode = register_dispatch_mode("FIRST_HALF")
    update_dispatch_mode(
        mode,
        lambda group, value: (
            [[value if rank < 2 else None for rank in range(group.world_size)]],
            {},
        ),
        max_told,
    )
    method = register(dispatch_mode=mode)(Teller.told)
    monkeypatch.setattr(Teller, "told", method)
    actor = groups["four"]
    view = seen_as(Teller, actor)
    assert view.told("x") == [
        (0, "a", "x", None),
        (1, "a", "x", None),
        (2, "a", None, None),
        (3, "a", None, None),
    ]


def seen_as(worker_class: type[Worker], group: RayWorkerGroup[Any]) -> RayWorkerGroup[Any]:
    """The processes of a group, with the methods of another class."""
    pool = RayResourcePool([group.world_size])
    return RayWorkerGroup(pool, RayClassWithInitArgs(worker_class), group.name, group.processes)


def max_told(group: Any, outputs: list[Any]) -> list[Any]:
    """Collects a list."""
    assert group.world_size == len(outputs)
    return outputs


@pytest.mark.parametrize("count", [7, 3])
def test_a_future_goes_straight_into_another_group(
    groups: dict[str, RayWorkerGroup[Teller]], critic: RayWorkerGroup[Teller], count: int
) -> None:
    first = groups["two"].rows_later(data(count))
    assert isinstance(first, DataProtoFuture)
    second = groups["four"].rows_later(first)
    third = critic.rows_on_mesh(second)
    check_rows(third, count, [2 * rank for rank in owners(count, 2)], scale=8)
    check_rows(second.get(), count, owners(count, 4), scale=4)
    assert groups["four"].kinds(first).batch["is_future"].all(), (
        "without materialize_futures the method gets it"
    )
    check_rows(groups["two"].rows(first), count, owners(count, 2), scale=4)


# ---- handles ----------------------------------------------------------------------------------------


def test_the_typed_handle(groups: dict[str, RayWorkerGroup[Teller]]) -> None:
    handle = groups["two"].as_worker()
    assert {"rows", "told", "where"} <= set(dir(handle))
    assert handle.num_rows(data(7)) == [4, 3]
    assert "2 workers" in repr(groups["two"]) and groups["two"].processes.threads


# ---- what is refused --------------------------------------------------------------------------------


def test_a_method_without_register(groups: dict[str, RayWorkerGroup[Teller]]) -> None:
    with pytest.raises(
        WorkerError, match=r"Teller.count: got a method without @register.*Add @register"
    ):
        groups["two"].count()
    with pytest.raises(
        WorkerError, match=r"part2.nonsense: got no such method, expected a registered one: .*rows"
    ):
        groups["two"].as_worker().nonsense()
    heirs = seen_as(Heir, groups["two"])
    with pytest.raises(WorkerError, match=r"Heir.num_rows: .* an override needs it again"):
        heirs.num_rows(data(2))


def test_arguments_that_do_not_fit_the_mode(groups: dict[str, RayWorkerGroup[Teller]]) -> None:
    """The error names group, method, mode, argument and number of ranks."""
    two = groups["two"]
    with pytest.raises(
        WorkerError,
        match=r"part2.told_each on 2 ranks \(.*ALL_TO_ALL\): per-rank argument more: got",
    ):
        two.told_each([1, 2], more=[1])
    with pytest.raises(
        WorkerError,
        match=r"part2.rows on 2 ranks \(.*PROTO\): argument 0: got list, expected a Data",
    ):
        two.rows([1, 2, 3])
    with pytest.raises(
        WorkerError,
        match=r"part2.execute_with_func_generator on 2 .*got DataProto, expected a func",
    ):
        two.execute_with_func_generator(data(3))
    with pytest.raises(
        WorkerError, match=r"part2.a_number on 2 .*output 0 of 2: got int, expected a DataProto"
    ):
        two.a_number(data(3))
    with pytest.raises(WorkerError, match=r"part2\[rank ./2 on .* failed in rows: got TypeError"):
        two.as_worker().rows(data(3), 1, 2)
    assert two.num_rows(data(3)) == [2, 1], "the group is as good as before"
