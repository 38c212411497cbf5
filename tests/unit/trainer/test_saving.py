# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the background, over workers that write when the test lets them; what the driver remembers."""

import random
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.errors import CheckpointError, DamagedCheckpointError
from quadriga.trainer.checkpoint import LATEST, Checkpoints, verify
from quadriga.trainer.saving import (
    CheckpointSaver,
    load_run_state,
    restore_random_states,
    save_run_state,
)


class Worker:
    """Stands for a group of two ranks: its part is on disk when the second rank says so, or with `wait`."""

    def __init__(self, name: str = "actor") -> None:
        self.name, self.error, self.is_through = name, None, False
        self.folder = Path()

    def save_checkpoint(self, directory: Path) -> None:
        self.folder, self.is_through = directory / self.name, False
        self.folder.mkdir()

    def checkpoint_written(self, wait: bool = False) -> list[bool]:
        if self.error:
            raise self.error
        if self.is_through or wait:
            (self.folder / "weights").write_text(self.name)
        return [True, self.is_through or wait]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, told: list[str]) -> Callable[..., CheckpointSaver]:
    def build(*workers: Worker) -> CheckpointSaver:
        groups = {one.name: one for one in workers}
        return CheckpointSaver(Checkpoints(tmp_path / "run"), groups, own_part, told.append)

    return build


def own_part(folder: Path) -> None:
    (folder / "trainer").mkdir()
    (folder / "trainer" / "state").write_text("step")


def finish_polling(saver: CheckpointSaver) -> None:
    for _ in range(1000):
        if saver.poll():
            return
        wait([saver._pending.completion], 0.01)
    raise AssertionError("never complete")


def test_it_is_none_until_all_ranks_of_all_roles_have_written(
    make: Callable[..., CheckpointSaver], told: list[str]
) -> None:
    actor, critic = Worker(), Worker("critic")
    saver = make(actor, critic)
    saver.start(3)
    actor.is_through = True
    for _ in range(3):
        assert not saver.poll()
    assert saver.checkpoints.steps() == [] and not (saver.checkpoints.directory / LATEST).exists()
    critic.is_through = True
    finish_polling(saver)
    verify(saver.checkpoints.path(3))
    assert (saver.checkpoints.path(3) / "critic" / "weights").read_text() == "critic"
    assert told == [f"checkpoint: {saver.checkpoints.path(3)}"]
    assert saver.poll() and saver.longest_s > 0


def test_the_next_one_waits_for_it(make: Callable[..., CheckpointSaver]) -> None:
    saver = make(Worker())
    saver.start(1)
    saver.start(2)
    assert saver.checkpoints.newest() == 1
    saver.finish()
    assert saver.checkpoints.steps() == [1, 2] and saver.checkpoints.newest() == 2


@pytest.mark.parametrize("call", ["poll", "start", "finish"])
def test_error_of_a_worker_comes_with_the_next_call(
    call: str, make: Callable[..., CheckpointSaver]
) -> None:
    """What was written is taken away; the one before stays; a later one can be written."""
    actor = Worker()
    saver = make(actor)
    saver.start(1)
    saver.finish()
    saver.start(2)
    actor.error = CheckpointError("actor/model/__0_0.distcp", got="OSError: full")
    with pytest.raises(
        CheckpointError, match=r"step 2 .*__0_0\.distcp: OSError: full.*Step 1 is still there"
    ):
        saver.start(3) if call == "start" else getattr(saver, call)()
    assert sorted(path.name for path in saver.checkpoints.directory.iterdir()) == [
        "global_step_1",
        LATEST,
    ]
    actor.error = None
    saver.start(4)
    saver.finish()
    assert saver.checkpoints.newest() == 4


def test_part_that_another_node_wrote_elsewhere(make: Callable[..., CheckpointSaver]) -> None:
    actor = Worker()
    actor.save_checkpoint = lambda directory: None
    actor.checkpoint_written = lambda wait=False: [True, True]
    saver = make(actor)
    saver.start(1)
    with pytest.raises(CheckpointError, match="nothing here, though the worker has written it"):
        saver.finish()


def test_driver_that_cannot_write_its_part(make: Callable[..., CheckpointSaver]) -> None:
    def fails(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    saver = make(Worker())
    saver.write_own_part = fails
    with pytest.raises(CheckpointError, match=r"step 1 .*No space left"):
        saver.start(1)
    assert saver.poll() and list(saver.checkpoints.directory.iterdir()) == []


@pytest.mark.parametrize("can_ask", [True, False])
def test_run_that_is_cut_short(
    can_ask: bool, make: Callable[..., CheckpointSaver], capsys: pytest.CaptureFixture[str]
) -> None:
    """What the workers can still write is completed; where they cannot be asked, nothing is left of it."""
    saver = make(Worker())
    saver.start(1)
    saver.settle(can_ask=can_ask)
    assert saver.checkpoints.steps() == ([1] if can_ask else [])
    assert ("step 1 was not yet complete" in capsys.readouterr().out) is not can_ask
    assert not list(saver.checkpoints.directory.glob(".unfinished*"))
    saver.settle(can_ask=can_ask)


def test_workers_that_are_through_need_not_be_asked(make: Callable[..., CheckpointSaver]) -> None:
    """A run that has lost them still completes what they have written."""
    actor = Worker()
    saver = make(actor)
    saver.start(1)
    actor.is_through = True
    saver.poll()
    actor.error = AssertionError("asked")
    saver.settle(can_ask=False)
    assert saver.checkpoints.newest() == 1


def test_error_while_a_cut_run_settles_is_said(
    make: Callable[..., CheckpointSaver], capsys: pytest.CaptureFixture[str]
) -> None:
    """It must not hide the error that cut the run short."""
    actor = Worker()
    saver = make(actor)
    saver.start(1)
    actor.error = CheckpointError("actor", got="OSError: full")
    saver.settle(can_ask=True)
    assert "checkpoint of step 1" in capsys.readouterr().out and saver.checkpoints.steps() == []


def draw() -> tuple[float, float, float, float]:
    """From every generator, the half-used pair of numpy's normal included."""
    return random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))


def test_random_states_come_back(tmp_path: Path) -> None:
    draw()
    save_run_state(tmp_path, {"step": 3})
    expected = [draw(), draw()]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    restore_random_states(load_run_state(tmp_path, 3)["random"])
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("saved", [False, True])
def test_random_states_may_stay_out(saved: bool, tmp_path: Path) -> None:
    save_run_state(tmp_path, {"step": 3}, with_random_states=saved)
    before = torch.get_rng_state()
    assert ("random" in load_run_state(tmp_path, 3)) == saved
    assert torch.equal(torch.get_rng_state(), before)


def test_state_of_another_step_is_none_of_this_checkpoint(tmp_path: Path) -> None:
    save_run_state(tmp_path, {"step": 3})
    with pytest.raises(
        DamagedCheckpointError,
        match=r"state\.pt: got the state after step 3, expected the state after step 4",
    ):
        load_run_state(tmp_path, 4)


def test_facts_come_back(tmp_path: Path) -> None:
    loader = {
        "position": 4,
        "generator": torch.arange(3),
        "rows": [1, 2],
        "nested": {"epoch": None},
    }
    save_run_state(tmp_path, {"step": 3, "loader": loader, "kl_controller": {"value": 0.1}})
    state = load_run_state(tmp_path, 3)
    assert (state["step"], state["kl_controller"]) == (3, {"value": 0.1})
    assert torch.equal(state["loader"].pop("generator"), loader.pop("generator"))
    assert state["loader"] == loader


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 and no more", b"no archive"])
def test_unreadable_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "trainer").mkdir()
        (tmp_path / "trainer" / "state.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        load_run_state(tmp_path, 3)


def test_state_that_could_not_be_read_again_is_refused_at_the_save(tmp_path: Path) -> None:
    """Unpickling it would run code from the file; a resume would be too late to say so."""
    with pytest.raises(CheckpointError, match="state_dict of your own data set or sampler"):
        save_run_state(tmp_path, {"loader": {"mine": Path("x")}})
