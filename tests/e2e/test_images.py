# SPDX-License-Identifier: Apache-2.0
"""A tiny model that sees learns to name the color of a picture, through the configuration.

Without the picture the best that it could do is one color for all, which is right for a quarter of them.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main
from tests.vision_folder import COLORS, picture, write_vision_folder

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the color, a little for another one."""
    word = solution_str.strip()
    return 1.0 if word == ground_truth else 0.25 if word in ("red", "green", "blue", "white") else 0.0
'''
BLIND = 0.25 + 0.75 * 0.25
"""The best average score of an answer that does not depend on the picture."""


def png(color: str, width: int, height: int) -> dict[str, bytes]:
    stream = io.BytesIO()
    picture(color, width, height).save(stream, "png")
    return {"bytes": stream.getvalue()}


def color_row(number: int) -> dict[str, Any]:
    """A picture of one color, in one of two sizes."""
    color = COLORS[number % len(COLORS)]
    return {
        "data_source": "colors",
        "prompt": [{"role": "user", "content": "<image> which color ?"}],
        "images": [png(color, 16, 16 if number % 8 < 4 else 8)],
        "reward_model": {"style": "rule", "ground_truth": color},
    }


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory, write: Callable[..., Path]) -> Path:
    """A folder with the model, its processor, pictures and the reward function."""
    folder = tmp_path_factory.mktemp("studio")
    write_vision_folder(folder / "model")
    write(folder / "train.parquet", [color_row(number) for number in range(8)])
    write(folder / "val.parquet", [color_row(number) for number in range(8)])
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture
def paint(studio: Path, tmp_path: Path, arguments: Callable[..., list[str]]) -> Callable[..., list[dict[str, Any]]]:
    """`paint(*overrides, run="run")`: a run that must succeed; returns its lines of metrics."""

    def paint_here(*overrides: str, run: str = "run") -> list[dict[str, Any]]:
        own = (
            f"data.train_files={studio / 'train.parquet'}",
            f"data.val_files={studio / 'val.parquet'}",
            f"actor_rollout_ref.model.path={studio / 'model'}",
            f"custom_reward_function.path={studio / 'reward.py'}",
            "data.train_batch_size=8",
            "data.max_response_length=1",
            "actor_rollout_ref.rollout.n=16",
            "actor_rollout_ref.actor.optim.lr=3e-3",
            "trainer.total_training_steps=40",
            "trainer.test_freq=40",
        )
        assert main(["train", *arguments(*own, *overrides, run=run)]) == 0
        lines = (tmp_path / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return paint_here


SHORT = ("trainer.total_training_steps=2", "trainer.test_freq=-1")


@pytest.mark.slow
def test_it_learns_to_see(paint: Callable[..., list[dict[str, Any]]]) -> None:
    """By the native engine, with a reference; its log-probs are the trainer's to rounding in each step."""
    lines = paint("actor_rollout_ref.rollout.name=native", "actor_rollout_ref.actor.use_kl_loss=True")
    rewards = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    assert rewards[0] < 0.2 and rewards[-1] > 0.9 > BLIND
    for line in lines:
        assert line.get("rollout/log_prob_diff_max", 0.0) < 2e-5
