# SPDX-License-Identifier: Apache-2.0
"""A long wait speaks, a short one does not."""

import os
import re
import select
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from quadriga.observe import watchdog
from quadriga.observe.watchdog import waiting, watched
from tests.limits import HANGS_S, SOON_S


class Ear:
    """Collects reports and lets a test wait for the n-th instead of for a time."""

    def __init__(self) -> None:
        self.reports: list[str] = []
        self._heard = threading.Condition()

    def __call__(self, report: str) -> None:
        with self._heard:
            self.reports.append(report)
            self._heard.notify_all()

    def wait_for(self, count: int) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: len(self.reports) >= count, timeout=SOON_S)

    @property
    def texts(self) -> list[str]:
        """The reports without their durations, which are longer on a busy machine."""
        return [re.sub(r"^waiting \d+ s for ", "", report) for report in self.reports]


def test_a_short_wait_is_silent_and_has_no_thread_of_its_own():
    ear = Ear()
    with waiting("anything"):
        threads = threading.enumerate()
    with waiting("nothing", every_s=30.0, emit=ear):
        assert threading.enumerate() == threads
    assert ear.reports == []
    assert threading.enumerate() == threads


def test_a_long_wait_says_what_it_waits_for_again_and_again_until_it_is_over():
    ear = Ear()
    with waiting("reward of 128 samples", detail=lambda: "96 are graded", every_s=0.01, emit=ear):
        ear.wait_for(2)
    count = len(ear.reports)
    assert set(ear.texts) == {"reward of 128 samples: 96 are graded"}
    assert len(ear.reports) == count


def test_a_failing_detail_is_reported_and_the_watch_goes_on():
    ear = Ear()

    def detail() -> str:
        raise OSError("no such pool")

    with waiting("x", detail=detail, every_s=0.01, emit=ear):
        ear.wait_for(2)
    assert ear.texts[0] == "x (its detail failed: OSError: no such pool)"


def test_a_detail_that_is_stuck_holds_up_no_other_wait():
    ear, is_called, goes_on = Ear(), threading.Event(), threading.Event()

    def detail() -> str:
        is_called.set()
        return str(goes_on.wait(20))

    with waiting("stuck", detail, every_s=0.01):
        assert is_called.wait(20)
        with waiting("other", lambda: "", every_s=0.01, emit=ear):
            ear.wait_for(3)
        goes_on.set()


def test_where_no_thread_can_be_started_it_is_reported_all_the_same(monkeypatch):
    ear, start = Ear(), threading.Thread.start

    def refused(thread):
        if thread.name.startswith("waiting for"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with waiting("x", detail=lambda: "1 of 2", every_s=0.01, emit=ear):
        ear.wait_for(2)
    assert set(ear.texts) == {"x: 1 of 2"}


def test_waits_in_a_fork_are_reported():
    with waiting("the parent's"):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            with waiting(
                "x", lambda: "", every_s=0.01, emit=lambda report: os.write(writer, report.encode())
            ):
                time.sleep(HANGS_S)
            os._exit(1)
    try:
        assert select.select([reader], [], [], SOON_S)[0]
        assert re.match(rb"waiting \d+ s for x: ", os.read(reader, 100))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_an_error_inside_passes_and_ends_the_watch():
    ear = Ear()
    with pytest.raises(RuntimeError), waiting("the end", lambda: "", every_s=0.01, emit=ear):
        ear.wait_for(1)
        raise RuntimeError
    count = len(ear.reports)
    time.sleep(0.1)
    assert len(ear.reports) == count


def test_a_wait_that_speaks_less_often_does_not_silence_the_one_around_it():
    ear = Ear()
    with (
        waiting("the start-up", lambda: "models", every_s=0.01, emit=ear),
        waiting("models", every_s=60),
    ):
        ear.wait_for(2)
    assert set(ear.texts) == {"the start-up: models"}


def test_an_interval_of_zero_is_refused():
    with pytest.raises(ValueError, match="positive"), waiting("x", every_s=0):
        pass


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(30.2, "30 s"), (119, "119 s"), (120, "2 min 00 s"), (3725, "62 min 05 s")],
)
def test_durations(seconds, text, monkeypatch):
    ear, readings = Ear(), iter([0.0])
    # Watches of other tests keep the real clock. With this one they would sleep too long afterwards.
    others = set(threading.enumerate()) - {threading.current_thread()}

    def monotonic():
        if threading.current_thread() in others:
            return time.monotonic()
        return next(readings, seconds)

    monkeypatch.setattr(watchdog, "_watches", {})
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    with waiting("x", lambda: "", every_s=0.01, emit=ear):
        ear.wait_for(1)
    assert ear.reports[0] == f"waiting {text} for x: "


def test_without_a_detail_it_says_where_the_code_is():
    ear = Ear()
    with waiting("x", every_s=0.01, emit=ear):
        # The first report may come before this thread waits.
        ear.wait_for(3)
    assert any(re.fullmatch(rf"x, at {__file__}:\d+ in wait_for", text) for text in ear.texts)


def test_of_waits_in_one_another_the_innermost_speaks():
    outer, inner = Ear(), Ear()
    with waiting("outer", every_s=0.01, emit=outer):
        outer.wait_for(1)
        with waiting("inner", every_s=0.01, emit=inner):
            inner.wait_for(1)
            count = len(outer.reports)
            inner.wait_for(10)
            assert len(outer.reports) <= count + 1
        outer.wait_for(count + 3)


def test_each_item_is_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "EVERY_S", 0.01)

    def rows():
        yield 1
        time.sleep(0.3)
        yield 2

    assert list(watched(rows(), "a row")) == [1, 2]
    assert re.search(rf"for a row, at {__file__}:\d+ in rows\n", capsys.readouterr().out)
