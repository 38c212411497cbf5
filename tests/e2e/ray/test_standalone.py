# SPDX-License-Identifier: Apache-2.0
"""A rollout on processes of its own: the numbers of a run in one process, and what the run says when it dies.

What it does not prove: several nodes, nccl, nor that two pools at a time are any faster.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Lines = Callable[[Path], list[dict[str, Any]]]
KEYS = (
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1",
    "trainer.val_before_train=True",
    "trainer.logger=[console,jsonl]",
    "trainer.save_freq=1",
)
APART = (
    "trainer.backend=ray",
    "trainer.placement={actor: training, ref: training, rollout: generation}",
    "trainer.resource_pools.generation=[2]",
)


def test_a_standalone_rollout_gives_the_numbers_of_one_process(
    ray_cluster: str,
    train: Callable[..., Path],
    metric_lines: Lines,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Validation too, with two engines beside one actor; and when the run goes on from a checkpoint.

    To float32 rounding: an engine that has half of the prompts adds up in another order.
    """
    alone = metric_lines(train(*KEYS, run="alone"))
    train(*KEYS, *APART, "trainer.total_training_steps=1", run="apart")
    output = capfd.readouterr().out
    assert "on processes of its own" in output and "2 on" in output
    train(*KEYS, *APART, run="apart")
    assert "resumed from" in capfd.readouterr().out
    apart = metric_lines(tmp_path / "apart")
    assert [line["step"] for line in apart] == [line["step"] for line in alone] == [0, 1, 2]
    for ours, theirs in zip(apart, alone, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (name, theirs["step"])
