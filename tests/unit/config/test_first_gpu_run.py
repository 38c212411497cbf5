# SPDX-License-Identifier: Apache-2.0
"""The command lines of docs/first_gpu_run.md: their keys exist and fit together."""

import re
import shlex
from pathlib import Path

import pytest

from quadriga.config import Config, load_config, training_findings
from quadriga_verl.commands.entries import find_entry
from quadriga_verl.commands.translate import translate

PAGE = Path(__file__).parents[3] / "docs/first_gpu_run.md"
ELSEWHERE = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")
NOT_INSTALLED = "which is not installed"


def command_lines(program: str) -> list[list[str]]:
    """Arguments of the page's command lines that begin with `program`."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(rf"```bash\n{program} (.*?)```", page, re.DOTALL)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


def require_no_finding(config: Config) -> None:
    """Only files and packages that this machine does not have may be missing."""
    findings, _ = training_findings(config)
    wrong = []
    for finding in findings:
        if finding.where not in ELSEWHERE and NOT_INSTALLED not in str(finding):
            wrong.append(str(finding))
    assert wrong == []


def test_there_are_five_lines() -> None:
    assert len(command_lines("quadriga train")) == 4
    assert len(command_lines("quadriga verl main_ppo")) == 1


@pytest.mark.parametrize("number", range(4))
def test_a_line_is_correct(number: int) -> None:
    require_no_finding(load_config(command_lines("quadriga train")[number]).config)


def test_verls_line_is_correct() -> None:
    """It trains on eight ranks on Ray, with vLLM in groups of two."""
    [words] = command_lines("quadriga verl main_ppo")
    line = translate(find_entry("main_ppo"), words)
    assert not line.refused
    assert isinstance(line.config, Config)
    require_no_finding(line.config)
    assert (line.config.trainer.backend, line.config.trainer.n_gpus_per_node) == ("ray", 8)
    rollout = line.config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.tensor_model_parallel_size) == ("vllm", 2)
