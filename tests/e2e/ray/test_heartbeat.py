# SPDX-License-Identifier: Apache-2.0
"""Processes that stop, that hold the interpreter's lock, or that take longer than they may, on real Ray."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

ray = pytest.importorskip("ray")

import clumsy  # noqa: E402
from clumsy import Clumsy, error_of  # noqa: E402
from quadriga.config.trainer import TrainerConfig  # noqa: E402
from quadriga.errors import WorkerLostError  # noqa: E402
from quadriga.single_controller.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    heartbeat,
)
from watching import wait_for  # noqa: E402

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _workers_travel() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(clumsy)
    yield
    ray.cloudpickle.unregister_pickle_by_value(clumsy)


@pytest.fixture
def watched(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., tuple[RayWorkerGroup[Clumsy], list[str]]]]:
    """`watched(**settings)`: a group of two processes, looked at twice a second, and what is said of them."""
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.5)
    monkeypatch.setattr(heartbeat, "NAMED_AFTER_S", 2.0)
    open_ones = []

    def start(**settings: int) -> tuple[RayWorkerGroup[Clumsy], list[str]]:
        pool, told = RayResourcePool([2]), []
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Clumsy), name="actor")
        assert len(group.processes.addresses) == 2
        open_ones.append(
            (
                heartbeat.Heartbeat(
                    [group.processes.starts], TrainerConfig(**settings), told.append
                ),
                group,
                pool,
            )
        )
        return group, told

    yield start
    for beat, group, pool in open_ones:
        beat.close()
        group.shutdown()
        pool.close()


def test_a_stopped_process_is_named_and_then_killed(watched) -> None:
    """The one that works on is left alone, however long it takes, also with the limit far below its call."""
    group, told = watched(stall_timeout_s=10)
    pid = group.processes.addresses[1].pid
    calls = group.start_all("sleep", [((14.0,), {})] * 2)
    os.kill(pid, signal.SIGSTOP)
    error = error_of(lambda: group.resolve(calls))
    assert type(error) is WorkerLostError
    assert str(error).startswith("actor[rank 1/2 on ")
    assert (
        "died in sleep: got no answer of its control thread for 10 s (stopped by a signal)"
        in str(error)
    )
    assert str(error).endswith("It was killed: trainer.stall_timeout_s is 10.")
    (line,) = told
    assert (
        f", process {pid}, has not answered for 2 s (stopped by a signal); after 10 s (trainer.stall_timeout_s)"
        in line
    )
    assert group.resolve(calls[:1]) == [None]


def test_a_process_that_goes_on_in_time_is_left_alone(watched) -> None:
    group, told = watched(stall_timeout_s=10)
    pid = group.processes.addresses[0].pid
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: bool(told), lambda: "not named")
    os.kill(pid, signal.SIGCONT)
    assert len(group.execute_all("process")) == 2
    time.sleep(10)
    assert len(group.execute_all("process")) == 2
    assert len(told) == 1


def test_a_call_over_its_limit_is_shown_with_all_stacks_and_ends(watched) -> None:
    group, told = watched(phase_timeout_s=3)
    calls = [
        *group.start_all("sleep", [((0.1,), {})] * 2),
        *group.start_all("sleep", [((600.0,), {})]),
    ]
    error = error_of(lambda: group.resolve(calls))
    assert type(error) is WorkerLostError
    assert "died in sleep: got actor.sleep not done after " in str(error)
    assert str(error).endswith("It was killed: trainer.phase_timeout_s is 3.")
    # Before it a call that takes long may have been named.
    text = told[-1]
    assert "actor[rank 0/2 on " in text and "actor[rank 1/2 on " in text
    assert "in sleep\n    time.sleep(seconds)" in text
    assert len(group.resolve(calls[:2])) == 2
