# SPDX-License-Identifier: Apache-2.0
"""A rollout on processes of its own: the numbers of a run in one process.

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
    "trainer.total_training_steps=3",
    "trainer.test_freq=3",
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
    """Validation too, with two engines beside one actor, which goes on from a checkpoint of the run in one process.

    To float32 rounding: an engine that has half of the prompts adds up in another order.
    """
    alone = train(*KEYS, run="alone")
    capfd.readouterr()
    source = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={alone / 'global_step_1'}",
    )
    apart = metric_lines(train(*KEYS, *APART, *source, run="apart"))
    output = capfd.readouterr().out
    assert "on processes of its own" in output and "2 on" in output and "resumed from" in output
    assert [line["step"] for line in apart] == [2, 3]
    assert "val-core/letters/reward/mean@1" in apart[-1]
    for ours, theirs in zip(apart, metric_lines(alone)[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (
                name,
                theirs["step"],
            )
