# SPDX-License-Identifier: Apache-2.0
"""The command lines of docs/first_gpu_run.md: their keys exist and fit together."""

import re
import shlex
from pathlib import Path

import pytest

from quadriga.config import load_config, training_findings

PAGE = Path(__file__).parents[3] / "docs/first_gpu_run.md"
ELSEWHERE = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")
NOT_INSTALLED = "which is not installed"


def command_lines() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(quadriga train .*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return [shlex.split(block.replace("\\\n", " "))[2:] for block in blocks]


def test_there_are_four_lines_of_our_own() -> None:
    assert len(command_lines()) == 4


@pytest.mark.parametrize("number", range(4))
def test_a_line_is_correct(number: int) -> None:
    """Only files and packages that this machine does not have are missing."""
    findings, _ = training_findings(load_config(command_lines()[number]).config)
    wrong = []
    for finding in findings:
        if finding.where not in ELSEWHERE and NOT_INSTALLED not in str(finding):
            wrong.append(str(finding))
    assert wrong == []
