# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by the clock: when one starts, what puts it off, and that a failure does not end a run."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from quadriga.trainer import timed_saving
from quadriga.trainer.checkpoint import Checkpoints
from quadriga.trainer.timed_saving import SPARE_BYTES, TimedSaver

MB = 10**6


class Worker:
    """Two ranks that write one small file, and say that it has `num_bytes`."""

    def __init__(self) -> None:
        self.num_bytes = MB
        self.error: OSError | None = None

    def save_checkpoint(self, directory: Path) -> None:
        if self.error is not None:
            raise self.error
        (directory / "actor").mkdir()
        (directory / "actor" / "weights").write_text("weights")

    def checkpoint_written(self, wait: bool = False) -> list[bool]:
        return [True, True]

    def checkpoint_bytes(self) -> list[dict[str, int]]:
        return [{"shared": self.num_bytes}, {"shared": self.num_bytes}]


class Run:
    """A run whose minutes the test chooses."""

    def __init__(self, directory: Path) -> None:
        self.minutes = 0.0
        self.reports: list[str] = []
        self.worker = Worker()
        self.checkpoints = Checkpoints(directory, 2, is_by_time=True)
        self.saver = TimedSaver(
            self.checkpoints,
            {"actor": self.worker},
            lambda _: None,
            self.reports.append,
            period_s=600,
            clock=lambda: 60 * self.minutes,
        )

    def step(self, minutes: int, *, is_last: bool = False) -> list[int]:
        """Steps on disk after the step that ends at this minute, which is also its number."""
        self.minutes = minutes
        self.saver.start_where_due(minutes, is_due=False, is_last=is_last)
        self.saver.finish()
        return self.checkpoints.steps()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    tmp_path.joinpath("run").mkdir()
    return Run(tmp_path / "run")


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_free(count: int) -> None:
        usage = SimpleNamespace(free=count)
        monkeypatch.setattr(timed_saving.shutil, "disk_usage", lambda _: usage)

    return set_free


def test_one_each_period_and_after_the_last_step_of_which_two_are_kept(run: Run) -> None:
    """A checkpoint that was asked for, in an earlier run here, is never deleted."""
    asked_for = Checkpoints(run.checkpoints.directory)
    (asked_for.begin(1) / "weights").write_text("weights")
    asked_for.complete(1)
    steps = [run.step(minutes) for minutes in (5, 10, 15, 25, 35)]
    assert steps == [[1], [1, 10], [1, 10], [1, 10, 25], [1, 25, 35]]
    assert run.step(36, is_last=True) == [1, 35, 36]


def test_put_off_while_the_disk_is_full(run: Run, free_bytes: Callable[[int], None]) -> None:
    free_bytes(SPARE_BYTES)
    assert [run.step(minutes) for minutes in (10, 11, 12)] == [[], [], []]
    (report,) = run.reports
    assert "step 10 is put off" in report and "Free space" in report
    free_bytes(SPARE_BYTES + MB)
    assert run.step(13) == [13]
    free_bytes(0)
    assert run.step(14, is_last=True) == [13] and "step 14 is not written" in run.reports[-1]


def test_put_off_until_it_takes_at_most_five_percent(
    run: Run, free_bytes: Callable[[int], None]
) -> None:
    """42 s at the assumed speed are 5 % of 14 minutes."""
    free_bytes(10**12)
    run.worker.num_bytes = int(42 * timed_saving.ASSUMED_BYTES_PER_S)
    assert run.step(10) == [] and run.step(13) == [] and run.step(14) == [14]
    assert [report for report in run.reports if "put off" in report] == run.reports[:1]
    # What was measured counts from then on.
    run.saver._spent_s = 30.0
    run.saver._longest_work_s = 30.0
    assert run.step(19) == [14] and run.step(24) == [14, 24]


def test_a_failure_is_reported_and_the_next_one_is_tried_a_period_later(run: Run) -> None:
    run.worker.error = OSError(28, "No space left on device")
    assert run.step(10) == [] and run.step(20) == []
    (report,) = run.reports
    assert "No space left" in report and "goes on" in report
    run.worker.error = None
    assert run.step(25) == [] and run.step(30) == [30]
    run.worker.error = OSError(28, "No space left on device")
    assert run.step(31, is_last=True) == [30] and "No space left" in run.reports[-1]
