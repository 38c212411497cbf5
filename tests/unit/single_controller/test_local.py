# SPDX-License-Identifier: Apache-2.0
"""The local worker group: calls, futures, errors, the typed view."""

import copy
import pickle
import traceback

import pytest
import torch

from quadriga.config.trainer import TrainerConfig
from quadriga.errors import DataError, WorkerError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    ResourcePool,
    Worker,
    register,
)
from quadriga.single_controller.worker_group import WorkerGroups


class Adder(Worker):
    """Adds a number to `values`, and breaks on demand."""

    def __init__(self, amount: int, *, breaks: bool = False) -> None:
        if breaks:
            raise RuntimeError("no memory")
        self.amount = amount
        self.calls = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        """The sum."""
        self.calls += 1
        return DataProto.from_dict({"values": data.batch["values"] + self.amount})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data: DataProto) -> DataProto:
        """The sum, as a future."""
        return self.add(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def ranks_later(self) -> int:
        """The rank, as a future."""
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def fail(self, data: DataProto, *, kind: str, last: bool = True) -> None:
        """Raise on the last rank, or on all."""
        if not last or self.rank == self.world_size - 1:
            raise DataError("row", got="nothing") if kind == "ours" else ValueError("too long")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fail_later(self, data: DataProto) -> None:
        """Raise into the future."""
        raise ValueError("later")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def think(self) -> int:
        """A coroutine."""
        return self.amount

    def not_registered(self, amount: int) -> int:
        """Reached by name only."""
        return amount * self.rank


def group(size: int = 1, amount: int = 10) -> LocalWorkerGroup[Adder]:
    return LocalWorkerGroup(ClassWithInitArgs(Adder, amount), ResourcePool([size]), name="adder")


def values(*numbers: int) -> DataProto:
    return DataProto.from_dict({"values": torch.tensor(numbers)})


def test_a_single_worker_is_called_as_if_it_were_the_group() -> None:
    alone = LocalWorkerGroup(ClassWithInitArgs(Adder, amount=10))
    assert alone.add(values(1, 2)).batch["values"].tolist() == [11, 12]
    assert alone.world_size == 1 and alone.workers[0].calls == 1
    assert repr(alone) == "LocalWorkerGroup(Adder, 1 workers)"


def test_workers_stand_where_the_pool_puts_them() -> None:
    pool = ResourcePool([2, 1])
    workers = LocalWorkerGroup(ClassWithInitArgs(Adder, 1), pool).workers
    assert [(w.rank, w.world_size, w.local_rank, w.local_world_size) for w in workers] == [
        (0, 3, 0, 2),
        (1, 3, 1, 2),
        (2, 3, 0, 1),
    ]


@pytest.mark.parametrize("count", [7, 3, 0])
def test_rows_come_back_in_order_whatever_their_number(count: int) -> None:
    adders = group(4)
    assert adders.add(values(*range(count))).batch["values"].tolist() == [
        10 + row for row in range(count)
    ]
    assert [worker.calls for worker in adders.workers] == [1, 1, 1, 1], (
        "every rank is called, without rows too"
    )


def test_the_callers_data_is_not_changed() -> None:
    data = DataProto.from_dict({"values": torch.arange(3)}, auto_padding=True)
    assert group(4).add(data).batch["values"].tolist() == [10, 11, 12]
    assert len(data) == 3 and list(data.batch.keys()) == ["values"]


def test_a_future_holds_the_result_and_is_handed_on() -> None:
    adders = group(2)
    future = adders.add_later(values(1, 2, 3))
    assert isinstance(future, DataProtoFuture)
    assert adders.add(future).batch["values"].tolist() == [21, 22, 23]
    assert future.get().batch["values"].tolist() == [11, 12, 13]
    assert adders.ranks_later().get() == [0, 1]


def test_what_a_future_does_with_outputs_can_travel() -> None:
    future = group(2).add_later(DataProto.from_dict({"values": torch.arange(3)}, auto_padding=True))
    collect = pickle.loads(pickle.dumps(future.collect_fn))
    assert collect([values(1, 2), values(3, 1)]).batch["values"].tolist() == [1, 2, 3]


def test_an_error_names_role_rank_method_and_shapes() -> None:
    with pytest.raises(WorkerError) as caught:
        group(3).fail(values(1, 2, 3, 4), kind="theirs")
    text = str(caught.value)
    assert text.startswith("adder[rank 2/3] failed in fail: got ValueError: too long")
    assert "DataProto(1 rows, values (1,) int64)" in text and "kind=str" in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert 'raise DataError("row", got="nothing") if' in "".join(
        traceback.format_exception(caught.value)
    )


def test_the_first_failing_rank_is_the_one_reported() -> None:
    with pytest.raises(WorkerError, match=r"rank 0/3"):
        group(3).fail(values(1, 2, 3), kind="theirs", last=False)


def test_errors_of_our_own_come_through() -> None:
    with pytest.raises(DataError, match="row: got nothing"):
        group(2).fail(values(1, 2), kind="ours")


def test_the_error_of_a_call_not_waited_for_waits_in_the_future() -> None:
    future = group(2).fail_later(values(1, 2))
    with pytest.raises(WorkerError, match=r"rank 0/2.*later"):
        future.get()


def test_a_worker_that_cannot_be_built() -> None:
    with pytest.raises(
        WorkerError,
        match=r"Adder\[rank 0/1\] failed in __init__: got RuntimeError: no memory .*breaks=True",
    ):
        LocalWorkerGroup(ClassWithInitArgs(Adder, 1, breaks=True))


def test_ctrl_c_is_not_an_error_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    adders = group()
    monkeypatch.setattr(adders.workers[0], "not_registered", interrupt)
    with pytest.raises(KeyboardInterrupt):
        adders.execute_all("not_registered", 1)


def test_any_method_by_name() -> None:
    adders = group(3)
    assert (
        adders.execute_all("not_registered", 5)
        == adders.execute_all("not_registered", amount=5)
        == [0, 5, 10]
    )
    with pytest.raises(WorkerError, match=r"failed in nothing.*AttributeError"):
        adders.execute_all("nothing")


def test_coroutines_are_run() -> None:
    assert group(2).think() == [10, 10]


def test_a_function_on_every_rank_and_on_the_first() -> None:
    def scale(worker: Adder, data: DataProto, factor: int) -> DataProto:
        return DataProto.from_dict({"values": data.batch["values"] * factor * (worker.rank + 1)})

    adders = group(2)
    assert adders.execute_with_func_generator(scale, values(1, 2, 3), 10).batch[
        "values"
    ].tolist() == [10, 20, 60]
    assert adders.execute_func_rank_zero(len, values(1, 2, 3)) == 3


def test_a_group_has_the_registered_methods_of_its_worker_and_no_others() -> None:
    adders = group(2)
    view = adders.as_worker()
    assert view.add(values(1)).batch["values"].tolist() == [11]
    assert "add" in dir(view) and not hasattr(view, "not_registered")
    with pytest.raises(
        WorkerError, match=r"Adder.not_registered: got a method without @register.*Add @register"
    ):
        _ = view.not_registered
    with pytest.raises(
        AttributeError,
        match=r"adder.nonsense: got no such method, .* registered one: add, add_later",
    ):
        _ = view.nonsense
    assert copy.copy(view).add is not None


def test_arguments_that_do_not_fit_the_mode() -> None:
    adders = group(2)
    with pytest.raises(
        WorkerError,
        match=r"adder.add on 2 ranks \(Dispatch.DP_COMPUTE_PROTO\): argument 0: got list",
    ):
        adders.add([1, 2])
    with pytest.raises(
        WorkerError, match=r"adder.execute_with_func_generator on 2 .* output 0 of 2: got int"
    ):
        adders.execute_with_func_generator(lambda worker, data: len(data), values(1, 2))


def test_a_method_may_not_hide_a_group_method() -> None:
    class Impostor(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def execute_all(self) -> None:
            """Named as the group's own."""

    with pytest.raises(WorkerError, match=r"\['execute_all'\]"):
        LocalWorkerGroup(ClassWithInitArgs(Impostor))


def test_a_dispatch_function_that_forgets_a_rank() -> None:
    class Forgetful(Worker):
        @register(
            dispatch_mode={
                "dispatch_fn": lambda group, x: ([[x]], {}),
                "collect_fn": lambda group, outputs: outputs,
            }
        )
        def run(self, x: int) -> int:
            """One value."""
            return x

    assert LocalWorkerGroup(ClassWithInitArgs(Forgetful)).run(4) == [4]
    with pytest.raises(WorkerError, match="got 1 values for an argument, expected 2"):
        LocalWorkerGroup(ClassWithInitArgs(Forgetful), ResourcePool([2])).run(4)


class Counter(Worker):
    """Counts how often it is closed, in a list of the test's."""

    def __init__(self, closed: list[str], name: str) -> None:
        self.closed, self.name = closed, name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        self.closed.append(self.name)


class Silent(Worker):
    """Has nothing to release."""


class Broken(Worker):
    """Cannot be closed."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Raises."""
        raise OSError("no space left")


def test_a_group_that_cannot_be_closed_keeps_no_other_from_it() -> None:
    closed: list[str] = []
    classes = {
        "ref": ClassWithInitArgs(Broken),
        "critic": ClassWithInitArgs(Counter, closed, "critic"),
    }
    groups = WorkerGroups(classes, dict.fromkeys(classes, "all"), {"all": [1]}, TrainerConfig())
    with pytest.raises(Exception, match="no space left"):
        groups.close()
    assert closed == ["critic"]


def test_a_group_to_each_role_and_those_are_closed_that_can_be() -> None:
    closed: list[str] = []
    classes = {
        "actor": ClassWithInitArgs(Counter, closed, "actor"),
        "ref": ClassWithInitArgs(Silent),
        "critic": ClassWithInitArgs(Counter, closed, "critic"),
    }
    groups = WorkerGroups(classes, dict.fromkeys(classes, "all"), {"all": [1]}, TrainerConfig())
    assert {role: (group.name, group.world_size) for role, group in groups.groups.items()} == {
        "actor": ("actor", 1),
        "ref": ("ref", 1),
        "critic": ("critic", 1),
    }
    assert not groups.is_remote
    assert groups.describe() == {}
    groups.end()
    assert closed == []
    groups.close()
    assert closed == ["actor", "critic"]
