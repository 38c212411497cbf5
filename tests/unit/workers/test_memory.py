# SPDX-License-Identifier: Apache-2.0
"""What other roles on the same device add to a prediction."""

from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig

from quadriga.config import Config
from quadriga.workers import memory


def test_a_role_beside_without_sizes_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LlamaConfig().save_pretrained(tmp_path / "policy")
    GPT2Config().save_pretrained(tmp_path / "judge")
    config = Config(
        actor_rollout_ref={"model": {"path": str(tmp_path / "policy")}},
        algorithm={"adv_estimator": "gae"},
        critic={"model": {"path": str(tmp_path / "policy")}},
        reward_model={"enable": True, "model": {"path": str(tmp_path / "judge")}},
    )
    plans = memory._plan_other_roles(config, "actor_rollout_ref.actor", 2)
    assert list(plans) == ["critic"]
    assert "memory of reward_model is not predicted" in caplog.text
