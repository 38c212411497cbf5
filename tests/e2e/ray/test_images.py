# SPDX-License-Identifier: Apache-2.0
"""Prompts with images on Ray: a vision-language model on two processes takes the steps of one.

What it does not prove: the same with more processes, or on an accelerator.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.colors import of_studio, write_studio

COMMON = (
    "trainer.total_training_steps=2",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.actor.optim.eps=1.0",
)
SAME = (
    "critic/score/mean",
    "actor/grad_norm",
    "actor/entropy",
    "actor/kl_loss",
    "response_length/mean",
)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_two_processes_take_the_steps_of_one(train: Callable[..., Path], tmp_path: Path) -> None:
    """With shared weights, a divergence from a reference, and the rollout on a copy. Also with a pool of its own
    for the rollout, to which images travel, and weights too."""
    (tmp_path / "studio").mkdir()
    own = (
        *of_studio(write_studio(tmp_path / "studio")),
        *COMMON,
        "actor_rollout_ref.actor.use_kl_loss=True",
    )
    expected = lines(train(*own, run="alone"))
    shared = (
        "trainer.backend=ray",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
    )
    apart = (
        "trainer.backend=ray",
        "trainer.placement={actor: training, ref: training, rollout: generation}",
        "trainer.resource_pools={training: [1], generation: [1]}",
    )
    for name, cluster in (("shared", shared), ("apart", apart)):
        found = lines(train(*own, *cluster, run=name))
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            for key in SAME:
                assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (name, key)
            assert one["rollout/log_prob_diff_max"] < 2e-5


def lines(run: Path) -> list[dict[str, Any]]:
    """Of the metrics."""
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
