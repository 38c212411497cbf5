# SPDX-License-Identifier: Apache-2.0
"""Every recipe of configs/recipes, over the settings of a tiny model: its reward rises within a few steps.

What it does not prove: that one recipe is better than another, or that any of them suits a large model as it stands.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main
from quadriga.config import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted((CONFIGS / "recipes").glob("*.yaml"))
NUM_STEPS = 16
# ReMax has one response to a prompt, and learns later.
MORE_STEPS = {"remax": 30}
# A recipe is for long answers and batches of 64 prompts, and a clip of 4e-4 lets a policy move that little.
TINY = {
    "cispo": ("actor_rollout_ref.actor.ppo_mini_batch_size=4",),
    "dapo": (
        "reward_model.reward_kwargs={max_resp_len: 8, overlong_buffer_cfg: {enable: true, len: 2, log: true}}",
    ),
    "gspo": (
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.clip_ratio_high=0.2",
    ),
    "ppo": ("critic.optim.lr=1e-2",),
}


def test_there_are_recipes() -> None:
    """The folder was found."""
    assert {"dapo", "ppo"} <= {file.stem for file in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_stands_over_the_base(recipe: Path) -> None:
    """As its first line says that it is used; what it says wins."""
    base, loaded = (
        load_config([], [CONFIGS / "grpo.yaml"]),
        load_config([], [CONFIGS / "grpo.yaml", recipe]),
    )
    assert loaded.config != base.config
    assert loaded.config.data == base.config.data


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_reward_rises(
    recipe: Path,
    arguments: Callable[..., list[str]],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    """From the share of the wanted letter among a few dozen to half of the answer."""
    num_steps = MORE_STEPS.get(recipe.stem, NUM_STEPS)
    changes = (
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        f"trainer.total_training_steps={num_steps}",
        *TINY.get(recipe.stem, ()),
    )
    # How many answers a prompt has is the recipe's own affair.
    words = [
        word for word in arguments(*changes) if not word.startswith("actor_rollout_ref.rollout.n=")
    ]
    assert main(["train", "--config", str(recipe), *words]) == 0
    rewards = [line["critic/score/mean"] for line in metric_lines(tmp_path / "run")]
    assert len(rewards) == num_steps
    assert sum(rewards[-3:]) / 3 > max(0.3, 2 * rewards[0])
