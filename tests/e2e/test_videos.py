# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen2.5-VL learns which way a dot moves in drawn videos, through the configuration.

Each frame of a video to the left is one of a video to the right: only their order tells the two apart.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.cli.main import main
from tests.e2e.colors import REWARD
from tests.vision_folder import DIRECTIONS, moving_dot, write_vision_folder


def dot_row(number: int) -> dict[str, Any]:
    """Four frames, four a second, of a dot in one of two places across its way."""
    direction = DIRECTIONS[number % len(DIRECTIONS)]
    frames = np.stack(
        [np.array(frame) for frame in moving_dot(direction, start=4 if number % 8 < 4 else 8)]
    )
    return {
        "data_source": "dots",
        "prompt": [{"role": "user", "content": "<video> which w1 ?"}],
        "videos": [{"frames": frames.tolist(), "fps": 4.0}],
        "reward_model": {"style": "rule", "ground_truth": direction},
    }


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dots")
    write_vision_folder(folder / "model")
    pq.write_table(
        pa.Table.from_pylist([dot_row(number) for number in range(8)]), folder / "dots.parquet"
    )
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture
def film(
    studio: Path, tmp_path: Path, arguments: Callable[..., list[str]]
) -> Callable[..., list[dict[str, Any]]]:
    """`film(*overrides, run="run")`: a run that must succeed; returns its lines of metrics."""

    def film_here(*overrides: str, run: str = "run") -> list[dict[str, Any]]:
        own = (
            f"data.train_files={studio / 'dots.parquet'}",
            f"data.val_files={studio / 'dots.parquet'}",
            f"actor_rollout_ref.model.path={studio / 'model'}",
            f"custom_reward_function.path={studio / 'reward.py'}",
            "data.mm_processor_kwargs.fps=4",
            "data.train_batch_size=8",
            "data.max_response_length=1",
            "actor_rollout_ref.rollout.n=32",
            "actor_rollout_ref.actor.entropy_coeff=0.3",
        )
        assert main(["train", *arguments(*own, *overrides, run=run)]) == 0
        lines = (tmp_path / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return film_here


@pytest.mark.slow
def test_it_learns_which_way_a_dot_moves(film: Callable[..., list[dict[str, Any]]]) -> None:
    """From one answer in a hundred to nine of ten; each rollout's log-probs are the trainer's to float32 rounding."""
    lines = film("trainer.total_training_steps=80", "trainer.test_freq=80")
    steps = [line for line in lines if "critic/score/mean" in line]
    rewards = [line["critic/score/mean"] for line in steps]
    assert rewards[0] < 0.1 and sum(rewards[-8:]) / 8 > 0.9
    assert all(line["rollout/log_prob_diff_max"] < 2e-5 for line in steps)
    (validated,) = [
        value for line in lines for name, value in line.items() if name.startswith("val-core/dots")
    ]
    assert validated == 1.0


@pytest.mark.slow
def test_hf_takes_the_same_steps(film: Callable[..., list[dict[str, Any]]]) -> None:
    few = ("trainer.total_training_steps=3", "actor_rollout_ref.rollout.n=8")
    by_native = film(*few, run="native")
    others = ("actor_rollout_ref.rollout.name=hf", "data.return_multi_modal_inputs=False")
    by_hf = film(*few, *others, run="hf")
    for one, line in zip(by_native, by_hf, strict=True):
        for name in ("critic/score/mean", "actor/grad_norm", "actor/entropy", "prompt_length/mean"):
            assert line[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_an_adapter_learns_too(film: Callable[..., list[dict[str, Any]]]) -> None:
    """In the decoder and in the vision encoder, by both engines alike."""
    few = (
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.model.lora_rank=4",
    )
    by_native = film(*few, run="native")
    by_hf = film(*few, "actor_rollout_ref.rollout.name=hf", run="hf")
    for one, line in zip(by_native, by_hf, strict=True):
        for name in ("critic/score/mean", "actor/grad_norm", "actor/entropy"):
            assert line[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert all(line["rollout/log_prob_diff_max"] < 2e-5 for line in by_native)
    assert by_native[-1]["actor/grad_norm"] > 0
