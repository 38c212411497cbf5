# SPDX-License-Identifier: Apache-2.0
"""Chosen steps leave one readable trace, others cost nothing."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quadriga.config import Config
from quadriga.errors import WorkerError
from quadriga.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    Worker,
    register,
)
from quadriga.single_controller.resource_pool import ResourcePool
from quadriga.trainer.profiler import Profiler


class Busy(Worker):
    """Computes; its last rank can be lost."""

    is_lost = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work(self) -> None:
        torch.ones(8, 8) @ torch.ones(8, 8)

    def stop_profile(self) -> bytes:
        if self.is_lost:
            raise WorkerError("actor", got="no process", expected="one")
        return super().stop_profile()


@pytest.fixture
def group() -> LocalWorkerGroup[Busy]:
    return LocalWorkerGroup(ClassWithInitArgs(Busy), name="actor")


@pytest.fixture
def make(group: LocalWorkerGroup[Busy], tmp_path: Path) -> Callable[..., Profiler]:
    """`make(**global_profiler)`; what it prints is in `told`."""

    def build(told: list[str] | None = None, **section: object) -> Profiler:
        section = {"tool": "torch", "save_path": str(tmp_path / "profiles")} | section
        emit = print if told is None else told.append
        return Profiler(Config(global_profiler=section), {"actor": group}, emit)

    return build


def run(profiler: Profiler, group: LocalWorkerGroup[Busy], steps: range) -> None:
    for step in steps:
        with profiler.step(step, is_last=step == steps[-1]):
            group.work()


def names(path: Path) -> list[str]:
    return [
        event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ]


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "profiles").iterdir())


def test_each_chosen_step_has_its_own_trace(make, group, tmp_path) -> None:
    """Of this process, with the calls of the worker in it marked, once."""
    told: list[str] = []
    run(make(told, steps=[2, 4]), group, range(1, 6))
    assert files(tmp_path) == ["step_2.json.gz", "step_4.json.gz"]
    found = names(tmp_path / "profiles" / "step_2.json.gz")
    assert found.count("aten::mm") == found.count("actor.work") == 1
    assert told == [f"profile written to {tmp_path}/profiles/{name}" for name in files(tmp_path)]


def test_neighbouring_steps_can_share_one_trace(make, group, tmp_path) -> None:
    run(make(steps=[1, 2, 4, 5], profile_continuous_steps=True), group, range(1, 5))
    assert files(tmp_path) == ["step_4.json.gz", "steps_1-2.json.gz"]
    assert names(tmp_path / "profiles" / "steps_1-2.json.gz").count("actor.work") == 2


def test_a_step_that_raises_and_a_run_that_ends_early_still_leave_their_trace(
    make, group, tmp_path
) -> None:
    profiler = make(steps=[1, 2, 3], profile_continuous_steps=True)
    with pytest.raises(RuntimeError), profiler.step(1):
        raise RuntimeError
    assert files(tmp_path) == ["step_1.json.gz"]
    with profiler.step(2):
        group.work()
    profiler.close()
    profiler.close()
    assert files(tmp_path) == ["step_1.json.gz", "step_2.json.gz"]


def test_a_rank_that_is_lost_is_told_and_nothing_else(make, group, tmp_path) -> None:
    told: list[str] = []
    group.workers[0].is_lost = True
    run(make(told, steps=[1]), group, range(1, 2))
    assert told[0].startswith("no profile of actor[0]: actor: got no process") and len(told) == 2
    assert "actor.work" in names(tmp_path / "profiles" / "step_1.json.gz")


def test_the_chosen_ranks_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each role those of its own key, of others the actor's; each process has a number of its own."""
    wanted: dict[str, tuple[int, bool]] = {}

    def note(
        worker: Worker, tool: str, title: str, number: int, origin_ns: int, is_wanted: bool
    ) -> None:
        wanted[title] = number, is_wanted

    monkeypatch.setattr(Busy, "start_profile", note)
    pool, entry = ResourcePool([2]), ClassWithInitArgs(Busy)
    groups = {
        role: LocalWorkerGroup(entry, pool, name=role)
        for role in ("actor_rollout", "ref", "critic")
    }
    section = {"tool": "nsys", "steps": [1]}
    ranks = {
        "actor_rollout_ref": {"actor": {"profiler": {"ranks": [1]}}},
        "critic": {"profiler": {"ranks": None}},
    }
    with Profiler(Config(global_profiler=section, **ranks), groups).step(1):
        pass
    assert [title for title, (_, is_wanted) in wanted.items() if is_wanted] == [
        "actor_rollout[1]", "ref[1]", "critic[0]", "critic[1]",
    ]  # fmt: skip
    assert len({number for number, _ in wanted.values()}) == len(wanted) == 6


def test_without_a_tool_nothing_is_written(make, group, tmp_path) -> None:
    run(make(tool=None, steps=[1]), group, range(1, 3))
    assert not (tmp_path / "profiles").exists()
