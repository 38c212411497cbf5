# SPDX-License-Identifier: Apache-2.0
"""Runs that are asked to stop, and runs whose machine is taken back.

The same signal to a run on Ray: tests/e2e/ray/test_stopping.py. Runs that are killed: test_resume.py.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main
from quadriga.observe.stopping import EXPIRY_VARIABLES
from quadriga.trainer.checkpoint import Checkpoints, verify
from tests.limits import COMMAND_S

ENDLESS = ("trainer.total_training_steps=100000", "trainer.save_freq=90000")
# Data sets of the run's own: one that is asked to stop in step 2, and one that stands still then.
IS_ASKED_TO_STOP = """
import os, signal
from quadriga.data import RLHFDataset

class Rows(RLHFDataset):
    def on_batch_end(self, batch):
        if batch.meta_info["global_steps"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
"""
STANDS_STILL = """
import time
from quadriga.data import RLHFDataset

class Rows(RLHFDataset):
    def on_batch_end(self, batch):
        if batch.meta_info["global_steps"] == 2:
            time.sleep(600)
"""


def rows(tmp_path: Path, text: str) -> tuple[str, str]:
    """Overrides for a data set of this text."""
    (tmp_path / "rows.py").write_text(text)
    return f"data.custom_cls.path={tmp_path / 'rows.py'}", "data.custom_cls.name=Rows"


def wait_for_line(process: subprocess.Popen[str], run: Path, number: int) -> None:
    """Until the metrics have so many lines."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + COMMAND_S
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < number:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.01)


def test_sigterm_saves_the_step_in_work(
    arguments: Callable[..., list[str]],
    alone: Callable[..., Path],
    train: Callable[..., Path],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """It ends as an interrupted run does, with a checkpoint of its last step, from which it goes on to the bit."""
    own = rows(tmp_path, IS_ASKED_TO_STOP)
    capfd.readouterr()
    assert main(["train", *arguments(*ENDLESS, *own)]) == 130
    printed = capfd.readouterr()
    last = len(metric_lines(tmp_path / "run"))
    assert "SIGTERM: the run ends after this step" in printed.err
    assert "once more ends it at once. If it is killed before: T" in printed.err
    told = (
        f"interrupted in step {last}. The same command goes on from the checkpoint of step {last}."
    )
    assert told in printed.out and printed.err.rstrip().endswith("quadriga train: interrupted")
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.steps() == [last] == [checkpoints.newest()]
    verify(checkpoints.path(last))
    steps = "trainer.total_training_steps=5"
    assert metric_lines(train(*own, steps, "trainer.save_freq=90000")) == metric_lines(alone(steps))


def test_second_sigterm_ends_at_once(
    start: Callable[..., subprocess.Popen[str]],
    session_members: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    """Also a run that stands still; nothing that it has started stays."""
    process = start(*ENDLESS, *rows(tmp_path, STANDS_STILL))
    wait_for_line(process, tmp_path / "run", 2)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=COMMAND_S) == -signal.SIGTERM
    deadline = time.monotonic() + COMMAND_S
    while session_members(process.pid):
        assert time.monotonic() < deadline, session_members(process.pid)
        time.sleep(0.01)
    assert Checkpoints(tmp_path / "run").steps() == []


def test_ctrl_c(
    start: Callable[..., subprocess.Popen[str]],
    session_members: Callable[[int], list[int]],
    alone: Callable[..., Path],
    train: Callable[..., Path],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    """In the middle of generation, and again and again while the command ends what it has started: one line says how to
    go on, there is no traceback and no process stays. The same command goes on."""
    long = ("data.max_response_length=96", "actor_rollout_ref.rollout.ignore_eos=True")
    options = (*long, "trainer.save_freq=1", "trainer.total_training_steps=6")
    process = start(*options)
    wait_for_line(process, tmp_path / "run", 2)
    # As a terminal does: to the whole foreground process group.
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    output = ""
    while not output.endswith("quadriga train: interrupted\n"):
        line = process.stdout.readline()
        assert line, output
        output += line
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert process.returncode == 130 and not process.stdout.read()
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("interrupted in step ")]
    assert "The same command goes on from the checkpoint of step " in line
    assert session_members(process.pid) == []
    for checkpoint in (tmp_path / "run").glob("global_step_*"):
        verify(checkpoint)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert metric_lines(train(*options)) == metric_lines(alone(*options))


def test_machine_that_is_taken_back(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Far from its end only the last step is saved; near to it each may be the last; without saving, none."""
    variable = EXPIRY_VARIABLES[0]
    steps = (
        "trainer.total_training_steps=3",
        "trainer.save_freq=100",
        "trainer.esi_redundant_time=600",
    )
    monkeypatch.setenv(variable, str(int(time.time()) + 1_000_000))
    assert Checkpoints(train(*steps, run="far")).steps() == [3]
    monkeypatch.setenv(variable, str(int(time.time()) + 500))
    assert Checkpoints(train(*steps, run="near")).steps() == [1, 2, 3]
    assert Checkpoints(train(*steps, "trainer.save_freq=-1", run="none")).steps() == []
