# SPDX-License-Identifier: Apache-2.0
"""A worker's place: explicit, from the environment, or alone."""

import pytest

from quadriga.errors import WorkerError
from quadriga.single_controller import Worker, WorkerPlace, placed

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Role(Worker):
    """Needs its rank before anything else, and forgets super().__init__()."""

    def __init__(self, name: str) -> None:
        self.label = f"{name}{self.rank}"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_alone() -> None:
    worker = Role("actor")
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (
        0,
        1,
        0,
        1,
    )
    assert worker.label == "actor0"


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("5", "8", "1", "4", "10.0.0.2", "1234"), strict=True):
        monkeypatch.setenv(name, value)
    worker = Role("actor")
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (
        5,
        8,
        1,
        4,
    )
    assert (worker.place.master_addr, worker.place.master_port, worker.label) == (
        "10.0.0.2",
        1234,
        "actor5",
    )


def test_explicit_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with placed(WorkerPlace(rank=1, world_size=2)):
        inside = Role("critic")
    assert (inside.label, inside.world_size, Role("critic").world_size) == ("critic1", 2, 8)


def test_an_impossible_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(WorkerError, match="RANK: got 'two', expected a whole number"):
        Role("actor")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(WorkerError, match="rank 2/1"):
        Role("actor")


def test_mesh_that_nobody_registered() -> None:
    worker = Role("actor")
    worker.register_mesh("train", dp_rank=0, is_collect=True)
    assert worker.mesh_place("train") == (0, True)
    with pytest.raises(WorkerError, match=r"Role: mesh 'infer': got rank 0 registered \['train'\]"):
        worker.mesh_place("infer")
