# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an adapter is said before a process starts."""

import importlib.util
import json
from pathlib import Path

import pytest

from quadriga.config import adapter, load_config, training_findings

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
    assert found(RANK, f"{MODEL}.target_modules=[q_proj, v_proj]", f"{MODEL}.exclude_modules='.*7.*'") == ({}, [])


def test_details_without_an_adapter() -> None:
    problems, notices = found(f"{MODEL}.lora_alpha=32", f"{MODEL}.target_modules=[q_proj]")
    assert problems == {}
    assert notices == [f"{MODEL}.lora_alpha, {MODEL}.target_modules: not used, for {MODEL}.lora_rank is 0."]


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_layers_that_are_cut_have_no_adapter(name: str) -> None:
    key = f"actor_rollout_ref.actor.{name}"
    problems, _ = found(RANK, f"{key}=2")
    assert "got 2, with an adapter, expected 1" in problems[key]
    assert "with an adapter" not in found(f"{key}=2")[0].get(key, "")


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
    assert "got 8, with an adapter of rank 4 in lora_adapter_path, expected 0 or 4" in problems[f"{MODEL}.lora_rank"]
    assert "got 9, with 8 in the adapter" in problems[f"{MODEL}.lora_alpha"]
    assert f"{MODEL}.target_modules" in problems
