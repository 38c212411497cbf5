# SPDX-License-Identifier: Apache-2.0
"""PPO with a critic and a reward model in two of Ray's processes, against the same run in one process.

What it does not prove: anything of speed or of GPUs, nor models that are spread over processes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Lines = Callable[[Path], list[dict[str, Any]]]
# What a process computes follows from the rows that it has: a prompt once for all its answers there.
OF_THE_LAYOUT = ("balance/", "actor/packed_tokens", "critic/packed_tokens")


@pytest.fixture
def judge(judges: Path) -> Path:
    """A random reward model with a template of its own, so that chats travel to it too."""
    return judges / "other"


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("placement", ["together", pytest.param("grouped", marks=pytest.mark.slow)])
def test_critic_and_reward_model_on_two_processes(
    judge: Path,
    alone: Callable[..., Path],
    train: Callable[..., Path],
    metric_lines: Lines,
    capfd: pytest.CaptureFixture[str],
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
    one = metric_lines(alone(*keys))
    capfd.readouterr()
    two = metric_lines(train(*keys, *cluster))
    assert "chats rendered by its own template" in capfd.readouterr().out
    assert len(two) == len(one) == 3
    for ours, theirs in zip(two, one, strict=True):
        names = {name for name in theirs if not name.startswith(OF_THE_LAYOUT)}
        assert {"reward/rm_score/mean", "reward/rule_score/mean", "critic/vf_loss"} <= names
        assert names == {name for name in ours if not name.startswith(OF_THE_LAYOUT)}
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (name, theirs["step"])
