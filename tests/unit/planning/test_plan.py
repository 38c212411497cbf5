# SPDX-License-Identifier: Apache-2.0
"""`quadriga plan`: what fits, what it takes, and what it cannot know."""

import json
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main
from quadriga.cli.plan import main as plan
from quadriga.config import load_config

SEVEN_B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def write_model(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(SEVEN_B | changes))
    return folder


def words(model: Path, devices: str, *overrides: str) -> list[str]:
    return [f"actor_rollout_ref.model.path={model}", "--devices", devices, *overrides]


def test_seven_billion_on_one_and_on_eight(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 16 bytes of state for a parameter, and its bfloat16 copy: more than one device has.
    assert plan(words(model, "H100-80GB")) == 1
    text = capsys.readouterr().out
    assert "does not fit" in text
    # What is suggested has been tried: neither fewer tokens nor vLLM are enough here.
    _, _, changes = text.partition("Changes with which a layout fits")
    assert "model.lora_rank=16" in changes and "--devices 4xH100-80GB" in changes
    assert "ppo_max_token_len" not in changes and "vllm" not in changes
    assert plan(words(model, "H100-80GB", "actor_rollout_ref.model.lora_rank=16")) == 0
    capsys.readouterr()

    file = tmp_path / "plan.yaml"
    assert plan([*words(model, "8xH100-80GB"), "--write", str(file)]) == 0
    text = capsys.readouterr().out
    assert "7615.6 M parameters, fsdp=8" in text
    assert all(phase in text for phase in ("generation", "log-probs", "update", "weight sync"))
    # What is written is a configuration of eight ranks.
    config = load_config([], [file]).config
    assert config.trainer.n_gpus_per_node == 8
    # Of a step with many tokens the largest budget is found: it fits, and a larger one does not.
    many = [
        "data.train_batch_size=1024",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1024",
        "actor_rollout_ref.rollout.n=16",
    ]
    plan([*words(model, "8xH100-80GB"), *many])
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "largest ppo_max_token_len" in line)
    largest = int(line.rpartition(" ")[2])
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    assert plan(words(model, "8xH100-80GB", f"{key}={largest}", *many)) == 0
    assert plan(words(model, "8xH100-80GB", f"{key}={largest + 4096}", *many)) == 1


def test_half_of_the_devices_generate(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM takes nine tenths of those; the others are sharded in layouts of four."""
    overrides = [
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.backend=ray",
        "trainer.placement={actor: training, ref: training, rollout: generation}",
        "trainer.resource_pools={training: [4], generation: [4]}",
    ]
    assert plan(words(model, "8xH100-80GB", *overrides)) == 0
    text = capsys.readouterr().out
    assert "rollout, generation: 76.4 GB (rollout 76.4)" in text
    assert "fits: 53% of a device, limited by" in text
    assert "fsdp_size=4, activations recomputed" in text and "fsdp_size=8" not in text


def test_a_copy_of_the_weights_is_freed_while_the_models_train(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`native` generates with a copy of weights that are sharded."""
    log_probs = {}
    for frees in ("true", "false"):
        plan([*words(model, "8xH100-80GB"), f"actor_rollout_ref.rollout.free_cache_engine={frees}"])
        lines = capsys.readouterr().out.splitlines()
        log_probs[frees] = next(line for line in lines if line.startswith("  actor, log-probs"))
        assert any("generation" in line and "weights of the rollout 15.2" in line for line in lines)
    assert "rollout" not in log_probs["true"] and "rollout 15.2" in log_probs["false"]


def test_a_step_takes_longer_with_longer_responses(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = []
    for mean in ("100", "200"):
        plan([*words(model, "8xH100-80GB"), "--mean-response", mean])
        lines = capsys.readouterr().out.splitlines()
        line = next(line for line in lines if line.startswith("  all "))
        seconds.append(float(line.split()[1].rstrip(",")))
    assert 1.2 < seconds[1] / seconds[0] < 2.1


@pytest.mark.parametrize(
    ("devices", "changes", "problem"),
    [
        ("8xH100", {}, "H100-80GB"),
        ("0xH100-80GB", {}, "--devices"),
        ("H100-80GB", {"vocab_size": None}, "vocab_size"),
        ("H100-80GB", {"model_type": None}, "config.json: got no value, expected model_type"),
        ("H100-80GB --mean-response 600", {}, "data.max_response_length=512"),
        ("H100-80GB", {"num_experts": 8}, "a mixture of experts"),
        ("9xH100-80GB", {}, "9 devices"),
    ],
)
def test_what_a_plan_cannot_know(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    devices: str,
    changes: dict[str, Any],
    problem: str,
) -> None:
    folder = write_model(tmp_path, **changes)
    assert main(["plan", *words(folder, *devices.split())]) == 2
    assert problem in capsys.readouterr().err


def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(
        tmp_path,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
    )
    # The default batch of long sequences takes minutes to measure.
    sizes = ("train_batch_size=8", "max_prompt_length=16", "max_response_length=32")
    assert plan(words(folder, "cpu", *(f"data.{size}" for size in sizes))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Measuring this CPU")
    assert "measured: float32 products and copies" in lines[1]
