# SPDX-License-Identifier: Apache-2.0
"""The command lines of docs/first_gpu_run.md: their keys exist and fit together."""

import json
import re
import shlex
from pathlib import Path

import pytest

from quadriga.cli.plan import main as plan
from quadriga.config import Config, load_config, training_findings
from quadriga_verl.commands.entries import find_entry
from quadriga_verl.commands.translate import translate

PAGE = Path(__file__).parents[3] / "docs/first_gpu_run.md"
ELSEWHERE = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
NOT_INSTALLED = "which is not installed"


def command_lines(program: str) -> list[list[str]]:
    """Arguments of the page's command lines that begin with `program`."""
    blocks = re.findall(rf"```bash\n{program} (.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


def require_no_finding(config: Config) -> None:
    """Only files and packages that this machine does not have may be missing."""
    findings, _ = training_findings(config)
    wrong = []
    for finding in findings:
        if finding.where not in ELSEWHERE and NOT_INSTALLED not in str(finding):
            wrong.append(str(finding))
    assert wrong == []


def test_there_are_six_lines() -> None:
    assert len(command_lines("quadriga train")) == 5
    assert len(command_lines("quadriga verl main_ppo")) == 1


@pytest.mark.parametrize("number", range(4))
def test_a_line_is_correct(number: int) -> None:
    require_no_finding(load_config(command_lines("quadriga train")[number]).config)


def test_the_recipe_is_correct_and_has_the_plans_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = command_lines("quadriga train")[-1]
    require_no_finding(load_config(line).config)

    text = PAGE.read_text("utf-8")
    [options] = re.findall(r"`(--devices .*?)`", text)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    model = f"actor_rollout_ref.model.path={tmp_path}"
    assert plan([*line, model, *options.split()]) == 0
    [numbers] = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    printed = capsys.readouterr().out.splitlines()
    assert [row for row in numbers.splitlines() if row not in printed] == []


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
