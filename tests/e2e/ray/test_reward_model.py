# SPDX-License-Identifier: Apache-2.0
"""PPO with a critic and a reward model in two of Ray's processes, against the same run in one process.

What it does not prove: anything of speed or of GPUs, nor models that are spread over processes.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Lines = Callable[[Path], list[dict[str, Any]]]
RUN_LIMIT_S = 300
# What a process computes follows from the rows that it has: a prompt once for all its answers there.
OF_THE_LAYOUT = ("balance/", "actor/packed_tokens", "critic/packed_tokens")


@pytest.fixture
def judge(judges: Path) -> Path:
    """A random reward model with a template of its own, so that chats travel to it too."""
    return judges / "other"


@pytest.mark.parametrize("placement", ["together", "grouped"])
def test_critic_and_reward_model_on_two_processes(
    judge: Path,
    train: Callable[..., Path],
    start: Callable[..., subprocess.Popen[str]],
    metric_lines: Lines,
    tmp_path: Path,
    placement: str,
) -> None:
    """The scores, and all that is learned from them, are those of one process, to float32 rounding."""
    keys = (
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=5",
        "reward_model.enable=True",
        f"reward_model.model.path={judge}",
        "reward_model.model.fsdp_config.model_dtype=float32",
        "trainer.total_training_steps=3",
        "trainer.test_freq=3",
    )
    cluster = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", f"trainer.placement={placement}")
    process = start(*keys, *cluster, run="two")
    output, _ = process.communicate(timeout=RUN_LIMIT_S)
    assert process.returncode == 0, output
    assert "chats rendered by its own template" in output
    two, alone = metric_lines(tmp_path / "two"), metric_lines(train(*keys, run="alone"))
    assert len(two) == len(alone) == 3
    for ours, theirs in zip(two, alone, strict=True):
        names = {name for name in theirs if not name.startswith(OF_THE_LAYOUT)}
        assert {"reward/rm_score/mean", "reward/rule_score/mean", "critic/vf_loss"} <= names
        assert names == {name for name in ours if not name.startswith(OF_THE_LAYOUT)}
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (name, theirs["step"])
