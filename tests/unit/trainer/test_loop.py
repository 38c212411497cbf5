# SPDX-License-Identifier: Apache-2.0
"""What is due after a step, and when a run must end before its last, of a loop that learns nothing."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quadriga.config import Config
from quadriga.config.trainer import TrainerConfig
from quadriga.observe.stopping import EXPIRY_VARIABLES, stop_requested
from quadriga.trainer.loop import TrainingLoop
from quadriga.trainer.saving import load_run_state


class Place:
    """A place in the data."""

    def __init__(self) -> None:
        self.number = 7

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Learner:
    """Has written its part at once."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def save_checkpoint(self, directory: Path) -> None:
        (directory / "actor").mkdir()
        (directory / "actor" / "weights").write_text("weights")

    def checkpoint_written(self, wait: bool = False) -> list[bool]:
        return [True]

    def checkpoint_bytes(self) -> list[dict[str, int]]:
        return [{"weights": 7}]

    def load_checkpoint(self, directory: Path) -> None:
        self.loaded.append(directory.name)


class Counting(TrainingLoop):
    """Counts its steps; each takes `step_s` on its own clock."""

    step_s = 0.0

    def run(self) -> None:
        with self.reporting():
            while not self.is_last_step and not self.is_stopping:
                self.global_steps += 1
                self.timer.seconds["step"] = self.step_s
                self.save_where_due()
            self.saver.finish()


Make = Callable[..., Counting]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A loop of five steps; changes are those of `trainer`."""

    def build(**changes: int) -> Counting:
        settings = TrainerConfig(default_local_dir=str(tmp_path / "run"), logger=[], **changes)
        return Counting(Config(trainer=settings), {"actor": Learner()}, 5, {"loader": Place()})

    return build


@pytest.fixture
def asked_to_stop() -> Iterator[None]:
    """As after a SIGTERM."""
    stop_requested.set()
    yield
    stop_requested.clear()


def saved(loop: Counting) -> list[int]:
    """The steps that have a checkpoint, each with the loop's own part."""
    steps = loop.checkpoints.steps()
    states = [load_run_state(loop.checkpoints.path(step), step) for step in steps]
    assert [(state["step"], state["loader"]) for state in states] == [
        (step, {"number": 7}) for step in steps
    ]
    return steps


def test_due_is_every_so_often_and_in_the_last_step(make: Make) -> None:
    loop = make()
    due = {}
    for frequency in (-1, 1, 2, 9):
        due[frequency] = []
        for loop.global_steps in range(1, 6):
            due[frequency] += [loop.global_steps] * loop.is_due(frequency)
    assert due == {-1: [], 1: [1, 2, 3, 4, 5], 2: [2, 4, 5], 9: [5]}


def test_checkpoints_where_they_are_due(make: Make) -> None:
    loop = make(save_freq=2)
    loop.run()
    assert saved(loop) == [2, 4, 5] and not loop.is_stopping


def test_a_resumed_loop_goes_on_from_the_newest(make: Make) -> None:
    first = make(save_freq=2)
    assert not first.load_checkpoint()
    first.run()
    second = make(save_freq=2)
    second.resumable["loader"].number = 0
    assert second.load_checkpoint() and second.global_steps == 5
    assert (
        second.saver.workers["actor"].loaded == ["global_step_5"]
        and second.resumable["loader"].number == 7
    )


def test_a_stop_that_was_asked_for_ends_after_a_step_that_is_saved(
    make: Make, asked_to_stop: None
) -> None:
    loop = make(save_freq=4)
    loop.run()
    assert loop.is_stopping and loop.global_steps == 1 and saved(loop) == [1]


def test_the_last_step_is_the_end_anyway(make: Make, asked_to_stop: None) -> None:
    loop = make(save_freq=4)
    loop.global_steps = 4
    loop.run()
    assert not loop.is_stopping and saved(loop) == [5]


def test_without_checkpoints_a_stop_saves_none(make: Make, asked_to_stop: None) -> None:
    loop = make(save_freq=-1)
    loop.run()
    assert loop.is_stopping and loop.global_steps == 1 and saved(loop) == []


def test_by_default_the_last_step_is_saved_and_a_stop_is(make: Make, asked_to_stop: None) -> None:
    make().run()
    stop_requested.clear()
    loop = make()
    assert loop.load_checkpoint() and loop.global_steps == 1
    loop.run()
    assert saved(loop) == [1, 5]


@pytest.mark.parametrize(
    ("left_s", "step_s", "spare_s", "expected"),
    [
        (400, 0.0, 0, [5]),
        (400, 500.0, 0, [1, 2, 3, 4, 5]),
        (400, 0.0, 500, [1, 2, 3, 4, 5]),
        (3600, 500.0, 500, [5]),
        (-5, 0.0, 500, [5]),
    ],
)
def test_each_step_is_saved_where_the_machine_may_be_gone_before_the_next(
    left_s: int,
    step_s: float,
    spare_s: int,
    expected: list[int],
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is taken back after so long; a step and what is to spare must fit. A past second was an earlier machine's."""
    monkeypatch.setenv(EXPIRY_VARIABLES[0], str(int(time.time()) + left_s))
    loop = make(save_freq=9, esi_redundant_time=spare_s)
    loop.step_s = step_s
    loop.run()
    assert saved(loop) == expected and not loop.is_stopping
