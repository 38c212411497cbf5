# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a reward model is said before anything is loaded, from what its folder says of itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.config import load_config, training_findings

ON = "reward_model.enable=True"
PATH = "reward_model.model.path"
Found = tuple[dict[str, str], list[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`folder(**described)`: `judge/config.json` below the current directory holds this."""
    monkeypatch.chdir(tmp_path)

    def write(**described: Any) -> None:
        (tmp_path / "judge").mkdir(exist_ok=True)
        (tmp_path / "judge" / "config.json").write_text(json.dumps(described))

    return write


def found(*overrides: str) -> Found:
    """Problems and notices that concern a reward model."""
    problems, notices = training_findings(load_config([f"{PATH}=judge", *overrides]).config)
    mine = [notice for notice in notices if notice.startswith("reward_model.")]
    return {one.where: str(one) for one in problems if one.where.startswith("reward_model.")}, mine


def test_a_classifier_with_one_label_is_taken(folder: Callable) -> None:
    folder(architectures=["LlamaForSequenceClassification"], id2label={"0": "LABEL_0"}, max_position_embeddings=4096)
    assert found(ON) == ({}, [])
    # By its name in a configuration, and where nothing is said of the architecture.
    folder(num_labels=1)
    assert found(ON) == ({}, [])


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "names Qwen2ForCausalLM: it has no classification head"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "a classifier with 2 labels"),
        ({"id2label": {"0": "bad", "1": "so", "2": "good"}}, "a classifier with 3 labels"),
        ({"num_labels": 5}, "a classifier with 5 labels"),
    ],
)
def test_what_cannot_score_is_refused(folder: Callable, described: dict[str, Any], said: str) -> None:
    folder(**described)
    problems, _ = found(ON)
    assert list(problems) == [PATH] and said in problems[PATH]


def test_code_of_its_own_may_have_a_head_of_its_own_name(folder: Callable) -> None:
    folder(architectures=["JudgeModel"], num_labels=1)
    assert found(ON, "reward_model.model.trust_remote_code=True") == ({}, [])
    assert list(found(ON)[0]) == [PATH]


def test_paths(folder: Callable) -> None:
    assert "got null, with reward_model.enable=True" in found(ON, f"{PATH}=null")[0][PATH]
    assert "expected a model's folder" in found(ON, f"{PATH}=./nowhere")[0][PATH]
    folder()
    Path("judge/config.json").unlink()
    assert "without a config.json" in found(ON)[0][PATH]
    Path("judge/config.json").write_text("{")
    assert "expected JSON" in found(ON)[0][PATH]


def test_lengths(folder: Callable) -> None:
    """A sequence of the policy has up to 1024 tokens here."""
    folder(num_labels=1, max_position_embeddings=1000)
    _, (notice,) = found(ON)
    assert "1000 tokens, but a sequence of the policy may have 1024" in notice
    _, (notice,) = found(ON, "reward_model.max_length=100")
    assert notice.startswith("reward_model.max_length: 100 tokens")
    problems, _ = found(ON, "reward_model.max_length=1001")
    assert "expected at most 1000" in problems["reward_model.max_length"]


def test_how_passes_are_cut(folder: Callable) -> None:
    folder(num_labels=1)
    _, (notice,) = found(ON, "reward_model.micro_batch_size_per_gpu=2", "reward_model.use_dynamic_bsz=True")
    assert notice.startswith("reward_model.micro_batch_size_per_gpu: not used")
    _, (notice,) = found(ON, "reward_model.forward_max_token_len_per_gpu=1000")
    assert "1000 tokens, but a sequence may have 1024" in notice


def test_both_scores_are_added_and_keys_without_a_model_are_not_used(folder: Callable) -> None:
    folder(num_labels=1)
    Path("reward.py").touch()
    _, (notice,) = found(ON, "custom_reward_function.path=reward.py")
    assert notice.endswith("the reward is the sum of both scores.")
    _, (notice,) = found("reward_model.max_length=7")
    assert notice == "reward_model.model.path, reward_model.max_length: not used, for reward_model.enable is false."
