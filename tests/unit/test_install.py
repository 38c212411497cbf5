# SPDX-License-Identifier: Apache-2.0
"""The installation says what it is doing, and why it failed."""

import subprocess
from pathlib import Path

import pytest

from tests.limits import COMMAND_S

REPOSITORY = Path(__file__).resolve().parents[2]
# Stands in for pip: it goes on until its progress was reported.
PIP = """#!/usr/bin/env bash
echo "Downloading torch"
until grep -q Downloading "{output}"; do sleep 0.02; done
exit {status}
"""
INSTALL = """
sleep() {{ command sleep 0.02; }}
venv="{venv}" room="3 GB"
source scripts/environment.sh
pip_install torch torch
say installed
"""


@pytest.mark.parametrize("status", [0, 1])
def test_a_long_installation_shows_what_pip_does(status: int, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PIP.format(output=output, status=status))
    python.chmod(0o755)
    command = ["bash", "-euo", "pipefail", "-c", INSTALL.format(venv=tmp_path)]
    with output.open("w") as file:
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=file, stderr=subprocess.PIPE, timeout=COMMAND_S
        )
    assert done.returncode == status
    text = output.read_text()
    assert "Downloading torch" in text
    assert ("installed" in text) == (status == 0)
    assert (b"torch failed" in done.stderr) == (status == 1)
