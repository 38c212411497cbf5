# SPDX-License-Identifier: Apache-2.0
"""A task for a tiny vision-language model: name the color of a picture. Blindly a quarter of the responses is right."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.vision_folder import COLORS, picture, write_vision_folder

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
"""


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


def write_studio(folder: Path) -> Path:
    """The model, its processor, pictures and the reward function."""
    write_vision_folder(folder / "model")
    for name in ("train", "val"):
        rows = [color_row(number) for number in range(8)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def of_studio(folder: Path) -> tuple[str, ...]:
    """Overrides for a run there: 8 pictures a step, responses of one word."""
    return (
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "data.train_batch_size=8",
        "data.max_response_length=1",
        "actor_rollout_ref.rollout.n=32",
        "actor_rollout_ref.actor.entropy_coeff=0.3",
    )
