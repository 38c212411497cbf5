# SPDX-License-Identifier: Apache-2.0
"""`--keep-alive`: a run whose process is killed again and again ends with the files of the run left alone.

When a command is started again is in tests/unit/trainer/test_keep_alive.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main
from quadriga.trainer.keep_alive import keep_alive
from tests.e2e.conftest import REPOSITORY, command_line, read_recorded_step
from tests.limits import COMMAND_S

COMMON = (
    "trainer.total_training_steps=8",
    "trainer.save_freq=1",
    "trainer.rollout_data_dir=run/rollouts",
    "trainer.default_local_dir=run",
)
FIRST_STEP = 0


class Killer(threading.Thread):
    """Sends SIGKILL to the process of a run once it has logged so many steps; 0: in its first step.

    Attributes:
        num_killed: how many processes it has killed.
    """

    def __init__(self, run: Path, moments: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._run, self._moments = run, moments
        self.num_killed = 0

    def run(self) -> None:
        killed: set[int] = set()
        for moment in self._moments:
            until = time.monotonic() + COMMAND_S
            while (pid := self._pid()) in killed or not self._has_reached(moment):
                if time.monotonic() > until:
                    return
                time.sleep(0.002)
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            self.num_killed += 1

    def _pid(self) -> int:
        """The process that holds the run's lock; 0 where there is none."""
        lock = self._run / ".lock"
        text = lock.read_text() if lock.exists() else ""
        return json.loads(text)["pid"] if text.endswith("\n") else 0

    def _has_reached(self, moment: int) -> bool:
        metrics = self._run / "metrics.jsonl"
        has_begun = (self._run / "config.yaml").exists()
        num_lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        return self._pid() > 0 and has_begun and num_lines >= moment


def contents(run: Path, metric_lines: Callable[[Path], list[dict[str, Any]]]) -> dict[str, Any]:
    """All files of a run, by name, without what depends on the clock."""
    files: dict[str, Any] = {}
    for path in run.rglob("*"):
        name = str(path.relative_to(run))
        # A run that began anew has moved the log and the record of the one before it aside.
        is_aside = re.match(r"(metrics|samples)\.\d+\.jsonl|rollouts/superseded_", name)
        if is_aside or not path.is_file():
            continue
        is_record = path.suffix == ".parquet" and path.parent.name == "rollouts"
        files[name] = read_recorded_step(path) if is_record else path.read_bytes()
    return files | {"metrics.jsonl": metric_lines(run)}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """`places(name)`: from here on this process works in this folder, and has the run `run` there."""

    def enter(name: str) -> Path:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name / "run"

    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield enter


@pytest.mark.slow
def test_five_deaths_change_no_file(
    home: Path,
    tmp_path: Path,
    places: Callable[[str], Path],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The first one in the first step."""
    command = [
        sys.executable,
        "-m",
        "quadriga.cli.main",
        "train",
        *command_line(home, tmp_path, *COMMON),
    ]
    alone = places("alone")
    subprocess.run(command, check=True, timeout=COMMAND_S)
    killed = places("killed")
    killer = Killer(killed, (FIRST_STEP, 1, 3, 4, 6))
    killer.start()
    assert keep_alive(command, pause_s=0.01) == 0
    killer.join(COMMAND_S)
    assert killer.num_killed == 5
    assert capfd.readouterr().out.count("--keep-alive: the run was ended by signal 9 (Killed)") == 5
    assert contents(killed, metric_lines) == contents(alone, metric_lines)


@pytest.mark.slow
def test_the_command_with_the_option(
    home: Path,
    tmp_path: Path,
    places: Callable[[str], Path],
    session_members: Callable[[int], list[int]],
) -> None:
    """Killed in its first step it is started again; at its end nothing is left."""
    run = places("killed")
    words = command_line(home, tmp_path, *COMMON, "trainer.total_training_steps=2")
    killer = Killer(run, [FIRST_STEP])
    killer.start()
    command = [sys.executable, "-m", "quadriga.cli.main", "train", "--keep-alive", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    output, _ = process.communicate(timeout=COMMAND_S)
    assert process.returncode == 0, output
    assert "before the end of a step; the same command is started again in 5 s." in output
    assert killer.num_killed == 1 and (run / "global_step_2").is_dir()
    assert session_members(process.pid) == []


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "got a run that writes no checkpoint"),
        (("trainer.save_freq=1", "trainer.resume_mode=disable"), "got trainer.resume_mode=disable"),
    ],
)
def test_runs_that_would_not_go_on_are_refused(
    overrides: tuple[str, ...],
    reason: str,
    arguments: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--keep-alive", *arguments(*overrides)]) == 2
    assert f"--keep-alive: {reason}" in " ".join(capsys.readouterr().err.split())
