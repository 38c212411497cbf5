# SPDX-License-Identifier: Apache-2.0
"""What is said of a call that takes long. Processes that are watched are in tests/e2e/ray/test_heartbeat.py."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

import ray

from quadriga.config.trainer import TrainerConfig
from quadriga.single_controller.ray import calls
from quadriga.single_controller.ray.errors import WorkerName
from quadriga.single_controller.ray.heartbeat import Heartbeat, _Watched
from quadriga.single_controller.ray.process import Status


def test_a_call_that_takes_half_of_its_limit_is_named_once() -> None:
    told: list[str] = []
    heartbeat = Heartbeat([], TrainerConfig(phase_timeout_s=100), told.append)
    process = _Watched(SimpleNamespace(), WorkerName("actor", 1, 2), SimpleNamespace(), None)
    for method, running_s in (
        ("load", 40),
        ("update", 60),
        ("update", 70),
        ("load", 1),
        ("load", 55),
    ):
        heartbeat._limit_call(process, Status("actor", method, running_s, "x.py:1"), 100)
    heartbeat.close()
    assert [line.partition(", at")[0] for line in told] == [
        "actor[rank 1/2]: actor.update has taken 60 s",
        "actor[rank 1/2]: actor.load has taken 55 s",
    ]
    assert all("after 100 s the process is killed" in line for line in told)


def test_a_call_over_its_limit_ends_although_another_process_has_died(monkeypatch) -> None:
    lines: list[str] = []
    killed: list[str] = []
    heartbeat = Heartbeat([], TrainerConfig(phase_timeout_s=3), lines.append)
    heartbeat.close()
    for rank, ref in enumerate(("dead", "alive")):
        actor = SimpleNamespace(stacks=SimpleNamespace(remote=lambda ref=ref: ref))
        name = WorkerName("actor", rank, 2)
        heartbeat._watched.append(_Watched(actor, name, SimpleNamespace(), None))

    def get(ref: str) -> str:
        if ref == "dead":
            raise ray.exceptions.RayError
        return "its stacks"

    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(calls, "kill", lambda address, got, fix: killed.append(got))
    heartbeat._end_call(heartbeat._watched[1], Status("actor", "update", 4.0, "x.py:1"))
    assert "actor[rank 1/2]:\nits stacks\nactor[rank 0/2]: no answer" in lines[0]
    assert killed == ["actor.update not done after 4 s"]
    assert [process.worker.rank for process in heartbeat._watched] == [0]
