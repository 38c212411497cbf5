# SPDX-License-Identifier: Apache-2.0
"""The command lines of docs/first_gpu_run.md: their keys exist and fit together."""

import json
import re
from pathlib import Path

import pytest

from quadriga.cli.plan import main as plan
from quadriga.config import Config, load_config, training_findings
from quadriga.config.placement import ACTOR
from quadriga.planning.devices import Devices
from quadriga.planning.plan import make_plan, on_devices
from quadriga.planning.sizes import ModelSizes
from quadriga.planning.time import Lengths
from quadriga_verl.commands.entries import find_entry
from quadriga_verl.commands.translate import translate
from tests.first_gpu_run import PAGE, command_lines

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


def predicted_phases(config: Config, devices: str) -> list[str]:
    """Gigabytes of each phase of a 7B model on some devices."""
    parsed = Devices.parse(devices)
    sizes = {ACTOR: ModelSizes.from_config(QWEN_7B, "a model")}
    plan = make_plan(on_devices(config, parsed), parsed, Lengths(256, 512), sizes, itemsize=2)
    return [f"{phase.total / 1e9:.1f}" for phase in plan.phases]


def test_the_memory_of_each_phase_is_the_plans() -> None:
    _, _, rest = PAGE.read_text("utf-8").partition("## Memory of each phase")
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    numbers = re.findall(r"\d+\.\d", "\n".join(rows))
    lines = command_lines("quadriga train")
    native, beside, asynchronous, _, recipe = (load_config(line).config for line in lines)
    verl = translate(find_entry("main_ppo"), *command_lines("quadriga verl main_ppo")).config
    assert isinstance(verl, Config)
    expected = predicted_phases(native, "1xH100-80GB")
    for config in (beside, verl, asynchronous, recipe):
        expected += predicted_phases(config, "8xH100-80GB")
    assert numbers == expected
