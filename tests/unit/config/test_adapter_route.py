# SPDX-License-Identifier: Apache-2.0
"""Whether an adapter travels alone is decided from the configuration, with a reason, and refused where it cannot be."""

import json
from pathlib import Path

import pytest

from quadriga.config import load_config, training_findings
from quadriga.config.adapter import adapter_route
from quadriga.errors import ConfigError

KEY = "actor_rollout_ref.model.lora_merge"
NAME = "actor_rollout_ref.rollout.name"
RANK = "actor_rollout_ref.model.lora_rank=16"
VLLM = f"{NAME}=vllm"


def problems(*overrides: str) -> dict[str, str]:
    """What is said of the key."""
    found, _ = training_findings(load_config(overrides).config)
    return {one.where: str(one) for one in found if one.where == KEY}


@pytest.mark.parametrize(
    ("overrides", "is_alone", "reason"),
    [
        ((VLLM, RANK), True, "vLLM applies it beside the weights"),
        ((VLLM, RANK, f"{KEY}=false"), True, "vLLM applies it beside the weights"),
        ((VLLM, RANK, f"{KEY}=true"), False, "lora_merge=true"),
        ((f"{NAME}=hf", RANK, f"{KEY}=true"), False, "lora_merge=true"),
        ((f"{NAME}=sglang", RANK), False, "sglang takes whole weights only"),
        ((RANK,), False, "native takes whole weights only"),
        (
            (VLLM, "actor_rollout_ref.model.lora_rank=513"),
            False,
            "vLLM applies ranks up to 512 beside the weights, and this one is 513",
        ),
    ],
)
def test_ways(overrides: tuple[str, ...], is_alone: bool, reason: str) -> None:
    route = adapter_route(load_config(overrides).config)
    assert (route.is_alone, route.reason) == (is_alone, reason)
    assert problems(*overrides) == {}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (f"{NAME}=native", f"{KEY}=false"),
            "got false, with actor_rollout_ref.rollout.name=native, expected null: on the",
        ),
        ((f"{NAME}=native", f"{KEY}=true"), "expected null: on the actor's own modules it computes with the adapter"),
        ((f"{NAME}=http", f"{KEY}=true"), "expected null: its servers keep the weights that they have"),
        ((f"{NAME}=sglang", f"{KEY}=false"), "expected null or true: this engine takes whole weights only"),
        ((f"{NAME}=hf", f"{KEY}=false"), "expected null or true: this engine takes whole weights only"),
        (
            (VLLM, f"{KEY}=false", "actor_rollout_ref.model.lora_rank=600"),
            "up to 512 beside the weights, and this one is 600",
        ),
    ],
)
def test_what_an_engine_cannot_do(overrides: tuple[str, ...], said: str) -> None:
    """Told with all other problems before training, and raised wherever the way is asked for."""
    assert said in problems(RANK, *overrides)[KEY]
    with pytest.raises(ConfigError, match="lora_merge"):
        adapter_route(load_config((RANK, *overrides)).config)


def test_float32_on_an_accelerator() -> None:
    """vLLM's kernels there take 16 bits: known once a process has started."""
    route = adapter_route(load_config((VLLM, RANK)).config, is_wide_on_accelerator=True)
    assert not route.is_alone and "16 bits only" in route.reason
    with pytest.raises(ConfigError, match=r"got false.*16 bits only, and these weights are float32"):
        adapter_route(load_config((VLLM, RANK, f"{KEY}=false")).config, is_wide_on_accelerator=True)
    assert not adapter_route(load_config((RANK,)).config, is_wide_on_accelerator=True).is_alone


def test_the_rank_of_an_adapter_to_start_from(tmp_path: Path) -> None:
    """It decides; what cannot be read is told once, under its own key."""
    start = f"actor_rollout_ref.model.lora_adapter_path={tmp_path}"
    found, _ = training_findings(load_config((VLLM, start)).config)
    assert [one.where for one in found if "lora" in one.where or str(tmp_path) in one.where] == [
        "actor_rollout_ref.model.lora_adapter_path"
    ]
    facts = {"peft_type": "LORA", "r": 1024, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(facts))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "this one is 1024" in adapter_route(load_config((VLLM, start)).config).reason
    assert "this one is 1024" in problems(VLLM, start, f"{KEY}=false")[KEY]


def test_without_an_adapter_the_key_is_not_used() -> None:
    found, notices = training_findings(load_config((VLLM, f"{KEY}=false")).config)
    assert not any(one.where == KEY for one in found)
    assert f"{KEY}: not used, for actor_rollout_ref.model.lora_rank is 0." in notices


def test_nothing_generates_in_supervised_learning() -> None:
    found, _ = training_findings(load_config(("model.lora_rank=4", "model.lora_merge=true"), task="sft").config)
    [told] = [str(one) for one in found if one.where == KEY]
    assert "expected null: nothing generates" in told


def test_the_name_that_verl_has() -> None:
    with pytest.raises(ConfigError, match=r"Set actor_rollout_ref\.model\.lora_merge"):
        load_config(("actor_rollout_ref.model.lora.merge=True",))
