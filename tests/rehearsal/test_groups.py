# SPDX-License-Identifier: Apache-2.0
"""Communicators of NCCL that a run makes: few, none for a group of gloo, and one GPU per rank."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import PROGRAM_S

PROGRAM = Path(__file__).with_name("nccl_groups.py")
MOST_COMMUNICATORS = 20


def test_communicators_of_each_layout(tmp_path: Path) -> None:
    """Those of the default group, of a layout (or Megatron's), and of rollout groups, on each rank."""
    pytest.importorskip("megatron.core")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(probe.getsockname()[1]))
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(4):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert result["splits"] == 0
        assert "No backend type associated with device type cpu" in result["host tensors"]
        numbers = result["communicators"]
        of_rollout = numbers.pop("rollout groups")
        assert 1 + max(numbers.values()) + of_rollout <= MOST_COMMUNICATORS, numbers
