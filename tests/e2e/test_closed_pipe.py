# SPDX-License-Identifier: Apache-2.0
"""A run whose standard output is read by nobody any more: `quadriga train ... 2>&1 | head -n 1`."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.streams import LOG
from tests.limits import COMMAND_S

REWARD = """
def compute_score(solution_str, **kwargs):
    print("é 漢字")
    return 0.0
"""


def test_a_reader_that_leaves_does_not_end_the_run(
    start: Callable[..., subprocess.Popen[str]],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is printed goes to console.log; a reward that prints what ASCII lacks has no errors."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    process = start(
        f"custom_reward_function.path={tmp_path / 'reward.py'}", "trainer.total_training_steps=1"
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(COMMAND_S) == 0
    first, *lines = (tmp_path / "run" / LOG).read_text(encoding="utf-8").splitlines()
    assert "Broken pipe" in first
    assert r"\xe9 \u6f22\u5b57" in lines
    assert any(line.startswith("done: ") for line in lines)
    (metrics,) = metric_lines(tmp_path / "run")
    assert metrics["reward/errors"] == 0
