# SPDX-License-Identifier: Apache-2.0
"""Phases add up and nest; the start-up chart stands where things happened. A clock moved by hand replaces waiting."""

import re
import threading
import time

import pytest

from quadriga.observe import timing
from quadriga.observe.timing import BAR_WIDTH, PhaseTimer, Tally, Timeline


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def test_phases_accumulate_and_an_outer_one_includes_its_inner_ones(clock):
    timer = PhaseTimer(clock)
    for _ in range(2):
        with timer.phase("step"):
            clock.now += 1
            with timer.phase("gen"):
                assert timer.current == "gen"
                clock.now += 3
            assert timer.current == "step"
    assert timer.current == ""
    assert timer.seconds == {"gen": 6.0, "step": 8.0}


def test_a_phase_open_inside_itself_counts_once(clock):
    timer = PhaseTimer(clock)
    with timer.phase("save"), timer.phase("save"):
        clock.now += 2
    assert timer.seconds == {"save": 2.0}


def test_a_phase_that_raises_is_counted(clock):
    timer = PhaseTimer(clock)
    with pytest.raises(KeyError), timer.phase("reward"):
        clock.now += 5
        raise KeyError("x")
    assert timer.seconds == {"reward": 5.0}
    assert timer.current == ""


def test_an_activity_has_a_count_where_responses_are_counted_here(clock):
    timer = PhaseTimer(clock)
    Tally.add(1)  # nothing is open, as in a process of Ray's
    with timer.phase("step"):
        assert timer.activity == ""
        with timer.phase("testing"), Tally.opened(8) as tally, Tally.opened(4) as inner_tally:
            assert inner_tally is tally
            assert timer.activity == "validating"
            Tally.add(3)
            assert timer.activity == "validating 3/8"
            # Rows that another engine generates once more.
            Tally.add(7)
            assert timer.activity == "validating 8/8"
        with timer.phase("gen"):
            assert timer.activity == "generating"
            with Tally.opened(4), timer.phase("reward"):
                Tally.add(1)
                assert timer.activity == "grading"
        with timer.phase("my_phase"):
            assert timer.activity == "my_phase"


def test_a_timeline_draws_parts_where_they_happened(clock):
    timeline = Timeline("start", clock)
    with timeline.part("import"):
        clock.now += 2
    with timeline.part("model"):
        clock.now += 1
        with timeline.part("weights"):
            clock.now += 3
    clock.now += 2
    title, imported, model, weights = timeline.render().splitlines()
    assert title == "start           6.0 s"
    assert imported == "  import        2.0 s  " + "━" * 11
    assert model == "  model         4.0 s  " + " " * 11 + "━" * 21
    assert weights == "    weights     3.0 s  " + " " * 16 + "━" * 16
    assert len(model) == len("  model         4.0 s  ") + BAR_WIDTH


def test_time_that_no_part_accounts_for_is_shown(clock):
    timeline = Timeline(clock=clock)
    clock.now += 1
    with timeline.part("a"):
        clock.now += 1
    clock.now += 0.1
    with timeline.part("b"):
        clock.now += 1
    names = [line.split()[0] for line in timeline.render().splitlines()]
    assert names == ["start-up", "(other)", "a", "b"]


def test_an_open_part_and_an_empty_timeline_can_be_drawn(clock):
    timeline = Timeline(clock=clock)
    assert timeline.render() == "start-up     0.0 s"
    with timeline.part("model"):
        clock.now += 4
        assert "model      4.0 s" in timeline.render()


def test_time_before_the_timeline_counts(clock):
    timeline = Timeline(clock=clock, begun_s=time.time() - 6)
    with timeline.part("imports", since_origin=True):
        pass
    with timeline.part("data"):
        clock.now += 2
    lines = timeline.render().splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["start-up", "8.0"],
        ["imports", "6.0"],
        ["data", "2.0"],
    ]
    assert lines[2].rstrip("━").endswith(" " * 24)


def test_a_start_up_names_what_it_waits_for_until_it_is_closed(monkeypatch, capsys):
    monkeypatch.setattr(timing, "NOTICE_S", 0.01)
    timeline = Timeline()
    timeline.report()
    printed = ""
    with timeline.part("cluster"), timeline.part("head"):
        while "cluster, head" not in printed:
            printed += capsys.readouterr().out
    timeline.close()
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().out == ""
    assert re.fullmatch(r"waiting \d+ s for the start-up: cluster, head", printed.splitlines()[-1])


def test_parts_of_two_threads_stand_beside_each_other(clock):
    timeline = Timeline(clock=clock)
    has_begun, may_end = threading.Event(), threading.Event()

    def load() -> None:
        with timeline.part("models"):
            has_begun.set()
            may_end.wait(60)

    thread = threading.Thread(target=load)
    with timeline.part("data"):
        thread.start()
        assert has_begun.wait(60)
        clock.now += 1
    clock.now += 3
    may_end.set()
    thread.join()
    assert [line.split()[:2] for line in timeline.render().splitlines()] == [
        ["start-up", "4.0"], ["data", "1.0"], ["models", "4.0"]
    ]  # fmt: skip
