# SPDX-License-Identifier: Apache-2.0
"""The few numbers a person watches: a bar on a terminal, aligned lines in a log, an estimate of the time left."""

import math
import re
import sys
import threading
from datetime import datetime
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quadriga.errors import ConfigError
from quadriga.observe import progress
from quadriga.observe.progress import (
    NotebookCell,
    Picture,
    Progress,
    ValidationResult,
    align_fields,
    clock_text,
    end_text,
    join_field,
    step_fields,
    validation_results,
)
from tests.limits import SOON_S


def last_state(screen: StringIO) -> str:
    """What the bar's line shows in the end, without the codes that move the cursor."""
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", screen.getvalue()))
    return [line for line in lines if line.strip()][-1]


class HandClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def log_console(screen: StringIO) -> Console:
    return Console(file=screen, force_terminal=False, soft_wrap=True)


def terminal(screen: StringIO, width: int = 110) -> Console:
    return Console(
        file=screen, force_terminal=True, force_interactive=True, width=width, color_system=None
    )


def test_a_log_has_one_aligned_line_per_step():
    screen, clock = StringIO(), HandClock()
    with Progress(12, console=log_console(screen), clock=clock) as progress:
        for step, speed in ((1, "980"), (2, "1 214"), (3, "998")):
            clock.now += 10
            progress.update(step, {"reward": f"0.{step}", "tok/s": speed})
    assert screen.getvalue().splitlines() == [
        "step  1/12  reward 0.1  980 tok/s  1:50 left",
        "step  2/12  reward 0.2  1 214 tok/s  1:40 left",
        "step  3/12  reward 0.3    998 tok/s  1:30 left",
    ]


def test_a_terminal_that_goes_away_leaves_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each step, and no codes that move a cursor."""
    monkeypatch.setenv("TERM", "xterm")
    screen = StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    with Progress(3, console=Console(file=screen, color_system=None)) as progress:
        progress.update(1, {"reward": "0.1"})
        monkeypatch.setattr(screen, "isatty", lambda: False)
        logged_from = screen.tell()
        progress.update(2, {"reward": "0.2"})
        progress.message("a sample")
    line, sample = screen.getvalue()[logged_from:].splitlines()
    assert line.startswith("step 2/3  reward 0.2")
    assert sample == "a sample"


def test_a_log_line_is_never_wrapped_and_brackets_are_no_markup():
    screen = StringIO()
    progress = Progress(2, console=log_console(screen))
    progress.message("answer [bold]x[/bold] [/oops] " + "y" * 300)
    progress.update(2, {f"name{i}": "0.123" for i in range(30)})
    first, second = screen.getvalue().splitlines()
    assert first == "answer [bold]x[/bold] [/oops] " + "y" * 300
    assert second.startswith("step 2/2  name0 0.123") and second.endswith("name29 0.123")


def test_the_first_step_does_not_spoil_the_estimate():
    clock = HandClock()
    progress = Progress(100, console=log_console(StringIO()), clock=clock)
    assert progress.left_s is None
    clock.now = 60.0
    progress.update(1, {})
    assert progress.left_s == 60 * 99
    for step in range(2, 5):
        clock.now += 2
        progress.update(step, {})
        assert progress.left_s == 2 * (100 - step)


def test_what_was_before_the_first_step_does_not_enter_the_estimate():
    clock = HandClock()
    progress = Progress(5, console=log_console(StringIO()), clock=clock)
    clock.now = 60.0  # a validation
    progress.begin()
    clock.now = 70.0
    progress.update(1, {})
    assert progress.left_s == 10 * 4


def test_a_validation_that_is_repeated_at_the_end_counts_in_the_time_left():
    clock = HandClock()
    progress = Progress(2, console=log_console(StringIO()), clock=clock)
    clock.now = 60.0
    progress.begin(is_repeated=True)
    clock.now = 70.0
    progress.update(1, {})
    assert progress.left_s == 10 + 60
    progress.update(2, {})
    assert progress.left_s == 0


def test_a_silent_log_gets_lines_with_the_activity_until_the_end():
    printed = threading.Event()

    class Screen(StringIO):
        def write(self, text: str) -> int:
            num_written = super().write(text)
            printed.set()
            return num_written

    screen = Screen()
    console = log_console(screen)
    with Progress(3, console=console, activity=lambda: "testing", quiet_s=0.001):
        assert printed.wait(SOON_S)
    assert re.match(r"after step 0/3: \d+ s  testing\n", screen.getvalue())


def test_a_resumed_run_counts_only_its_own_steps_and_the_pace_follows_a_change():
    clock = HandClock()
    progress = Progress(100, initial=50, console=log_console(StringIO()), clock=clock)
    for step in range(51, 61):
        clock.now += 4
        progress.update(step, {})
    assert progress.left_s == 4 * 40
    for step in range(61, 72):
        clock.now += 1
        progress.update(step, {})
    assert progress.left_s == 1 * 29


def test_a_terminal_has_a_bar_with_the_few_fields_and_messages_above_it():
    screen, clock = StringIO(), HandClock()
    with Progress(30, console=terminal(screen), clock=clock, activity=lambda: "gen") as progress:
        clock.now += 8
        progress.update(
            12, {"reward": "0.430", "loss": "+0.0010", "tok/s": "1 214", "s/step": "8.1"}
        )
        progress.message("validation at step 12 [x]")
    assert "validation at step 12 [x]\n" in screen.getvalue()
    assert last_state(screen).startswith("step 12/30 ━")
    shown = r"reward 0\.430  1 214 tok/s  8\.1 s/step 0:12 left, ends (\w+ )?\d\d:\d\d · gen"
    assert re.search(shown, last_state(screen))
    assert "loss" not in screen.getvalue()


def test_a_finished_bar_says_so_and_closing_twice_is_fine():
    screen = StringIO()
    progress = Progress(2, description="filter", console=terminal(screen))
    progress.update(2, {"kept": "17"})
    progress.close()
    progress.close()
    assert last_state(screen).startswith("filter 2/2")
    assert "kept 17 done" in last_state(screen)


@pytest.mark.parametrize(("width", "is_shown"), [(140, True), (139, False)])
def test_a_wide_terminal_has_room_for_parts_of_the_reward(width: int, is_shown: bool):
    screen = StringIO()
    with Progress(30, console=terminal(screen, width=width)) as progress:
        progress.update(
            3, {"reward": "0.430", "tok/s": "1 214", "s/step": "8.1", "reward.format": "0.250"}
        )
    assert ("reward.format 0.250" in last_state(screen)) == is_shown


@pytest.mark.parametrize(("width", "end"), [(50, "…"), (80, "· generating 61/128")])
def test_a_narrow_terminal_keeps_the_bar_on_one_line(width: int, end: str) -> None:
    screen = StringIO()
    activity = "generating 61/128".format
    with Progress(30, console=terminal(screen, width=width), activity=activity) as progress:
        progress.update(3, {"reward": "0.430", "tok/s": "1 214", "s/step": "8.1"})
    assert last_state(screen).startswith("step")
    assert last_state(screen).rstrip().endswith(end)
    assert len(last_state(screen)) <= width


def test_a_missing_field_leaves_its_place_empty():
    widths = {}
    full = align_fields({"reward": "0.5", "val": "0.25", "tok/s": "12"}, widths)
    assert full == "reward 0.5  val 0.25  12 tok/s"
    assert (
        align_fields({"reward": "0.5", "tok/s": "13"}, widths) == "reward 0.5            13 tok/s"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (144, "2:24"), (3744, "1:02:24"), (187_000, "2 d 03 h")],
)
def test_clock_text(seconds, text):
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "ends 23:00"),
        (3599, "ends 23:59"),
        (3600, "ends Tue 00:00"),
        (6 * 86400, "ends Sun 23:00"),
        (7 * 86400, "ends 08 Jan 23:00"),
    ],
)
def test_the_predicted_end_names_the_day_unless_it_is_today(seconds: int, text: str) -> None:
    assert end_text(seconds, datetime(2024, 1, 1, 23, 0)) == text


def test_the_important_metrics_are_picked_in_a_fixed_order_and_the_rest_is_not():
    metrics = {
        "timing_s/step": 8.14,
        "perf/throughput": 1214.3,
        "actor/pg_loss": -0.00123,
        "critic/vf_loss": 0.0251,
        "critic/vf_explained_var": 0.374,
        "actor/lr": 2e-5,
        "actor/grad_norm": 0.834,
        "critic/score/mean": 0.4301,
        "perf/mfu/actor": 0.12,
        "response_length/mean": 4.24,
        "rollout/num_tool_calls": 1024.0,
        "actor/kl_loss": 0.00004,
        "critic/advantages/max": 3.0,
        **{f"reward/extra/{name}": 0.25 for name in ("len", "acc", "format", "tags", "fifth")},
    }
    assert list(step_fields(metrics).items()) == [
        ("reward", "0.430"),
        ("loss", "-0.0012"),
        ("critic", "0.0251"),
        ("explained", "0.37"),
        ("kl", "4.0e-05"),
        ("grad", "0.834"),
        ("lr", "2.0e-05"),
        ("len", "4.2"),
        ("calls", "1 024"),
        ("mfu", "12%"),
        ("tok/s", "1 214"),
        ("s/step", "8.1"),
        ("reward.len", "0.250"),
        ("reward.acc", "0.250"),
        ("reward.format", "0.250"),
        ("reward.tags", "0.250"),
    ]


@pytest.mark.parametrize(("value", "text"), [(math.nan, "nan"), (-math.inf, "-inf")])
def test_a_number_that_is_none_is_shown_as_such(value, text):
    assert step_fields({"actor/entropy": value, "perf/throughput": value}) == {
        "entropy": text,
        "tok/s": text,
    }


def test_conversations_without_tools_have_no_count_of_calls():
    assert step_fields({"rollout/num_tool_calls": 0.0, "actor/entropy": 0.0}) == {
        "entropy": "0.000"
    }


def test_units_stand_behind_labels_before():
    assert join_field("reward", "0.43") == "reward 0.43"
    assert join_field("tok/s", "1 214") == "1 214 tok/s"


def test_validation_names_are_taken_apart_though_sources_contain_slashes():
    results = validation_results(
        {
            "val-core/openai/gsm8k/reward/mean@8": 0.5,
            "val-core/math/acc/maj@8/mean": 0.75,
            "val-core/none": 0.0,
            "val-aux/math/acc/std@8": 0.1,
            "actor/entropy": 1.0,
        }
    )
    assert results == [
        ValidationResult("openai/gsm8k", "reward", "mean@8", 0.5),
        ValidationResult("math", "acc", "maj@8/mean", 0.75),
    ]
    assert results[0].column == "reward mean@8"


CURVES = Picture({"reward": [(1, 0.5), (2, 0.75)]})


def test_a_picture_is_written_as_its_name_ends(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    assert CURVES.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert CURVES.save(tmp_path / "a.svg").read_text().startswith("<svg")
    with pytest.raises(ConfigError, match=r"a\.jpg', expected a name that ends in \.svg or \.png"):
        CURVES.save(tmp_path / "a.jpg")


def test_a_png_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(progress, "import_module", missing)
    with pytest.raises(ConfigError, match=r"matplotlib.*pip install -e '\.\[plot\]'"):
        CURVES.save(tmp_path / "a.png")


def test_a_notebook_shows_the_curve_of_the_first_field(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)
    display = SimpleNamespace(HTML=str, display=lambda html, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    cell = NotebookCell(total=2, initial=0)
    assert "<svg" not in shown[-1]
    cell.update(1, 2, {"reward": "0.500", "loss": "1.0"})
    cell.update(2, 2, {"reward": "1 000.250", "loss": "0.5"})
    assert "step 2/2" in shown[-1]
    assert "<svg" in shown[-1]
    assert "1000" in shown[-1].replace(" ", "").replace(",", "")
