# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an adapter, and whether it travels alone: said before a process starts."""

import importlib.util
import json
from pathlib import Path

import pytest

from quadriga.config import adapter, load_config, training_findings
from quadriga.config.adapter import adapter_route
from quadriga.errors import ConfigError

MODEL = "actor_rollout_ref.model"
RANK = f"{MODEL}.lora_rank=8"
FACTS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}


def found(*overrides: str) -> tuple[dict[str, str], list[str]]:
    """Problems and notices that concern an adapter."""
    problems, notices = training_findings(load_config(overrides).config)
    keys = ("lora", "modules", "_model_parallel_size")
    mine = [notice for notice in notices if "lora_rank" in notice]
    return {one.where: str(one) for one in problems if any(key in one.where for key in keys)}, mine


def test_an_adapter_by_its_rank_is_taken() -> None:
    assert found(RANK) == ({}, [])
    assert found(
        RANK, f"{MODEL}.target_modules=[q_proj, v_proj]", f"{MODEL}.exclude_modules='.*7.*'"
    ) == ({}, [])


def test_details_without_an_adapter() -> None:
    problems, notices = found(f"{MODEL}.lora_alpha=32", f"{MODEL}.target_modules=[q_proj]")
    assert problems == {}
    assert notices == [
        f"{MODEL}.lora_alpha, {MODEL}.target_modules: not used because {MODEL}.lora_rank is 0."
    ]


def test_nothing_to_train() -> None:
    assert list(found(RANK, f"{MODEL}.target_modules=[]")[0]) == [f"{MODEL}.target_modules"]


def test_peft_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    problems, _ = found(RANK)
    assert "pip install -e '.[peft]'" in problems[f"{MODEL}.lora_rank"]
    assert found() == ({}, [])
    assert importlib.util.find_spec("peft") is not None


def test_an_adapter_to_start_from(tmp_path: Path) -> None:
    """It says what it is; what the configuration says beside it must be the same."""
    key = f"{MODEL}.lora_adapter_path"
    start = f"{key}={tmp_path}"
    assert "no adapter_config.json" in found(start)[0][key]
    (tmp_path / "adapter_config.json").write_text("{")
    assert "no adapter_model.safetensors" in found(start)[0][key]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "no JSON" in found(start)[0][key]
    (tmp_path / "adapter_config.json").write_text(json.dumps(FACTS | {"use_dora": True}))
    assert "use_dora=True, expected plain LoRA" in found(start)[0][key]
    (tmp_path / "adapter_config.json").write_text(json.dumps(FACTS))
    same = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.target_modules=[q_proj]")
    assert found(start) == found(start, *same) == ({}, [])
    problems, _ = found(start, RANK, f"{MODEL}.lora_alpha=9", f"{MODEL}.target_modules=all-linear")
    assert (
        "got 8, with an adapter of rank 4 in lora_adapter_path, expected 0 or 4"
        in problems[f"{MODEL}.lora_rank"]
    )
    assert "got 9, with 8 in the adapter" in problems[f"{MODEL}.lora_alpha"]
    assert f"{MODEL}.target_modules" in problems


KEY = "actor_rollout_ref.model.lora_merge"
NAME = "actor_rollout_ref.rollout.name"
RANK_ROUTE = "actor_rollout_ref.model.lora_rank=16"
VLLM = f"{NAME}=vllm"


def problems(*overrides: str) -> dict[str, str]:
    """What is said of the key."""
    found, _ = training_findings(load_config(overrides).config)
    return {one.where: str(one) for one in found if one.where == KEY}


@pytest.mark.parametrize(
    ("overrides", "is_alone", "reason"),
    [
        ((VLLM, RANK_ROUTE), True, "vLLM applies it beside the weights"),
        ((VLLM, RANK_ROUTE, f"{KEY}=false"), True, "vLLM applies it beside the weights"),
        ((VLLM, RANK_ROUTE, f"{KEY}=true"), False, "lora_merge=true"),
        ((f"{NAME}=hf", RANK_ROUTE, f"{KEY}=true"), False, "lora_merge=true"),
        ((f"{NAME}=sglang", RANK_ROUTE), False, "sglang needs merged weights"),
        ((RANK_ROUTE,), False, "native needs merged weights"),
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
            "got false, with actor_rollout_ref.rollout.name=native, expected null: the",
        ),
        (
            (f"{NAME}=native", f"{KEY}=true"),
            "expected null: the actor's own modules compute with the adapter",
        ),
        (
            (f"{NAME}=http", f"{KEY}=true"),
            "expected null: its servers keep their weights",
        ),
        (
            (f"{NAME}=sglang", f"{KEY}=false"),
            "expected null or true: sglang needs merged weights",
        ),
        ((f"{NAME}=hf", f"{KEY}=false"), "expected null or true: hf needs merged weights"),
        (
            (VLLM, f"{KEY}=false", "actor_rollout_ref.model.lora_rank=600"),
            "up to 512 beside the weights, and this one is 600",
        ),
    ],
)
def test_what_an_engine_cannot_do(overrides: tuple[str, ...], said: str) -> None:
    """Told with all other problems before training, and raised wherever the way is asked for."""
    assert said in problems(RANK_ROUTE, *overrides)[KEY]
    with pytest.raises(ConfigError, match="lora_merge"):
        adapter_route(load_config((RANK_ROUTE, *overrides)).config)


def test_float32_on_an_accelerator() -> None:
    """vLLM's kernels there take 16 bits: known once a process has started."""
    route = adapter_route(load_config((VLLM, RANK_ROUTE)).config, is_wide_on_accelerator=True)
    assert not route.is_alone and "16-bit adapters only" in route.reason
    with pytest.raises(
        ConfigError, match=r"got false.*16-bit adapters only, and these weights are float32"
    ):
        adapter_route(
            load_config((VLLM, RANK_ROUTE, f"{KEY}=false")).config, is_wide_on_accelerator=True
        )
    assert not adapter_route(
        load_config((RANK_ROUTE,)).config, is_wide_on_accelerator=True
    ).is_alone


def test_the_rank_of_an_adapter_to_start_from(tmp_path: Path) -> None:
    """It decides; what cannot be read is told once, under its own key."""
    start = f"actor_rollout_ref.model.lora_adapter_path={tmp_path}"
    found, _ = training_findings(load_config((VLLM, start)).config)
    assert [one.where for one in found if "lora" in one.where or str(tmp_path) in one.where] == [
        "actor_rollout_ref.model.lora_adapter_path"
    ]
    facts = {
        "peft_type": "LORA",
        "r": 1024,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(facts))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "this one is 1024" in adapter_route(load_config((VLLM, start)).config).reason
    assert "this one is 1024" in problems(VLLM, start, f"{KEY}=false")[KEY]


def test_without_an_adapter_the_key_is_not_used() -> None:
    found, notices = training_findings(load_config((VLLM, f"{KEY}=false")).config)
    assert not any(one.where == KEY for one in found)
    assert f"{KEY}: not used because actor_rollout_ref.model.lora_rank is 0." in notices


def test_nothing_generates_in_supervised_learning() -> None:
    found, _ = training_findings(
        load_config(("model.lora_rank=4", "model.lora_merge=true"), task="sft").config
    )
    [told] = [str(one) for one in found if one.where == KEY]
    assert "expected null: nothing generates" in told
