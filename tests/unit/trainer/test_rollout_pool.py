# SPDX-License-Identifier: Apache-2.0
"""Engines that are lost and come back: who generates which rows, and which weights are sent to whom."""

import logging
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from quadriga import background
from quadriga.errors import (
    EngineError,
    EngineLostError,
    PeerLostError,
    QuadrigaError,
    WeightSyncError,
    WorkerLostError,
)
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    ResourcePool,
    Worker,
    register,
)
from quadriga.trainer.asynchronous.streams import StreamPool
from quadriga.trainer.rollout_pool import RolloutPool


class Actor(Worker):
    """Notes what is sent to whom."""

    sent: ClassVar[list[tuple[int, bool]]] = []
    ranks: ClassVar[list[int]] = []
    failures: ClassVar[list[QuadrigaError]] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offer_weights(self, ranks: Sequence[int]) -> str:
        Actor.ranks[:] = ranks
        return "here"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, version: int, has_frozen: bool) -> None:
        Actor.sent.append((version, has_frozen))
        if Actor.failures:
            raise Actor.failures.pop()


class Engine(Worker):
    """Adds 100 to each row; fails where `failures` has its rank and what it does."""

    failures: ClassVar[dict[tuple[int, str], QuadrigaError]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.version = -1

    def _do(self, what: str) -> None:
        if error := Engine.failures.pop((self.rank, what), None):
            raise error

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        self._do("init")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def expect_weights(self, address: str) -> None:
        assert self.rank in Actor.ranks

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int) -> bool:
        self._do("receive")
        self.version = version
        return True

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self._do("generate")
        column = prompts.batch["row"]
        columns = {"row": column + 100, "rank": torch.full_like(column, self.rank)}
        return DataProto.from_dict(
            tensors=columns | {"version": torch.full_like(column, self.version)}
        )


LOST = WorkerLostError("rollout[rank 1/3] died in generate_sequences", got="SIGKILL")


@pytest.fixture
def make_pool() -> Any:
    """`make_pool()`: three engines."""
    Actor.sent.clear()
    Actor.failures.clear()
    Engine.failures.clear()

    def make() -> RolloutPool:
        engines = LocalWorkerGroup(ClassWithInitArgs(Engine), ResourcePool([3]), "rollout")
        return RolloutPool(LocalWorkerGroup(ClassWithInitArgs(Actor)), engines)

    return make


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time for pauses between restarts, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(background.time, "monotonic", lambda: now[0])
    return now


def rows(count: int) -> DataProto:
    return DataProto.from_dict(tensors={"row": torch.arange(count)})


@pytest.mark.parametrize("error", [LOST, EngineLostError("vllm.generate", got="a dead core")])
def test_rows_of_a_lost_engine_are_generated_by_the_others(
    make_pool: Any, error: QuadrigaError
) -> None:
    """Each once, in order; afterwards it is there again, with the weights of the others."""
    pool = make_pool()
    pool.publish(4)
    Engine.failures[1, "generate"] = error
    answers = pool.generate_sequences(rows(7)).batch
    assert answers["row"].tolist() == list(range(100, 107))
    assert answers["rank"].tolist() == [0, 0, 0, 0, 2, 2, 2]
    assert pool.take_counts() == {"rollout/requests_moved": 2}
    pool._restarts.wait(10)
    answers = pool.generate_sequences(rows(7)).batch
    assert answers["rank"].tolist() == [0, 0, 0, 1, 1, 2, 2] and set(
        answers["version"].tolist()
    ) == {4}
    # At once, and whole: the new engine has nothing yet.
    assert Actor.sent == [(0, False), (4, True), (4, False)] and Actor.ranks == [0, 1, 2]
    assert pool.take_counts() == {"rollout/engine_restarts": 1} and pool.take_counts() == {}


def test_engines_that_are_lost_without_rows_or_two_at_once(make_pool: Any) -> None:
    """Fewer rows than engines; and rows that move twice."""
    pool = make_pool()
    Engine.failures[2, "generate"] = LOST
    assert pool.generate_sequences(rows(2)).batch["row"].tolist() == [100, 101]
    assert pool.take_counts() == {}
    pool._restarts.wait(10)
    Engine.failures |= {(1, "generate"): LOST, (2, "generate"): LOST}
    answers = pool.generate_sequences(rows(5)).batch
    assert answers["row"].tolist() == list(range(100, 105)) and answers["rank"].tolist() == [0] * 5
    assert pool.take_counts() == {"rollout/engine_restarts": 1, "rollout/requests_moved": 3}


def test_the_last_engine_and_an_error_of_the_users_own_end_the_run(make_pool: Any) -> None:
    pool = make_pool()
    Engine.failures |= {(rank, "generate"): LOST for rank in range(3)}
    with pytest.raises(WorkerLostError, match="died in generate_sequences"):
        pool.generate_sequences(rows(6))
    pool = make_pool()
    Engine.failures[1, "generate"] = EngineError(
        "prompts", got="token id 9", expected="ids below 5"
    )
    with pytest.raises(EngineError, match="token id 9"):
        pool.generate_sequences(rows(6))
    assert pool._rollout.ranks == [0, 1, 2]


@pytest.mark.parametrize("of_the_sender", [None, WeightSyncError, PeerLostError])
def test_an_engine_that_is_lost_while_weights_are_sent(
    make_pool: Any, of_the_sender: type[QuadrigaError] | None
) -> None:
    """The others get them again, whole; what the connection's end made of them is no failure of theirs."""
    pool = make_pool()
    Actor.failures[:] = (
        [of_the_sender("weight sync", got="connection closed")] if of_the_sender else []
    )
    Engine.failures |= {
        (1, "receive"): LOST,
        (2, "receive"): WeightSyncError("weight sync", got="connection closed"),
    }
    pool.publish(1)
    assert Actor.sent == [(0, False), (1, True), (1, False)] and Actor.ranks == [0, 2]
    assert set(pool.generate_sequences(rows(4)).batch["version"].tolist()) == {1}


def test_an_engine_with_other_weights_is_refused_by_name(
    make_pool: Any, caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    """One that came back is left out, and started again; one that was there before ends the run."""
    wrong = WeightSyncError("weights of version 1", got="2 of 9 weights that differ: a, b")
    pool = make_pool()
    Engine.failures[1, "generate"] = LOST
    pool.generate_sequences(rows(6))
    pool._restarts.wait(10)
    Engine.failures[1, "receive"] = wrong
    with caplog.at_level(logging.WARNING):
        pool.publish(1)
    assert (
        "rollout engine 1 is refused, 2 are left" in caplog.text
        and "2 of 9 weights that differ: a, b" in caplog.text
    )
    assert pool.generate_sequences(rows(6)).batch["version"].tolist() == [1] * 6
    clock[0] += 11
    pool.generate_sequences(rows(6))
    pool._restarts.wait(10)
    pool.publish(2)
    assert pool._rollout.ranks == [0, 1, 2]
    Engine.failures[1, "receive"] = wrong
    with pytest.raises(WeightSyncError, match="that differ"):
        pool.publish(3)


def test_an_engine_that_does_not_start_is_tried_again(
    make_pool: Any, caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    """At once, and then after pauses that double; the run goes on with the others meanwhile."""
    pool, no_memory = make_pool(), EngineError("model", got="no memory")
    Engine.failures |= {(1, "generate"): LOST, (1, "init"): no_memory}
    pool.generate_sequences(rows(6))
    starts = []
    for second in range(0, 64, 2):
        clock[0] = 1000.0 + second
        Engine.failures[1, "init"] = no_memory
        for _ in range(2):  # begins what is due, and sees what came of it
            pool._restarts.wait(10)
            pool.publish(second)
        starts += [] if (1, "init") in Engine.failures else [second]
    assert starts == [10, 30]
    assert caplog.text.count("rollout engine 1 did not start again") == 3
    Engine.failures.clear()
    clock[0] = 1071.0
    pool.publish(71)
    pool._restarts.wait(10)
    assert set(pool.generate_sequences(rows(4)).batch["rank"].tolist()) == {0, 1, 2}


class Streamed(Engine):
    """Notes what its stream is asked for."""

    calls: ClassVar[list[tuple[int, str]]] = []

    def call_stream(self, method: str, *args: Any, **kwargs: Any) -> None:
        Streamed.calls.append((self.rank, method))

    def stream_events(self) -> list[Any]:
        time.sleep(0.01)
        return []


def test_rollout_groups_are_a_stream_each(make_pool: Any) -> None:
    """Of four ranks in groups of two: the first of each is called, and both get weights."""
    Streamed.calls.clear()
    make_pool()  # clears what the tests before have left
    engines = LocalWorkerGroup(ClassWithInitArgs(Streamed), ResourcePool([4]), "rollout")
    pool = StreamPool(LocalWorkerGroup(ClassWithInitArgs(Actor)), engines, group_size=2)
    streams, lost = pool.refresh_streams(lambda group, rows: None, pauses=False)
    for number, stream in enumerate(streams):
        stream.start({number: rows(1)})
        stream.load(lambda: None, 1, keeps_cache=False)
    pool.stop()
    assert [(stream.rank, stream.num_ranks) for stream in streams] == [
        (0, 2),
        (2, 2),
    ] and lost == []
    calls = [
        (rank, method) for rank in range(4) for caller, method in Streamed.calls if caller == rank
    ]
    assert calls == [
        *((0, method) for method in ("start", "give_weights", "await_weights")),
        (1, "give_weights"),
        *((2, method) for method in ("start", "give_weights", "await_weights")),
        (3, "give_weights"),
    ]
