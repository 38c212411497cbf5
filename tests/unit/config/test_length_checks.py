# SPDX-License-Identifier: Apache-2.0
"""Lengths that cannot be right together are refused before torch is loaded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quadriga.config import Config
from quadriga.config.checks import training_findings
from quadriga.errors import ConfigError


def folder_of(path: Path, **described: Any) -> str:
    """A folder with a config.json."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **described}))
    return str(path)


def problems_of(**sections: Any) -> str:
    """The problems of a configuration, as text."""
    problems, _ = training_findings(Config(**sections))
    assert all(isinstance(problem, ConfigError) for problem in problems)
    return "\n".join(map(str, problems))


LENGTHS = {"max_prompt_length": 40, "max_response_length": 30}


@pytest.mark.parametrize(
    ("described", "is_refused"),
    [
        ({"max_position_embeddings": 69}, True),
        ({"max_position_embeddings": 70}, False),
        ({}, False),
        # The text model of a vision-language model counts.
        ({"vision_config": {}, "text_config": {"max_position_embeddings": 69}}, True),
        ({"vision_config": {}, "max_position_embeddings": 69}, False),
    ],
)
def test_positions_of_the_policy(
    described: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    path = folder_of(tmp_path / "model", **described)
    problems = problems_of(data=LENGTHS, actor_rollout_ref={"model": {"path": path}})
    assert (
        f"got 70 tokens, expected at most 69, the positions of {path}" in problems
    ) is is_refused
    # Only transformers knows what such an entry replaces.
    model = {"path": path, "override_config": {"max_position_embeddings": 128}}
    assert "positions" not in problems_of(data=LENGTHS, actor_rollout_ref={"model": model})


def test_positions_of_a_teacher(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "teacher", max_position_embeddings=64)
    section = {"enable": True, "path": path}
    problems = problems_of(data=LENGTHS, distillation=section)
    assert "with 64 positions, for sequences of up to 70 tokens" in problems


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"max_resp_len": 6, "overlong_buffer_cfg": {"enable": True, "len": 7}},
            "reward_model.reward_kwargs.overlong_buffer_cfg.len: got 7",
        ),
        (
            {"overlong_buffer_cfg": {"enable": True, "len": 7}},
            "reward_model.reward_kwargs.max_resp_len: got None",
        ),
        ({"overlong_buffer_cfg": 3}, "reward_model.reward_kwargs.overlong_buffer_cfg: got 3"),
    ],
)
def test_lengths_of_the_penalty_of_dapo(kwargs: dict[str, Any], words: str) -> None:
    section = {"reward_manager": "dapo", "reward_kwargs": kwargs}
    assert words in problems_of(reward_model=section)
    assert words not in problems_of(reward_model={"reward_kwargs": kwargs})


def test_a_command_refuses_lengths_without_torch(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "model", max_position_embeddings=64)
    words = ["train", f"actor_rollout_ref.model.path={path}"]
    program = (
        "import sys\nfrom quadriga.cli.main import main\n"
        f"print(main({words!r}), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2", "False"]
    assert "got 1024 tokens, expected at most 64, the positions of" in done.stderr
