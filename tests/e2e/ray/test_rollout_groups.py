# SPDX-License-Identifier: Apache-2.0
"""Whole runs on Ray whose rollout groups span the actor's ranks, against the same run in one process.

What they do not prove: anything of speed, nor groups on GPUs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("ray_cluster")
COMMON = (
    "trainer.total_training_steps=3",
    "trainer.test_freq=2",
    "data.train_batch_size=5",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.eps=1e-3",
)
GROUPS = ("trainer.backend=ray", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
ACTOR = "actor_rollout_ref.actor"
APART = ["trainer.placement={actor: training, rollout: generation}", "trainer.resource_pools.generation=[4]"]


@pytest.mark.parametrize(
    ("ranks", "layout", "mode"),
    [
        (2, [f"{ACTOR}.tensor_model_parallel_size=2"], "async"),
        (4, [], "sync"),
        (2, APART, "async"),
        pytest.param(4, [f"{ACTOR}.tensor_model_parallel_size=2"], "sync", marks=pytest.mark.slow),
        pytest.param(
            4,
            [f"{ACTOR}.tensor_model_parallel_size=2", f"{ACTOR}.pipeline_model_parallel_size=2"],
            "async",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_groups_learn_what_one_process_does(
    ranks: int,
    layout: list[str],
    mode: str,
    alone: Callable[..., Path],
    train: Callable[..., Path],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Metrics to 1e-4, validation too."""
    keys = (*COMMON, f"actor_rollout_ref.rollout.mode={mode}")
    one = alone(*keys)
    capfd.readouterr()
    run = train(*GROUPS, *keys, *layout, f"trainer.n_gpus_per_node={ranks}")
    output = capfd.readouterr().out
    assert "in groups of 2 ranks, each with a shard of the weights" in output
    assert ("on processes of its own" in output) == (layout == APART)
    ours, theirs = metric_lines(run), metric_lines(one)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] != []
    for left, right in zip(ours, theirs, strict=True):
        for name in left.keys() & right.keys() - {"actor/packed_tokens"}:
            if not name.startswith(("balance/", "timing", "perf/")):
                assert left[name] == pytest.approx(right[name], rel=1e-4, abs=2e-6), (name, left["step"])
