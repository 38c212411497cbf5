# SPDX-License-Identifier: Apache-2.0
"""A command that is asked to stop passes it on to the run, which is a process of Ray's.

What it does not prove: the same where that process is on another machine.
"""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quadriga.trainer.checkpoint import Checkpoints, verify

WAIT_S = 300.0


def test_sigterm_saves_the_step_in_work(
    start: Callable[..., subprocess.Popen[str]],
    train: Callable[..., Path],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    session_members: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    """It ends with a checkpoint of its last step, from which the run goes on to the bit, in one process; no process
    of the cluster stays."""
    process = start("trainer.total_training_steps=100000", "trainer.save_freq=90000", "trainer.backend=ray")
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + WAIT_S
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, output
    last = len(metric_lines(tmp_path / "run"))
    assert "SIGTERM: the run ends after this step" in output
    assert f"The same command goes on from the checkpoint of step {last}." in output
    assert session_members(process.pid) == []
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.steps() == [last] == [checkpoints.newest()]
    verify(checkpoints.path(last))
    more = (f"trainer.total_training_steps={last + 2}", "trainer.save_freq=90000")
    assert metric_lines(train(*more)) == metric_lines(train(*more, run="alone"))
